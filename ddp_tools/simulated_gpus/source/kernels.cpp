// Kernels: none. operators.cpp computes in their place; one that is launched all the same is named
// and refused.
#include "simulated.h"

#include <cstdio>
#include <cstring>
#include <unordered_map>

using namespace simulated;

static thread_local bool only_asks = false;

static std::unordered_map<const void*, const char*>& names() {
  static auto& all = *new std::unordered_map<const void*, const char*>;  // outlives all that exits
  return all;
}

static cudaError_t refuse(const void* kernel) {
  if (only_asks) return cudaSuccess;
  const auto found = names().find(kernel);
  const char* name = found == names().end() ? "without a name" : found->second;
  std::fprintf(stderr, "simulated GPU: it runs no CUDA kernels, and was given one: %s\n", name);
  return fail(cudaErrorNotSupported);
}

extern "C" {

bool* simulated_gpus_only_asks() { return &only_asks; }

// Called by what nvcc writes into each library, as it is loaded; it is in none of the headers.
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*,
                            void*, void*, int*) {
  names()[host] = name;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return refuse(kernel);
}
cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return refuse(kernel);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* kernel, void**) {
  return refuse(kernel);
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  std::memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->ptxVersion = attributes->binaryVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int,
                                                                   size_t, unsigned) {
  *blocks = 1;
  return cudaSuccess;
}

}  // extern "C"

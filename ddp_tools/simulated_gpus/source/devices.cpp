// The GPUs that there are, and a driver that answers what torch asks it.
//
// Preloaded, these functions stand before those of libcudart. What is not defined here is answered
// by the real library: the texts of its errors, for one, need no driver.
#include "simulated.h"

#include <cuda.h>
#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>

namespace simulated {

static thread_local int chosen = 0;
static thread_local cudaError_t last = cudaSuccess;

int number(const char* variable) {
  const char* text = std::getenv(variable);
  return text ? std::atoi(text) : 0;
}

// As CUDA does: the first word that names no GPU hides all that follow.
static std::vector<int> find_visible() {
  std::vector<int> found;
  const int count = number("SIMULATED_GPUS");
  const char* variable = std::getenv("CUDA_VISIBLE_DEVICES");
  if (!variable) {
    for (int i = 0; i < count; ++i) found.push_back(i);
    return found;
  }
  std::stringstream words(variable);
  for (std::string word; std::getline(words, word, ',');) {
    char* end = nullptr;
    const long i = std::strtol(word.c_str(), &end, 10);
    if (end == word.c_str() || *end || i < 0 || i >= count) break;
    found.push_back(static_cast<int>(i));
  }
  return found;
}
static const std::vector<int>& visible() {
  static const auto& all = *new std::vector<int>(find_visible());
  return all;
}
static bool is_there(int device) {
  return device >= 0 && device < static_cast<int>(visible().size());
}

int physical(int device) { return visible().at(device); }
int current_device() { return chosen; }

// Slurm's nodes may be one machine; their GPUs are others all the same.
static std::string node() {
  const char* name = std::getenv("SLURMD_NODENAME");
  return name ? name : "";
}

// A process that is forked later, such as a loader's worker, has told already.
void announce() {
  static std::atomic<bool> told{false};
  if (told.exchange(true)) return;
  std::string line;
  for (const char* variable : {"RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"}) {
    const char* rank = std::getenv(variable);
    if (rank && line.empty()) line = "rank " + std::string(rank) + ": ";
  }
  line += "simulated GPU " + std::to_string(physical(chosen));
  if (!node().empty()) line += " of " + node();
  line += ", computed on the CPU\n";
  if (write(STDERR_FILENO, line.data(), line.size()) < 0) return;  // in one piece, or not at all
}
cudaError_t fail(cudaError_t error) { return last = error; }

}  // namespace simulated
using namespace simulated;

extern "C" {

cudaError_t cudaGetLastError() {
  const cudaError_t was = last;
  last = cudaSuccess;
  return was;
}
cudaError_t cudaPeekAtLastError() { return last; }

cudaError_t cudaGetDeviceCount(int* count) {
  *count = static_cast<int>(visible().size());
  return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int* device) {
  *device = chosen;
  return visible().empty() ? fail(cudaErrorNoDevice) : cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (!is_there(device)) return fail(cudaErrorInvalidDevice);
  chosen = device;
  return cudaSuccess;
}

// The limits of a kernel's grid are those that torch divides by; no kernel runs.
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  if (!is_there(device)) return fail(cudaErrorInvalidDevice);
  std::memset(p, 0, sizeof *p);
  std::snprintf(p->name, sizeof p->name, "simulated GPU");
  p->uuid.bytes[0] = static_cast<char>(1 + physical(device));
  std::strncpy(p->uuid.bytes + 1, node().c_str(), sizeof p->uuid.bytes - 1);
  p->pciBusID = 1 + physical(device);
  p->totalGlobalMem = static_cast<size_t>(number("SIMULATED_GPUS_MEMORY_MB")) << 20;
  p->major = 9;  // Hopper: what a script does for bfloat16, it does
  p->multiProcessorCount = 4;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerBlock = p->sharedMemPerBlockOptin = p->sharedMemPerMultiprocessor = 48 << 10;
  p->regsPerBlock = p->regsPerMultiprocessor = 64 << 10;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->l2CacheSize = 1 << 20;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp p;
  if (cudaError_t error = cudaGetDeviceProperties(&p, device)) return error;
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxGridDimX: *value = p.maxGridSize[0]; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = static_cast<int>(p.sharedMemPerBlock); break;
    default: *value = 0;
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  if (!is_there(device)) return fail(cudaErrorInvalidDevice);
  std::snprintf(text, size, "0000:%02x:00.0", 1 + physical(device));
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

// ---- The driver. Each name that torch asks the driver for and that is not here, build.py
// makes another name of simulated_gpus_refuse, so that this library is a whole libcuda.so.1.

CUresult simulated_gpus_refuse() { return CUDA_ERROR_NOT_SUPPORTED; }

CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "a simulated GPU runs no compiled kernels: export TORCH_COMPILE_DISABLE=1 to run without";
  return CUDA_SUCCESS;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (!*function) *function = reinterpret_cast<void*>(simulated_gpus_refuse);
  if (found) *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

}  // extern "C"

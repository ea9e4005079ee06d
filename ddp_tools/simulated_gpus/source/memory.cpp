// The memory of the simulated GPUs: the host's, counted, so that it ends where `gpus` says.
#include "simulated.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

using namespace simulated;

namespace {

constexpr int kPinned = -1;
struct Range {
  size_t size;
  int device;  // or kPinned
};
struct Memory {
  std::mutex lock;
  std::map<const char*, Range> ranges;  // by their first byte
  std::map<int, size_t> used;           // by device

  size_t capacity() { return static_cast<size_t>(number("SIMULATED_GPUS_MEMORY_MB")) << 20; }

  // The range in which a pointer lies, or nullptr.
  const Range* find(const void* pointer) {
    auto next = ranges.upper_bound(static_cast<const char*>(pointer));
    if (next == ranges.begin()) return nullptr;
    --next;
    return pointer < next->first + next->second.size ? &next->second : nullptr;
  }
  cudaError_t take(void** bytes, size_t size, int device) {
    std::lock_guard<std::mutex> guard(lock);
    const bool fits = device == kPinned || used[device] + size <= capacity();
    if (!fits || posix_memalign(bytes, 4096, size ? size : 1))
      return fail(cudaErrorMemoryAllocation);
    used[device] += size;
    ranges[static_cast<char*>(*bytes)] = {size, device};
    return cudaSuccess;
  }
  cudaError_t release(void* bytes) {
    std::lock_guard<std::mutex> guard(lock);
    const auto found = ranges.find(static_cast<char*>(bytes));
    if (found == ranges.end()) return bytes ? fail(cudaErrorInvalidValue) : cudaSuccess;
    used[found->second.device] -= found->second.size;
    ranges.erase(found);
    std::free(bytes);
    return cudaSuccess;
  }
};

Memory& memory() {
  static auto& all = *new Memory;  // outlives all that frees at the end of the process
  return all;
}

}  // namespace

extern "C" {

cudaError_t cudaMalloc(void** bytes, size_t size) {
  if (cudaError_t error = memory().take(bytes, size, current_device())) return error;
  announce();
  std::memset(*bytes, 0x7f, size);  // 3e38 as a float: who reads before he writes shall see it
  return cudaSuccess;
}
cudaError_t cudaFree(void* bytes) {
  if (bytes) cudaDeviceSynchronize();
  return memory().release(bytes);
}
cudaError_t cudaHostAlloc(void** bytes, size_t size, unsigned) {
  return memory().take(bytes, size, kPinned);
}
cudaError_t cudaFreeHost(void* bytes) { return memory().release(bytes); }
cudaError_t cudaHostRegister(void*, size_t, unsigned) { return cudaSuccess; }
cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  std::memset(attributes, 0, sizeof *attributes);
  std::lock_guard<std::mutex> guard(memory().lock);
  const Range* range = memory().find(pointer);
  attributes->type = cudaMemoryTypeUnregistered;
  attributes->device = range && range->device != kPinned ? range->device : current_device();
  if (!range) return cudaSuccess;
  attributes->devicePointer = const_cast<void*>(pointer);
  attributes->type = range->device == kPinned ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  if (range->device == kPinned) attributes->hostPointer = const_cast<void*>(pointer);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  std::lock_guard<std::mutex> guard(memory().lock);
  *total = memory().capacity();
  *free = *total - memory().used[current_device()];
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind,
                            cudaStream_t stream) {
  if (captures(stream)) {
    record([=] { std::memmove(to, from, size); });
    return cudaSuccess;
  }
  wait(pending(stream));
  std::memmove(to, from, size);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind kind) {
  return cudaMemcpyAsync(to, from, size, kind, nullptr);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size,
                                cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, stream);
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t stream) {
  if (captures(stream)) {
    record([=] { std::memset(to, value, size); });
    return cudaSuccess;
  }
  wait(pending(stream));
  std::memset(to, value, size);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t size) {
  return cudaMemsetAsync(to, value, size, nullptr);
}

}  // extern "C"

// Streams and events. Only collectives take time; what waits for them waits as on a GPU.
#include "simulated.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

namespace simulated {

// The default stream has the same handle on each GPU.
using Key = std::pair<int, cudaStream_t>;
static Key key(cudaStream_t stream) { return {stream ? -1 : current_device(), stream}; }

struct Event {
  Works works;
  Clock::time_point recorded;
  bool is_recorded = false;
  unsigned long long capture = 0;
};

static std::mutex lock;  // of the streams, and of what is in each event
static std::map<Key, Works>& streams() {
  static auto& all = *new std::map<Key, Works>;
  return all;
}

bool done(const Work& work) {
  return work.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}
void wait(const Works& works) {
  for (const Work& work : works) work.wait();
}
Works pending(cudaStream_t stream) {
  std::lock_guard<std::mutex> guard(lock);
  Works& works = streams()[key(stream)];
  works.erase(std::remove_if(works.begin(), works.end(), done), works.end());
  return works;
}
Work enqueue(cudaStream_t stream, std::function<void()> work) {
  std::promise<Clock::time_point> promise;
  const Work mine = promise.get_future().share();
  const Works before = pending(stream);
  std::thread([before, work = std::move(work), promise = std::move(promise)]() mutable {
    wait(before);
    work();
    promise.set_value(Clock::now());
  }).detach();
  std::lock_guard<std::mutex> guard(lock);
  streams()[key(stream)] = {mine};  // which those before are part of
  return mine;
}

static Event* known(cudaEvent_t event) { return reinterpret_cast<Event*>(event); }
static Works works_of(cudaEvent_t event) {
  std::lock_guard<std::mutex> guard(lock);
  return known(event)->works;
}
// When all before the event was done, as a GPU's clock notes it.
static Clock::time_point reached(cudaEvent_t event) {
  Clock::time_point at = known(event)->recorded;
  for (const Work& work : works_of(event)) at = std::max(at, work.get());
  return at;
}

}  // namespace simulated
using namespace simulated;

extern "C" {

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  *stream = reinterpret_cast<cudaStream_t>(new char);  // only a handle, which no other has
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (captures(stream)) return break_capture();
  return pending(stream).empty() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (captures(stream)) return break_capture();
  wait(pending(stream));
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  Works all;
  {
    std::lock_guard<std::mutex> guard(lock);
    for (const auto& [_, works] : streams()) all.insert(all.end(), works.begin(), works.end());
  }
  wait(all);
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  std::lock_guard<std::mutex> guard(lock);
  Works& works = streams()[key(stream)];
  join_capture(known(event)->capture, stream);
  const Works& more = known(event)->works;
  works.insert(works.end(), more.begin(), more.end());
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void* data) {
  std::thread([call, data, works = pending(stream)] {
    wait(works);
    call(data);
  }).detach();
  return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void* data,
                                  unsigned) {
  std::thread([call, data, stream, works = pending(stream)] {
    wait(works);
    call(stream, cudaSuccess, data);
  }).detach();
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete known(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Works works = pending(stream);
  std::lock_guard<std::mutex> guard(lock);
  *known(event) = {std::move(works), Clock::now(), true, capture_of(stream)};
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const Works works = works_of(event);
  return std::all_of(works.begin(), works.end(), done) ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  wait(works_of(event));
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  if (!known(start)->is_recorded || !known(end)->is_recorded)
    return fail(cudaErrorInvalidResourceHandle);
  for (cudaEvent_t event : {start, end})
    if (cudaEventQuery(event) == cudaErrorNotReady) return cudaErrorNotReady;
  const auto apart = reached(end) - reached(start);
  *milliseconds = std::chrono::duration<float, std::milli>(apart).count();
  return cudaSuccess;
}

}  // extern "C"

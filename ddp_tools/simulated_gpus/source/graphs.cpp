// CUDA graphs: the work that came to a stream while it was captured, done again at each launch.
//
// As on a GPU, work that is captured is not done. It is played back one after the other.
#include "simulated.h"

#include <mutex>
#include <set>

namespace simulated {

using Recorded = std::vector<std::function<void()>>;

struct Capture {
  unsigned long long id = 0;
  std::set<cudaStream_t> streams;  // none: nothing is captured
  Recorded work;
  bool is_broken = false;
};
static std::mutex lock;
static Capture& capture() {
  static auto& one = *new Capture;  // at a time, as torch captures
  return one;
}

bool captures(cudaStream_t stream) {
  std::lock_guard<std::mutex> guard(lock);
  return capture().streams.count(stream) > 0;
}
void record(std::function<void()> work) {
  std::lock_guard<std::mutex> guard(lock);
  capture().work.push_back(std::move(work));
}
unsigned long long capture_of(cudaStream_t stream) { return captures(stream) ? capture().id : 0; }
void join_capture(unsigned long long id, cudaStream_t stream) {
  std::lock_guard<std::mutex> guard(lock);
  if (!capture().streams.empty() && capture().id == id) capture().streams.insert(stream);
}
cudaError_t break_capture() {
  std::lock_guard<std::mutex> guard(lock);
  capture().is_broken = true;
  return fail(cudaErrorStreamCaptureUnsupported);
}

static const Recorded& recorded(void* graph) { return *static_cast<Recorded*>(graph); }

}  // namespace simulated
using namespace simulated;

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  std::lock_guard<std::mutex> guard(lock);
  if (!capture().streams.empty()) return fail(cudaErrorStreamCaptureUnsupported);
  capture() = {capture().id + 1, {stream}};
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  std::lock_guard<std::mutex> guard(lock);
  *graph = nullptr;
  if (!capture().streams.count(stream)) return fail(cudaErrorIllegalState);
  const bool is_broken = capture().is_broken;
  if (!is_broken)
    *graph = reinterpret_cast<cudaGraph_t>(new Recorded(std::move(capture().work)));
  capture() = {capture().id};
  return is_broken ? fail(cudaErrorStreamCaptureInvalidated) : cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = captures(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
static cudaError_t tell(cudaStream_t stream, cudaStreamCaptureStatus* status,
                        unsigned long long* id, cudaGraph_t* graph, size_t* dependencies) {
  if (id) *id = capture_of(stream);
  if (graph) *graph = nullptr;  // it is made at the end
  if (dependencies) *dependencies = 0;
  return cudaStreamIsCapturing(stream, status);
}
#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                     size_t* dependencies) {
  return tell(stream, status, id, graph, dependencies);
}
#else
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                        unsigned long long* id, cudaGraph_t* graph,
                                        const cudaGraphNode_t**, size_t* dependencies) {
  return tell(stream, status, id, graph, dependencies);
}
#endif
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = recorded(graph).size();  // torch asks whether there are any
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph,
                                          unsigned long long) {
  *made = reinterpret_cast<cudaGraphExec_t>(new Recorded(recorded(graph)));
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  wait(pending(stream));
  for (const auto& work : recorded(graph)) work();
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete &recorded(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete &recorded(graph);
  return cudaSuccess;
}

}  // extern "C"

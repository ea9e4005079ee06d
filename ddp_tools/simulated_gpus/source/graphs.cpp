// CUDA graphs: the work that came to a stream while it was captured, done again at each launch.
//
// As on a GPU, work that is captured is not done. It is played back one after the other.
#include "simulated.h"

#include <memory>
#include <mutex>
#include <set>
#include <utility>

namespace simulated {

using Object = std::shared_ptr<void>;  // what a graph keeps: freed with the last graph that has it
struct Recorded {
  std::vector<std::function<void()>> work;
  std::vector<Object> kept;
};

struct Capture {
  unsigned long long id = 0;
  std::set<cudaStream_t> streams;  // none: nothing is captured
  std::unique_ptr<Recorded> graph;
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
  capture().graph->work.push_back(std::move(work));
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

static Recorded& recorded(void* graph) { return *static_cast<Recorded*>(graph); }

}  // namespace simulated
using namespace simulated;

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  std::lock_guard<std::mutex> guard(lock);
  if (!capture().streams.empty()) return fail(cudaErrorStreamCaptureUnsupported);
  capture() = {capture().id + 1, {stream}, std::make_unique<Recorded>()};
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  Capture ended;  // what its graph keeps is freed without the lock
  std::lock_guard<std::mutex> guard(lock);
  *graph = nullptr;
  if (!capture().streams.count(stream)) return fail(cudaErrorIllegalState);
  ended = std::exchange(capture(), Capture{capture().id});
  if (ended.is_broken) return fail(cudaErrorStreamCaptureInvalidated);
  *graph = reinterpret_cast<cudaGraph_t>(ended.graph.release());
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = captures(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
static cudaError_t tell(cudaStream_t stream, cudaStreamCaptureStatus* status,
                        unsigned long long* id, cudaGraph_t* graph, size_t* dependencies) {
  const bool is_captured = captures(stream);
  if (id) *id = is_captured ? capture().id : 0;
  if (graph) *graph = is_captured ? reinterpret_cast<cudaGraph_t>(capture().graph.get()) : nullptr;
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
  *count = recorded(graph).work.size();  // torch asks whether there are any
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph,
                                          unsigned long long) {
  *made = reinterpret_cast<cudaGraphExec_t>(new Recorded(recorded(graph)));
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph,
                                 unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(made, graph, flags);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  wait(pending(stream));
  for (const auto& work : recorded(graph).work) work();
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

// torch refers to an object once, and moves that reference to the graph.
cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void* data, cudaHostFn_t destroy,
                                 unsigned, unsigned) {
  *object = reinterpret_cast<cudaUserObject_t>(new Object(data, destroy));
  return cudaSuccess;
}
cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned,
                                      unsigned flags) {
  recorded(graph).kept.push_back(*reinterpret_cast<Object*>(object));
  return flags & cudaGraphUserObjectMove ? cudaUserObjectRelease(object, 1) : cudaSuccess;
}
cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned) {
  delete reinterpret_cast<Object*>(object);
  return cudaSuccess;
}

}  // extern "C"

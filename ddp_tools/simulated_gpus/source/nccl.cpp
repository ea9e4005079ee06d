// NCCL's functions, as far as torch calls them for the collectives of torch.distributed.
#include "communicator.h"
#include "reduce.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

using namespace simulated;

static thread_local std::string told;  // the last error, of a call that has no communicator
static ncclResult_t say(ncclResult_t result, std::string why) {
  told = std::move(why);
  if (std::getenv("NCCL_DEBUG")) std::fprintf(stderr, "simulated NCCL WARN %s\n", told.c_str());
  return result;
}

static size_t width(ncclDataType_t type) {
  size_t bytes = 1;  // of the 8-bit floating-point types
  with_type(type, [&](auto* element) { bytes = sizeof *element; });
  return bytes;
}
static Bytes copy(const void* from, size_t size) {
  const auto* bytes = static_cast<const char*>(from);
  return Bytes(bytes, bytes + size);
}

// ---- Groups of calls are one piece of work for each communicator.

static thread_local int depth = 0;
struct Grouped {
  ncclComm_t comm;
  cudaStream_t stream;
  std::vector<Call> calls;
};
static thread_local std::vector<Grouped> grouped;

static ncclResult_t start_all() {
  const int here = current_device();
  for (const Grouped& group : std::exchange(grouped, {})) {
    cudaSetDevice(group.comm->device);  // the default stream is the one of the current device
    if (!captures(group.stream)) {
      group.comm->start(group.stream, group.calls);
      continue;
    }
    record([group] {  // a graph is played back one after the other
      group.comm->start(group.stream, group.calls);
      group.comm->wait_for_all();
    });
  }
  cudaSetDevice(here);
  return ncclSuccess;
}
static ncclResult_t submit(ncclComm_t comm, cudaStream_t stream, Call call) {
  const auto is_its = [&](const Grouped& group) { return group.comm == comm; };
  auto found = std::find_if(grouped.begin(), grouped.end(), is_its);
  if (found == grouped.end()) found = grouped.insert(found, {comm, stream, {}});
  found->calls.push_back(std::move(call));
  return depth ? ncclSuccess : start_all();
}
static ncclResult_t submit(ncclComm_t comm, cudaStream_t stream, std::function<void()> work) {
  Call call;
  call.go_on = std::move(work);
  return submit(comm, stream, std::move(call));
}

// ---- PREMUL_SUM: what a rank gives is multiplied by a factor of its own, and then summed.

using Factor = std::function<Bytes()>;  // reads it: on a GPU it may be still to be computed
static std::mutex factors_lock;
static std::map<int, Factor> factors;  // by the operation that was made for it

static Factor factor_of(int operation) {
  std::lock_guard<std::mutex> guard(factors_lock);
  const auto found = factors.find(operation);
  return found == factors.end() ? Factor() : found->second;
}

// ---- Communicators

// All ranks tell which GPU is theirs; this waits until all have come.
static ncclResult_t join(ncclComm_t* made, int size, const std::string& folder, int rank) {
  auto* comm = new ncclComm(rank, size, folder);
  cudaDeviceProp mine;
  if (cudaGetDeviceProperties(&mine, comm->device)) return say(ncclUnhandledCudaError, "no GPU");
  const char* id = mine.uuid.bytes;
  const auto all = comm->exchange({'i'}, copy(id, sizeof mine.uuid.bytes));
  const char* may_share = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  for (int r = 0; r < size; ++r) {
    const bool is_mine = std::memcmp(all[r].data(), id, all[r].size()) == 0;
    if (r == rank || !is_mine || (may_share && std::string(may_share) == "1")) continue;
#if NCCL_VERSION_CODE >= 23000
    return say(ncclInvalidUsage,
               "Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1 "
               "to enable this configuration.");
#else
    return say(ncclInvalidUsage,
               "Duplicate GPU detected : rank " + std::to_string(rank) + " and rank " +
                   std::to_string(r) + " both on CUDA device " + std::to_string(mine.pciBusID) +
                   "000");
#endif
  }
  *made = comm;
  return ncclSuccess;
}

static std::string folder_of(const std::string& id) {
  const char* all = std::getenv("SIMULATED_GPUS_FOLDER");
  return std::string(all ? all : "/tmp") + "/" + id;
}

extern "C" {

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::string folder = folder_of("XXXXXX");
  if (!mkdtemp(folder.data())) return say(ncclSystemError, "no folder can be made: " + folder);
  const std::string name = folder.substr(folder.rfind('/') + 1);  // the id is too short for more
  std::strncpy(id->internal, name.c_str(), sizeof id->internal);
  return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t* made, int size, ncclUniqueId id, int rank) {
  return join(made, size, folder_of(id.internal), rank);
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* made, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t*) {
  return join(made, size, folder_of(id.internal), rank);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t* made, int size, int rank, int,
                                      ncclUniqueId* ids, ncclConfig_t*) {
  return join(made, size, folder_of(ids[0].internal), rank);
}
// One process with all GPUs, as nn.DataParallel.
ncclResult_t ncclCommInitAll(ncclComm_t* made, int size, const int* devices) {
  ncclUniqueId id;
  if (const auto result = ncclGetUniqueId(&id)) return result;
  std::vector<std::thread> ranks;
  std::atomic<ncclResult_t> worst{ncclSuccess};
  for (int rank = 0; rank < size; ++rank)
    ranks.emplace_back([&, rank] {
      cudaSetDevice(devices ? devices[rank] : rank);
      if (const auto result = ncclCommInitRank(&made[rank], size, id, rank)) worst = result;
    });
  for (auto& rank : ranks) rank.join();
  return worst;
}
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* made, ncclConfig_t*) {
  const int wish[] = {color, key, comm->rank};
  std::vector<Bytes> all;
  std::string folder;
  Call ask;
  ask.go_on = [&] {
    all = comm->exchange({'s'}, copy(wish, sizeof wish));
    folder = comm->subfolder(color);
  };
  comm->start(nullptr, {ask});
  comm->wait_for_all();
  *made = nullptr;
  if (all.empty()) return say(ncclSystemError, "aborted");
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  std::vector<std::pair<int, int>> members;  // key and old rank, in the order of the new ranks
  for (const Bytes& bytes : all) {
    const int* theirs = reinterpret_cast<const int*>(bytes.data());
    if (theirs[0] == color) members.emplace_back(theirs[1], theirs[2]);
  }
  std::sort(members.begin(), members.end());
  const auto me = std::find(members.begin(), members.end(), std::make_pair(key, comm->rank));
  mkdir(folder.c_str(), 0700);  // or one of the others has
  return join(made, static_cast<int>(members.size()), folder,
              static_cast<int>(me - members.begin()));
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  if (comm) comm->wait_for_all();
  return ncclSuccess;
}
// A communicator stays in memory: its threads, and torch's watchdog, may still look at it.
ncclResult_t ncclCommDestroy(ncclComm_t comm) { return ncclCommFinalize(comm); }
ncclResult_t ncclCommRevoke(ncclComm_t comm, int) {
  if (comm) comm->abort();
  return ncclSuccess;
}
// NCCL frees the communicator before it returns. In this time, here a second, the stream is free
// again: under torchrun, whose ranks abort, a script goes on with what its peers have not given.
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  const bool was_waiting = comm && !comm->is_idle();
  ncclCommRevoke(comm, 0);
  const char* seconds = std::getenv("SIMULATED_GPUS_ABORT_SECONDS");  // a test has it last longer
  if (was_waiting) std::this_thread::sleep_for(std::chrono::seconds(seconds ? atoi(seconds) : 1));
  return ncclSuccess;
}

const char* ncclGetLastError(ncclComm_t comm) {
  return comm && comm->async_error != ncclSuccess ? comm->last_error.c_str() : told.c_str();
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  *error = comm->async_error;
  return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  *count = comm->size;
  return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  *device = comm->device;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = comm->rank;
  return ncclSuccess;
}
ncclResult_t ncclCommRegister(const ncclComm_t, void*, size_t, void** handle) {
  *handle = nullptr;
  return ncclSuccess;
}
ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }
ncclResult_t ncclMemAlloc(void** bytes, size_t size) {
  return cudaMalloc(bytes, size) ? ncclUnhandledCudaError : ncclSuccess;
}
ncclResult_t ncclMemFree(void* bytes) {
  return cudaFree(bytes) ? ncclUnhandledCudaError : ncclSuccess;
}
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* operation, void* factor, ncclDataType_t type,
                                      ncclScalarResidence_t residence, ncclComm_t) {
  Factor read = [=] { return copy(factor, width(type)); };
  if (residence == ncclScalarHostImmediate) read = [value = read()] { return value; };
  std::lock_guard<std::mutex> guard(factors_lock);
  static int last = ncclNumOps;  // which stands for all of them in what ranks ask for
  *operation = static_cast<ncclRedOp_t>(++last);
  factors[last] = read;
  return ncclSuccess;
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t operation, ncclComm_t) {
  std::lock_guard<std::mutex> guard(factors_lock);
  factors.erase(operation);
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  ++depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  return --depth ? ncclSuccess : start_all();
}

}  // extern "C"

// ---- Collectives: each rank gets what all gave, and takes from it what is its.

using Use = std::function<void(const std::vector<Bytes>& all)>;

static ncclResult_t collect(const Request& request, const void* from, size_t size, ncclComm_t comm,
                            cudaStream_t stream, const Use& use) {
  return submit(comm, stream, [=] { use(comm->exchange(request, copy(from, size))); });
}
// Of `given` elements, `count` from the one numbered `first` on go to the root; -1: to all ranks.
static ncclResult_t reduce(Request request, const void* from, size_t given, void* to,
                           size_t first, ncclComm_t comm, cudaStream_t stream) {
  const Factor factor = factor_of(request.operation);
  if (factor) request.operation = ncclNumOps;
  const auto type = static_cast<ncclDataType_t>(request.type);
  if (!with_type(type, [](auto*) {}))
    return say(ncclInvalidArgument, "the simulated NCCL reduces no 8-bit floating-point numbers");
  return submit(comm, stream, [=] {
    Bytes mine = copy(from, given * width(type));
    with_type(type, [&](auto* element) {
      using T = std::remove_pointer_t<decltype(element)>;
      if (factor) multiply<T>(mine, factor());
      const auto all = comm->exchange(request, mine);
      if (request.root >= 0 && request.root != comm->rank) return;
      reduce_as<T>(all, first, request.count, static_cast<ncclRedOp_t>(request.operation), to);
    });
  });
}
static void lay_out(const std::vector<Bytes>& all, void* to, size_t begin, size_t size) {
  for (size_t r = 0; r < all.size(); ++r)
    std::memcpy(static_cast<char*>(to) + r * size, all[r].data() + begin, size);
}

extern "C" {

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream) {
  return reduce({'r', type, operation, -1, count}, from, count, to, 0, comm, stream);
}
ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                        ncclRedOp_t operation, int root, ncclComm_t comm, cudaStream_t stream) {
  return reduce({'d', type, operation, root, count}, from, count, to, 0, comm, stream);
}
ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type,
                               ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream) {
  return reduce({'x', type, operation, -1, count}, from, count * comm->size, to,
                count * comm->rank, comm, stream);
}
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  const size_t size = count * width(type);
  return collect({'b', type, 0, root, count}, from, comm->rank == root ? size : 0, comm, stream,
                 [=](const auto& all) { std::memcpy(to, all[root].data(), size); });
}
ncclResult_t ncclBcast(void* bytes, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                       cudaStream_t stream) {
  return ncclBroadcast(bytes, bytes, count, type, root, comm, stream);
}
ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  const size_t size = count * width(type);
  return collect({'g', type, 0, -1, count}, from, size, comm, stream,
                 [=](const auto& all) { lay_out(all, to, 0, size); });
}
ncclResult_t ncclAlltoAll(const void* from, void* to, size_t count, ncclDataType_t type,
                          ncclComm_t comm, cudaStream_t stream) {
  const size_t size = count * width(type);
  return collect({'a', type, 0, -1, count}, from, size * comm->size, comm, stream,
                 [=](const auto& all) { lay_out(all, to, size * comm->rank, size); });
}
ncclResult_t ncclGather(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  const size_t size = count * width(type);
  return collect({'h', type, 0, root, count}, from, size, comm, stream, [=](const auto& all) {
    if (comm->rank == root) lay_out(all, to, 0, size);
  });
}
ncclResult_t ncclScatter(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                         ncclComm_t comm, cudaStream_t stream) {
  const size_t size = count * width(type);
  const size_t given = comm->rank == root ? size * comm->size : 0;
  return collect({'t', type, 0, root, count}, from, given, comm, stream, [=](const auto& all) {
    std::memcpy(to, all[root].data() + size * comm->rank, size);
  });
}
ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return submit(comm, stream, comm->send(from, peer, count * width(type)));
}
ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return submit(comm, stream, comm->receive(to, peer, count * width(type)));
}

}  // extern "C"

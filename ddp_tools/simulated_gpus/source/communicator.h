// The ranks of one NCCL communicator, on one machine: they leave each other files in a folder.
//
// As with NCCL, a collective is work on a stream: the call returns, and the work goes on until
// all peers have come. It waits for ever for one that never comes, has died or asks for something
// else; only an abort ends that. To see it, and end it, is the work of torch's watchdog.
#pragma once
#include "simulated.h"  // before nccl.h, whose own way to CUDA's headers build.py closes

#include <nccl.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace simulated {

using Bytes = std::vector<char>;
struct Aborted {};

// What a rank asks for. It stands before its bytes, and all ranks must ask for the same.
struct Request {
  int kind;  // a letter
  int type = 0;
  int operation = 0;
  int root = -1;
  size_t count = 0;
};

// What a call does. Of a group, all calls begin before one goes on: else two ranks that send to
// each other before they receive would wait for each other.
struct Call {
  std::function<void()> begin = [] {}, go_on = [] {}, end = [] {};
};

}  // namespace simulated

struct ncclComm {
  ncclComm(int rank, int size, std::string folder);

  // What each rank gave for this collective, by rank.
  std::vector<simulated::Bytes> exchange(const simulated::Request& request,
                                         const simulated::Bytes& mine);
  // From one rank to another. The sender's part is over when the receiver has taken it.
  simulated::Call send(const void* from, int peer, size_t size);
  simulated::Call receive(void* to, int peer, size_t size);

  // Does the calls' work when the stream, and this communicator's calls before, have come to it.
  void start(cudaStream_t stream, std::vector<simulated::Call> calls);
  void wait_for_all();
  bool is_idle();
  // A folder for the ranks that chose this color in the exchange just made.
  std::string subfolder(int color) const;
  void abort() { aborted = true; }

  const int rank, size, device;
  std::string last_error;
  std::atomic<ncclResult_t> async_error{ncclSuccess};

 private:
  std::string path(const std::string& name) const { return folder + "/" + name; }
  void leave(const std::string& name, const simulated::Request& request,
             const simulated::Bytes& bytes);
  simulated::Bytes take(const std::string& name, const simulated::Request& expected);
  void until(const std::function<bool()>& is_so) const;

  const std::string folder;
  std::atomic<bool> aborted{false};
  long exchanges = 0;                     // of the thread that works: one at a time
  std::map<std::string, long> messages;   // by sender and receiver
  std::mutex lock;
  simulated::Work last;                   // of the calls that have been started
};

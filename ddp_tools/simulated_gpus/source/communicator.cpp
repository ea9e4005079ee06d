#include "communicator.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

using namespace simulated;

static Work no_work() {
  std::promise<Clock::time_point> promise;
  promise.set_value(Clock::now());
  return promise.get_future().share();
}

ncclComm::ncclComm(int rank, int size, std::string folder)
    : rank(rank), size(size), device(current_device()), folder(std::move(folder)),
      last(no_work()) {}

// Looks often at first, for the peers are mostly there within a millisecond.
void ncclComm::until(const std::function<bool()>& is_so) const {
  for (auto pause = std::chrono::microseconds(50); !is_so();) {
    if (aborted) throw Aborted();
    std::this_thread::sleep_for(pause);
    if (pause < std::chrono::milliseconds(5)) pause *= 2;
  }
}

// Written under a name that nobody looks for, so that who finds it finds it whole.
void ncclComm::leave(const std::string& name, const Request& request, const Bytes& bytes) {
  const std::string unfinished = path("unfinished." + std::to_string(rank));
  std::ofstream file(unfinished, std::ios::binary | std::ios::trunc);
  file.write(reinterpret_cast<const char*>(&request), sizeof request);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  if (file && std::rename(unfinished.c_str(), path(name).c_str()) == 0) return;
  last_error = "simulated NCCL: " + path(name) + " cannot be written: " + std::strerror(errno);
  async_error = ncclSystemError;
}

Bytes ncclComm::take(const std::string& name, const Request& expected) {
  until([&] { return access(path(name).c_str(), R_OK) == 0; });
  std::ifstream file(path(name), std::ios::binary);
  Request theirs;
  file.read(reinterpret_cast<char*>(&theirs), sizeof theirs);
  if (std::memcmp(&theirs, &expected, sizeof theirs) != 0) until([] { return false; });
  Bytes bytes(std::filesystem::file_size(path(name)) - sizeof theirs);
  file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  return bytes;
}

std::vector<Bytes> ncclComm::exchange(const Request& request, const Bytes& mine) {
  const std::string number = std::to_string(++exchanges) + ".";
  const std::string before = std::to_string(exchanges - 1) + ".";
  std::vector<Bytes> all(size);
  leave(number + std::to_string(rank), request, mine);
  for (int r = 0; r < size; ++r)
    all[r] = r == rank ? mine : take(number + std::to_string(r), request);
  // Who has come to this one has read all of the one before.
  unlink(path(before + std::to_string(rank)).c_str());
  return all;
}

static std::string pair(int from, int to) {
  return "from." + std::to_string(from) + ".to." + std::to_string(to) + ".";
}

Call ncclComm::send(const void* from, int peer, size_t size) {
  auto name = std::make_shared<std::string>();
  const auto* bytes = static_cast<const char*>(from);
  Call call;
  call.begin = [=] {
    *name = pair(rank, peer);
    *name += std::to_string(++messages[*name]);
    leave(*name, {'p', 0, 0, -1, size}, Bytes(bytes, bytes + size));
  };
  call.end = [=] { until([&] { return access(path(*name).c_str(), F_OK) != 0; }); };
  return call;
}

Call ncclComm::receive(void* to, int peer, size_t size) {
  Call call;
  call.go_on = [=] {
    std::string name = pair(peer, rank);
    name += std::to_string(++messages[name]);
    const Bytes theirs = take(name, {'p', 0, 0, -1, size});
    std::memcpy(to, theirs.data(), size);
    unlink(path(name).c_str());
  };
  return call;
}

std::string ncclComm::subfolder(int color) const {
  return path("split." + std::to_string(exchanges) + "." + std::to_string(color));
}

void ncclComm::start(cudaStream_t stream, std::vector<Call> calls) {
  std::lock_guard<std::mutex> guard(lock);
  last = enqueue(stream, [before = last, calls = std::move(calls)] {
    before.wait();
    try {
      for (const Call& call : calls) call.begin();
      for (const Call& call : calls) call.go_on();
      for (const Call& call : calls) call.end();
    } catch (const Aborted&) {  // the stream goes on, with what the peers have not given
    }
  });
}

bool ncclComm::is_idle() {
  std::lock_guard<std::mutex> guard(lock);
  return done(last);
}

void ncclComm::wait_for_all() {
  Work all;
  {
    std::lock_guard<std::mutex> guard(lock);
    all = last;
  }
  all.wait();
}

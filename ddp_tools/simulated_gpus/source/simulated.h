// What the parts of the simulated GPUs tell each other.
#pragma once
#include <cuda_runtime_api.h>

#include <chrono>
#include <functional>
#include <future>
#include <vector>

namespace simulated {

using Clock = std::chrono::steady_clock;
// Work that goes on beside the host: a collective. Its value is the moment at which it was done.
// All else is computed at once, in the thread that calls, so that a stream is only its works.
using Work = std::shared_future<Clock::time_point>;
using Works = std::vector<Work>;

Works pending(cudaStream_t stream);            // what the stream's next work has to wait for
Work enqueue(cudaStream_t stream, std::function<void()> work);  // done after those before
void wait(const Works& works);
bool done(const Work& work);

// CUDA graphs. Work of a stream that is captured is recorded, and not done.
bool captures(cudaStream_t stream);
void record(std::function<void()> work);
unsigned long long capture_of(cudaStream_t stream);             // 0: it is not captured
void join_capture(unsigned long long id, cudaStream_t stream);  // its work is recorded, too
cudaError_t break_capture();                                    // the host may not wait for it

int current_device();
int physical(int device);                      // its number on the machine, whatever is visible
int number(const char* variable);              // of an environment variable that `gpus` sets
void announce();                               // which GPU this process uses, once, on stderr
cudaError_t fail(cudaError_t error);           // remembers the error, as cudaGetLastError asks

}  // namespace simulated

// True while one of torch's own CUDA operators is only asked whether it would take its arguments:
// see operators.cpp. Its kernels are passed over in silence.
extern "C" bool* simulated_gpus_only_asks();

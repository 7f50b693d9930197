// CUDA on a CPU: what the generated kernels use of CUDA C++, for g++.
//
// Blocks run one after the other. The threads of a block are fibers that take turns; a thread gives
// up its turn at a barrier and at a warp's shuffle. A barrier that not every thread of the block
// reaches, or a shuffle that not every lane reaches, ends the process with a message.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <math.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(threads)
#define __shared__ static

using __half = c10::Half;
using __nv_bfloat16 = c10::BFloat16;
inline float __half2float(__half value) { return value; }
inline float __bfloat162float(__nv_bfloat16 value) { return value; }
inline __half __float2half_rn(float value) { return value; }
inline __half __double2half(double value) { return static_cast<float>(value); }
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return value; }
inline __nv_bfloat16 __double2bfloat16(double value) { return static_cast<float>(value); }

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};

// A load whose address is no multiple of its size would fail on a GPU.
template <class Word>
Word __ldg(const Word* from) {
  if (reinterpret_cast<uintptr_t>(from) % sizeof(Word)) {
    std::fprintf(stderr, "a load of %zu bytes is not aligned\n", sizeof(Word));
    std::abort();
  }
  return *from;
}
inline float __int_as_float(int bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline float rsqrt(float x) { return 1 / sqrtf(x); }
inline double rsqrt(double x) { return 1 / sqrt(x); }
// Newton's method from 0, which stays on one side of the root; enough steps for |x| < 0.99.
inline double erfinv(double x) {
  double y = 0;
  for (int step = 0; step < 40; ++step) y -= (erf(y) - x) * 0.886226925452758 * exp(y * y);
  return y;
}

struct dim3 {
  unsigned x, y, z;
};
inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 17);
  bool done = false;
  int barriers = 0, shuffles = 0;  // how many it has reached
  int64_t exchanged = 0;           // the value that it shows to its warp
};
inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline unsigned current;
inline const std::function<void()>* kernel;

inline void wait() { swapcontext(&fibers[current].context, &scheduler); }
inline void fail(const char* what) {
  std::fprintf(stderr, "block %u, thread %u: %s\n", blockIdx.x, current, what);
  std::abort();
}

// Waits until `count` threads from `first` on have reached as many barriers or shuffles.
inline void meet(int Fiber::*reached, unsigned first, unsigned count, const char* what) {
  const int own = ++(fibers[current].*reached);
  for (;;) {
    bool all = true;
    for (unsigned other = first; other < first + count; ++other) {
      if (fibers[other].*reached < own) {
        if (fibers[other].done) fail(what);
        all = false;
      }
    }
    if (all) return;
    wait();
  }
}

inline void run_thread() {
  (*kernel)();
  fibers[current].done = true;
  wait();
}

inline void run_block(unsigned threads) {
  if (fibers.size() < threads) fibers.resize(threads);
  for (unsigned thread = 0; thread < threads; ++thread) {
    Fiber& fiber = fibers[thread];
    fiber.done = false;
    fiber.barriers = fiber.shuffles = 0;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_thread, 0);
  }
  for (bool running = true; running;) {
    running = false;
    for (current = 0; current < threads; ++current) {
      if (fibers[current].done) continue;
      threadIdx = {current, 0, 0};
      swapcontext(&scheduler, &fibers[current].context);
      running = true;
    }
  }
}

template <class... Parameters, size_t... places>
void launch(void (*kernel_)(Parameters...), void** arguments, const unsigned* shape,
            std::index_sequence<places...>) {
  const std::function<void()> body = [&] {
    kernel_(*static_cast<std::remove_reference_t<Parameters>*>(arguments[places])...);
  };
  kernel = &body;
  gridDim = {shape[0], shape[1], shape[2]};
  blockDim = {shape[3], shape[4], shape[5]};
  for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y) {
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) run_block(blockDim.x);
  }
}

template <class... Parameters>
void launch(void (*kernel_)(Parameters...), void** arguments, const unsigned* shape) {
  launch(kernel_, arguments, shape, std::index_sequence_for<Parameters...>());
}

}  // namespace emulated

inline void __syncthreads() {
  emulated::meet(&emulated::Fiber::barriers, 0, blockDim.x, "a barrier that not all threads reach");
}

template <class Value>
Value __shfl_xor_sync(unsigned, Value value, int distance) {
  using namespace emulated;
  const unsigned first = current / 32 * 32;
  const char* what = "a shuffle that not all lanes reach";
  std::memcpy(&fibers[current].exchanged, &value, sizeof(Value));
  meet(&Fiber::shuffles, first, 32, what);
  std::memcpy(&value, &fibers[current ^ distance].exchanged, sizeof(Value));
  meet(&Fiber::shuffles, first, 32, what);  // before anyone shows another value
  return value;
}

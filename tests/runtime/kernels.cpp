// Small CPU kernels for the tests of the runtime.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <stdexcept>

#include <omp.h>

#include "kernels.h"

// output[i] = max(input[i] * scale, 0), over numel elements in memory order.
template <typename T, typename Scale>
void scaled_relu(const T* input, T* output, int64_t numel, Scale scale) {
  for (int64_t i = 0; i < numel; ++i) output[i] = relu(static_cast<T>(input[i] * scale));
}

template <typename T>
void add(const T* left, const T* right, T* output, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) output[i] = left[i] + right[i];
}

// Both gradients of left * right; a null pointer where one is not needed.
template <typename T>
void mul_backward(const T* grad, const T* left, const T* right, T* grad_left, T* grad_right,
                  int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) {
    if (grad_left != nullptr) grad_left[i] = grad[i] * right[i];
    if (grad_right != nullptr) grad_right[i] = grad[i] * left[i];
  }
}

// terms.weight[t] * terms.term[t], summed over the terms that are there.
struct Terms {
  const float* term[64];
  int64_t weight[64];
};
void weighted_sum(Terms terms, float* output, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) {
    output[i] = 0;
    for (int t = 0; t < 64; ++t) {
      if (terms.term[t] != nullptr) output[i] += terms.weight[t] * terms.term[t][i];
    }
  }
}

void openmp_threads(int32_t* output) {
  int32_t count = 0;
#pragma omp parallel reduction(+ : count)
  count += 1;
  *output = count;
}

void widths(int32_t* output, int32_t a, int64_t b, float c, double d) {
  output[0] = a;
  output[1] = b == (int64_t{1} << 40);
  output[2] = c == 0.1f;
  output[3] = d == 0.1;
}

// flags[1] = whether another thread has set flags[0] within 5 s.
void waits(int32_t* flags) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::seconds(5);
  const std::atomic_ref<int32_t> set(flags[0]);
  while (set == 0 && Clock::now() < end) continue;
  flags[1] = set;
}

void throws(float*, int32_t kind) {
  if (kind == 0) throw std::runtime_error("the kernel's own words");
  throw kind;
}

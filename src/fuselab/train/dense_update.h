// One step of SGD, Adagrad or Adam on one element, and how all elements of all tensors are shared
// out: in blocks of kBlock neighbours, none of which spans two tensors.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define FUSELAB_DENSE __device__ __forceinline__
#else
#include <cmath>
#include <cstring>
#define FUSELAB_DENSE inline
#endif

enum class Update { sgd, adagrad, adam };

constexpr int kTensors = 32;
constexpr int kBlock = 4096;

// Addresses, by value: float parameters, gradients, copies in the gradient's type (0: none), and up
// to two states.
struct Dense {
  int64_t parameter[kTensors];
  int64_t grad[kTensors];
  int64_t copy[kTensors];
  int64_t first[kTensors];
  int64_t second[kTensors];
  int64_t numel[kTensors];
  int64_t first_block[kTensors];
};

// torch.optim's eps, and Adam's 1 - beta1, beta2 and 1 - beta2: 1.0f - 0.999f is off by 5e-5.
constexpr float kAdagradEps = 1e-10f, kAdamEps = 1e-8f;
constexpr float kRest1 = 0.1f, kBeta2 = 0.999f, kRest2 = 0.001f;

struct Rates {
  float step;    // the learning rate; Adam's divided by 1 - beta1^count
  float second;  // Adam: 1 / sqrt(1 - beta2^count)
};

template <Update update>
FUSELAB_DENSE Rates rates(float rate, float count) {
  if constexpr (update != Update::adam) return {rate, 1.0f};
  const double first = 1.0 - pow(0.9, double(count)), second = 1.0 - pow(0.999, double(count));
  return {float(rate / first), float(1.0 / sqrt(second))};
}

// The parameter behind the step; states change in place.
template <Update update>
FUSELAB_DENSE float updated(float parameter, float grad, float& first, float& second,
                            const Rates& rates) {
  if constexpr (update == Update::sgd) return parameter - rates.step * grad;
  if constexpr (update == Update::adagrad) {
    first += grad * grad;
    return parameter - rates.step * grad / (sqrtf(first) + kAdagradEps);
  }
  first += kRest1 * (grad - first);
  second = kBeta2 * second + kRest2 * grad * grad;
  return parameter - rates.step * first / (sqrtf(second) * rates.second + kAdamEps);
}

struct bfloat16 {
  uint16_t bits;
};

FUSELAB_DENSE float widened(float x) { return x; }
FUSELAB_DENSE float widened(bfloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
#ifdef __CUDACC__
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
#endif
}
FUSELAB_DENSE void narrow(float& to, float x) { to = x; }
FUSELAB_DENSE void narrow(bfloat16& to, float x) {  // to nearest even; a NaN stays one
#ifdef __CUDACC__
  const uint32_t bits = __float_as_uint(x);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
#endif
  to.bits = x == x ? uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16) : uint16_t(0x7fc0);
}

// The tensor that block `block` lies in.
FUSELAB_DENSE int tensor_of(const Dense& all, int tensors, int64_t block) {
  int tensor = 0;
  while (tensor + 1 < tensors && block >= all.first_block[tensor + 1]) ++tensor;
  return tensor;
}

// Elements `at` to `at` + kMany of a tensor. Loads come before stores, so that they overlap.
template <class Grad, Update update, int kMany>
FUSELAB_DENSE void update_some(const Dense& all, int tensor, int64_t at, const Rates& rates) {
  struct alignas(4 * kMany) Floats {
    float of[kMany];
  };
  struct alignas(sizeof(Grad) * kMany) Grads {
    Grad of[kMany];
  };
  auto* parameters = reinterpret_cast<Floats*>(all.parameter[tensor] + 4 * at);
  auto* grads = reinterpret_cast<const Grads*>(all.grad[tensor] + int64_t(sizeof(Grad)) * at);
  auto* firsts = reinterpret_cast<Floats*>(all.first[tensor] + 4 * at);
  auto* seconds = reinterpret_cast<Floats*>(all.second[tensor] + 4 * at);
  Floats parameter = *parameters, first{}, second{};
  Grads grad = *grads;
  if constexpr (update != Update::sgd) first = *firsts;
  if constexpr (update == Update::adam) second = *seconds;
#pragma unroll
  for (int i = 0; i < kMany; ++i) {
    parameter.of[i] = updated<update>(parameter.of[i], widened(grad.of[i]), first.of[i],
                                      second.of[i], rates);
    narrow(grad.of[i], parameter.of[i]);
  }
  *parameters = parameter;
  if constexpr (update != Update::sgd) *firsts = first;
  if constexpr (update == Update::adam) *seconds = second;
  if (all.copy[tensor] != 0) {
    *reinterpret_cast<Grads*>(all.copy[tensor] + int64_t(sizeof(Grad)) * at) = grad;
  }
}

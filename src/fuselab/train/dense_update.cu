// An optimizer's step on up to kTensors tensors in one launch. A CUDA block owns kBlock elements;
// every byte is read once and written once.

#include "dense_update.h"

constexpr int kThreads = 256;
constexpr int kMany = 4;  // elements per access: 16 bytes of a parameter

template <class Grad, Update update>
__global__ void __launch_bounds__(kThreads)
update_all(const float* rate, const float* count, int tensors, Dense all) {
  __shared__ Rates shared;
  if (threadIdx.x == 0) shared = rates<update>(*rate, *count);  // two powers in double: once
  __syncthreads();
  const Rates now = shared;
  const int tensor = tensor_of(all, tensors, blockIdx.x);
  const int64_t begin = (blockIdx.x - all.first_block[tensor]) * int64_t(kBlock);
  const int64_t left = all.numel[tensor] - begin;
  const int64_t end = begin + (left < kBlock ? left : kBlock);
  const int64_t places = all.parameter[tensor] | all.grad[tensor] | all.copy[tensor] |
                         all.first[tensor] | all.second[tensor];
  const int64_t whole = places % 16 == 0 ? begin + (end - begin) / kMany * kMany : begin;
  for (int64_t at = begin + threadIdx.x * kMany; at < whole; at += kThreads * kMany) {
    update_some<Grad, update, kMany>(all, tensor, at, now);
  }
  for (int64_t at = whole + threadIdx.x; at < end; at += kThreads) {
    update_some<Grad, update, 1>(all, tensor, at, now);
  }
}

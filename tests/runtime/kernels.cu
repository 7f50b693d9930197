// Small CUDA kernels for the tests of the runtime.
#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda/std/limits>

template <typename T>
__global__ void scaled_relu(const T* input, T* output, std::int64_t numel, float scale) {
  int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (i >= numel) return;
  float value = float(input[i]) * scale;
  output[i] = T(value > 0 ? value : 0.0f);
}

// Reverses each block's slice through dynamic shared memory.
__global__ void reverse(const float* input, float* output, int32_t words_reserved) {
  extern __shared__ float slice[];
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  slice[threadIdx.x + words_reserved] = input[i];
  __syncthreads();
  output[i] = slice[blockDim.x - 1 - threadIdx.x + words_reserved];
}

// weight[t] * term[t], summed over the terms that are there.
struct Terms {
  const float* term[64];
  int64_t weight[64];
};
__global__ void weighted_sum(Terms terms, float* output, int64_t numel) {
  int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (i >= numel) return;
  output[i] = 0;
  for (int t = 0; t < 64; ++t) {
    if (terms.term[t] != nullptr) output[i] += float(terms.weight[t]) * terms.term[t][i];
  }
}

// Adds the input to *sum, which the launcher has filled with zeros.
__global__ void add_up(const float* input, float* sum, int64_t numel) {
  int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (i < numel) atomicAdd(sum, input[i]);
}

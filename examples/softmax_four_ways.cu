// The CUDA kernel of softmax_four_ways.py: softmax over the rows of a contiguous matrix.
//
// A block owns a row and reads it three times (largest value, sum, result): once from memory, then
// from the caches while the row fits there.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

constexpr int threads = 256, warps = threads / 32;

// The same value for all threads of the block: combined in a warp by shuffles, then over the warps.
template <class Combine>
__device__ float over_the_block(float value, Combine combine) {
  __shared__ float of_warp[warps];
  for (int lane = 16; lane > 0; lane /= 2)
    value = combine(value, __shfl_xor_sync(0xffffffff, value, lane));
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  value = of_warp[0];
  for (int warp = 1; warp < warps; ++warp) value = combine(value, of_warp[warp]);
  __syncthreads();  // before the next call writes there
  return value;
}

template <class Element>
__global__ void __launch_bounds__(threads)
    rows(const Element* __restrict__ input, Element* __restrict__ output, int64_t width) {
  input += int64_t(blockIdx.x) * width;
  output += int64_t(blockIdx.x) * width;
  float largest = __int_as_float(0xff800000);  // minus infinity
  for (int64_t i = threadIdx.x; i < width; i += threads) largest = fmaxf(largest, float(input[i]));
  largest = over_the_block(largest, [](float a, float b) { return fmaxf(a, b); });
  float sum = 0;
  for (int64_t i = threadIdx.x; i < width; i += threads) sum += expf(float(input[i]) - largest);
  sum = over_the_block(sum, [](float a, float b) { return a + b; });
  for (int64_t i = threadIdx.x; i < width; i += threads)
    output[i] = Element(expf(float(input[i]) - largest) / sum);
}

// Hashes ids by their modulus.
//
// Each thread takes kItems ids, a block's width apart, and loads all of them before the first
// division. Every id is read and every index written once, coalesced if ids are contiguous.
// Cardinalities come from the cache.

#include "../_shared/device_assert.cuh"
#include "../_shared/modulus.h"

constexpr int kThreads = 256;
constexpr int kItems = 4;

template <class Id, class Index>
__global__ void __launch_bounds__(kThreads)
    hash(const Id* __restrict__ ids, const int64_t* __restrict__ cardinalities,
         int64_t* __restrict__ output, int64_t numel, int64_t columns, int64_t row_stride,
         int64_t column_stride) {
  const Index first = static_cast<Index>(blockIdx.x) * (kThreads * kItems) + threadIdx.x;
  int64_t id[kItems];
  int64_t cardinality[kItems];
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const Index position = first + item * kThreads;
    if (position < numel) {
      const Index row = position / static_cast<Index>(columns);
      const Index column = position - row * static_cast<Index>(columns);
      id[item] = ids[row * row_stride + column * column_stride];
      cardinality[item] = cardinalities[column];
    }
  }
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const Index position = first + item * kThreads;
    if (position < numel) {
      if (cardinality[item] < 1) fail("hash_indices: a cardinality is below 1");
      output[position] = modulus(id[item], cardinality[item]);
    }
  }
}

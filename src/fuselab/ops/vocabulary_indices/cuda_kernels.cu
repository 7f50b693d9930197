// Vocabulary look-up: a binary search in each column's sorted keys.
//
// A thread searches kItems ids side by side, so that kItems loads are in flight in every step; a
// search takes as many steps as the widest column of its ids needs. Upper levels of the search stay
// in L1 and L2. Every id is read and every index written once.

#include <cstdint>

constexpr int kThreads = 256;
constexpr int kItems = 4;

template <class Id, class Index>
__global__ void __launch_bounds__(kThreads)
    look_up(const Id* __restrict__ ids, const int64_t* __restrict__ keys,
            const int64_t* __restrict__ slots, const int64_t* __restrict__ offsets,
            int64_t* __restrict__ output, int64_t numel, int64_t columns, int64_t row_stride,
            int64_t column_stride) {
  const Index first = static_cast<Index>(blockIdx.x) * (kThreads * kItems) + threadIdx.x;
  int64_t id[kItems], begin[kItems], low[kItems], count[kItems], end[kItems];
  int64_t longest = 0;
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const Index position = first + item * kThreads;
    id[item] = begin[item] = low[item] = count[item] = end[item] = 0;
    if (position < numel) {
      const Index row = position / static_cast<Index>(columns);
      const Index column = position - row * static_cast<Index>(columns);
      id[item] = ids[row * row_stride + column * column_stride];
      low[item] = begin[item] = offsets[column];
      end[item] = offsets[column + 1];
      count[item] = end[item] - low[item];
      longest = max(longest, count[item]);
    }
  }
  // The answer is in [low, low + count]; without a branch both halves cost the same.
  for (; longest > 0; longest >>= 1) {
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      const int64_t half = count[item] >> 1;
      const bool below = count[item] > 0 && keys[low[item] + half] < id[item];
      low[item] = below ? low[item] + half + 1 : low[item];
      count[item] = below ? count[item] - half - 1 : half;
    }
  }
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const Index position = first + item * kThreads;
    if (position < numel) {
      const bool known = low[item] < end[item] && keys[low[item]] == id[item];
      output[position] = known ? slots[low[item]] : end[item] - begin[item];
    }
  }
}

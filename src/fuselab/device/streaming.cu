// The fastest way to move given bytes: every thread reads PER_THREAD 16-byte words of each of READS
// streams and writes as many to each of WRITES streams, neighbours side by side. No word is touched
// twice. EVICT_FIRST marks accesses as not worth keeping in L2.

#include <cstdint>

__device__ __forceinline__ void accumulate(uint4& sum, const uint4& word) {
  sum.x ^= word.x;
  sum.y ^= word.y;
  sum.z ^= word.z;
  sum.w ^= word.w;
}

// input holds READS streams of read_words words one after another, output WRITES of write_words.
template <int READS, int WRITES, int PER_THREAD, bool EVICT_FIRST>
__global__ void stream(const uint4* input, uint4* output, int64_t read_words, int64_t write_words) {
  const int64_t first = int64_t(blockIdx.x) * blockDim.x * PER_THREAD + threadIdx.x;
  uint4 sums[PER_THREAD];
#pragma unroll
  for (int step = 0; step < PER_THREAD; ++step) {
    const int64_t word = first + int64_t(step) * blockDim.x;
    sums[step] = make_uint4(0, 0, 0, 0);
    if (word < read_words) {
#pragma unroll
      for (int read = 0; read < READS; ++read) {
        const uint4* place = input + read * read_words + word;
        accumulate(sums[step], EVICT_FIRST ? __ldcs(place) : __ldg(place));
      }
    }
  }
#pragma unroll
  for (int step = 0; step < PER_THREAD; ++step) {
    const int64_t word = first + int64_t(step) * blockDim.x;
    if (word < write_words) {
#pragma unroll
      for (int write = 0; write < WRITES; ++write) {
        uint4* place = output + write * write_words + word;
        if (EVICT_FIRST) {
          __stcs(place, sums[step]);
        } else {
          *place = sums[step];
        }
      }
    }
    // Without streams to write, a store that the inputs (all ones) never ask for keeps the loads.
    if (WRITES == 0) {
      const uint4& sum = sums[step];
      if ((sum.x ^ sum.y ^ sum.z ^ sum.w) == 0x1e3779b9u) {
        output[0] = sum;
      }
    }
  }
}

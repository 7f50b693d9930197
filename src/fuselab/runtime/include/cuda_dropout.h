// The masks of dropouts, for CUDA C++: whether an element is kept, by Philox-4x32-10 (J. Salmon and
// others, "Parallel random numbers: as easy as 1, 2, 3", 2011). A file that includes this one first
// defines FUSELAB_INLINE. The C++ kernels on CPUs compute the same in vectors (cpu_dropout.h).
#pragma once

#include <cstdint>

namespace philox {

// Returns whether the element at `position` is kept by the dropout `number` of a seed: by a random
// word above `last_dropped`. The key is the seed. Four elements in a row have the words of one
// counter.
FUSELAB_INLINE bool kept(int64_t seed, int64_t position, uint32_t number, uint32_t last_dropped) {
  const uint64_t group = uint64_t(position) >> 2;
  uint32_t word[4] = {uint32_t(group), uint32_t(group >> 32), number, 0};
  uint32_t left = uint32_t(seed), right = uint32_t(uint64_t(seed) >> 32);
  for (int turn = 0; turn < 10; ++turn) {
    const uint64_t even = uint64_t(word[0]) * 0xD2511F53u, odd = uint64_t(word[2]) * 0xCD9E8D57u;
    word[0] = uint32_t(odd >> 32) ^ word[1] ^ left;
    word[1] = uint32_t(odd);
    word[2] = uint32_t(even >> 32) ^ word[3] ^ right;
    word[3] = uint32_t(even);
    left += 0x9E3779B9u;
    right += 0xBB67AE85u;
  }
  const uint32_t lower = position & 1 ? word[1] : word[0];
  const uint32_t upper = position & 1 ? word[3] : word[2];
  return (position & 2 ? upper : lower) > last_dropped;
}

}  // namespace philox

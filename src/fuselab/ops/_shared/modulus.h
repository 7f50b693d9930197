// Python's modulus of ids, for CUDA and C++ kernels.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define FUSELAB_BOTH __host__ __device__ __forceinline__
#else
#define FUSELAB_BOTH inline
#endif

// Returns id mod cardinality, in [0, cardinality), for a positive cardinality; ids may be negative.
// If both fit 32 bits, as hashed ids do, the division takes a third of the instructions.
FUSELAB_BOTH int64_t modulus(int64_t id, int64_t cardinality) {
  if (((id | cardinality) >> 32) == 0) {
    return static_cast<uint32_t>(id) % static_cast<uint32_t>(cardinality);
  }
  const int64_t remainder = id % cardinality;
  return remainder < 0 ? remainder + cardinality : remainder;
}

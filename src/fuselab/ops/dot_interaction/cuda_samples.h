// The addresses of a sample's vectors, and the numbering of its pairs.
#pragma once

#include <cstdint>

__device__ constexpr int divided_up(int number, int by) { return (number + by - 1) / by; }

// Returns the number of pairs (1, 0), (2, 0), (2, 1), ... of vectors before this one.
__device__ constexpr int pairs_before(int vector) { return vector * (vector - 1) / 2; }

// Vector 0 is the dense one.
template <class Element>
__device__ __forceinline__ const Element* row_of(int vector, int64_t sample, const Element* dense,
                                                 const Element* embeddings, int64_t dense_stride,
                                                 int64_t batch_stride, int64_t vector_stride) {
  if (vector == 0) return dense + sample * dense_stride;
  return embeddings + sample * batch_stride + (vector - 1) * vector_stride;
}

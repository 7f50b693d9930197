// The arithmetic of the pointwise CUDA kernels, and the offsets of their operands.
#pragma once

#include "cuda_vectors.h"

constexpr int threads = 256;  // of a block

// Arithmetic is in float, or in double for a double output.
template <class Output>
struct ArithmeticOf {
  using type = float;
};
template <>
struct ArithmeticOf<double> {
  using type = double;
};
template <class Output>
using Arithmetic = typename ArithmeticOf<Output>::type;

// The offsets of operands in a nest of `rank` loops, from the output's own offset, which is the
// loop counter. Sizes and strides are those of five loops, innermost last; the first 5 - rank are
// ignored.
template <int rank, class Index>
struct Position {
  Index index[rank];
  FUSELAB_INLINE Position(Index offset, const int64_t (&sizes)[5]) {
#pragma unroll
    for (int dim = rank - 1; dim > 0; --dim) {
      index[dim] = offset % Index(sizes[5 - rank + dim]);
      offset /= Index(sizes[5 - rank + dim]);
    }
    index[0] = offset;
  }
  FUSELAB_INLINE Index offset(const int64_t (&strides)[5]) const {
    Index sum = 0;
#pragma unroll
    for (int dim = 0; dim < rank; ++dim) sum += index[dim] * Index(strides[5 - rank + dim]);
    return sum;
  }
};

// Loads `width` elements, `step` apart; packed ones are contiguous and aligned, and take one load.
template <bool packed, int width, class Element, class Index>
FUSELAB_INLINE Pack<Element, width> load_along(const Element* first, Index step) {
  if constexpr (packed) {
    return load<true, width>(first);
  } else {
    Pack<Element, width> pack;
#pragma unroll
    for (int i = 0; i < width; ++i) pack.element[i] = first[i * step];
    return pack;
  }
}

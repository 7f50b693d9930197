// The masks of dropouts at given positions, for test_dropout.py: in vectors of C++, and one by one
// as CUDA C++ computes them.

#include "cpu_dropout.h"
#include "cpu_sweep.h"
#include "cuda_dropout.h"

constexpr uint32_t number = 3, last_dropped = 0x4cccccccu;

template <class Real>
void at_positions(const int64_t* positions, int32_t* masks, int64_t seed, int64_t count) {
  using V = Vector<Real>;
  for (int64_t i = 0; i < count; i += lanes<V>) {
    LongIntegers<V> position = {};
    for (int64_t lane = 0; lane < lanes<V>; ++lane)
      position[lane] = positions[i + lane < count ? i + lane : 0];
    const auto kept = math::kept<V>(math::Stepped<V>(seed), position, number, last_dropped);
    for (int64_t lane = 0; lane < lanes<V> && i + lane < count; ++lane)
      masks[i + lane] = kept[lane] != 0;
  }
}

// Computes the masks of as many positions in a row as a vector has lanes, from each position on.
template <class Real>
void in_rows(const int64_t* positions, int32_t* masks, int64_t seed, int64_t count, int64_t width) {
  using V = Vector<Real>;
  for (int64_t i = 0; i < count; ++i) {
    const math::Stepped<V> position(positions[i], 1);
    const auto kept = math::kept<V>(math::Stepped<V>(seed), position, number, last_dropped);
    for (int64_t lane = 0; lane < width && lane < lanes<V>; ++lane)
      masks[i * width + lane] = kept[lane] != 0;
  }
}

// `Real` only gives the three functions one form.
template <class Real>
void one_by_one(const int64_t* positions, int32_t* masks, int64_t seed, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    masks[i] = philox::kept(seed, positions[i], number, last_dropped);
}

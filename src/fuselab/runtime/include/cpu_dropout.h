// The masks of dropouts, in vectors: whether elements are kept, by Philox-4x32-10 (J. Salmon and
// others, "Parallel random numbers: as easy as 1, 2, 3", 2011).
//
// Words of 32 bits lie in lanes of 64, because the machine multiplies them so. Their upper halves are
// left as they come: a multiplication reads the lower ones alone.
#pragma once

#include "cpu_positions.h"

namespace math {

template <class Words>
struct PhiloxWords {
  Words first, second, third, fourth;
};

// Returns the random words of the dropout `number` of a seed for groups of four positions.
template <class Words>
FUSELAB_INLINE PhiloxWords<Words> philox(int64_t seed, Words group, uint32_t number) {
  constexpr uint64_t low = 0xffffffffu;
  Words first = group, second = group >> 32, third = number - Words{}, fourth = {};
  uint32_t left = uint32_t(seed), right = uint32_t(uint64_t(seed) >> 32);
#pragma GCC unroll 10
  for (int turn = 0; turn < 10; ++turn) {
    const Words even = (first & low) * 0xD2511F53u, odd = (third & low) * 0xCD9E8D57u;
    first = (odd >> 32) ^ second ^ uint64_t(left);
    second = odd;
    third = (even >> 32) ^ fourth ^ uint64_t(right);
    fourth = even;
    left += 0x9E3779B9u;
    right += 0xBB67AE85u;
  }
  return {first & low, second & low, third & low, fourth & low};
}

template <class Words, std::size_t... lane>
FUSELAB_INLINE auto interleaved(Words low, Words high, std::index_sequence<lane...>) {
  return __builtin_shufflevector(low, high, int(lane / 2 + lane % 2 * (sizeof...(lane) / 2))...);
}

// Returns the words of as many positions in a row as there are lanes: those of half as many groups,
// which are enough wherever the first position lies in its group.
template <class V>
FUSELAB_INLINE Lanes<uint32_t, lanes<V>> words_in_a_row(int64_t seed, int64_t first,
                                                        uint32_t number) {
  constexpr int64_t groups = lanes<V> > 4 ? lanes<V> / 2 : 2;
  using Words = Lanes<uint64_t, groups>;
  Words group;
  for (int64_t i = 0; i < groups; ++i) group[i] = uint64_t(first >> 2) + i;
  const auto word = philox(seed, group, number);
  const auto joined = interleaved(word.first | word.second << 32, word.third | word.fourth << 32,
                                  std::make_index_sequence<2 * groups>{});
  uint32_t found[4 * groups];
  std::memcpy(found, &joined, sizeof found);
  return load_as<Lanes<uint32_t, lanes<V>>>(found + (first & 3));
}

// Returns the words of any positions.
template <class V>
FUSELAB_INLINE Lanes<uint32_t, lanes<V>> words_at(int64_t seed, LongIntegers<V> position,
                                                  uint32_t number) {
  uint32_t found[lanes<V>];
  using Words = Lanes<uint64_t, 2>;
  for (int64_t i = 0; i < lanes<V>; i += 2) {
    const Words place = {uint64_t(position[i]), uint64_t(position[i + 1])};
    const auto word = philox(seed, place >> 2, number);
    for (int64_t k = 0; k < 2; ++k) {
      const uint64_t four[4] = {word.first[k], word.second[k], word.third[k], word.fourth[k]};
      found[i + k] = uint32_t(four[place[k] & 3]);
    }
  }
  return load_as<Lanes<uint32_t, lanes<V>>>(found);
}

template <class V>
FUSELAB_INLINE int64_t of_all_lanes(LongIntegers<V> number) {
  return number[0];
}
template <class V>
FUSELAB_INLINE int64_t of_all_lanes(Stepped<V> number) {
  return number.first;
}
template <class V>
FUSELAB_INLINE int64_t of_all_lanes(Line<V> number) {
  return number.first;
}
template <class V>
FUSELAB_INLINE int64_t of_all_lanes(SmallStepped<V> number) {
  return number.first;
}
template <class V>
FUSELAB_INLINE int64_t of_all_lanes(Narrow<V> number) {
  return number.lane[0];
}
template <class V>
FUSELAB_INLINE int64_t of_all_lanes(Bounds<V>) {
  return 0;
}

// Returns whether the elements at `position` are kept by the dropout `number` of a seed: by random
// words above `last_dropped`. The key is the seed, which is the same in all lanes. Four elements in a
// row have the words of one counter.
template <class V, class Seed, class Place>
FUSELAB_INLINE Integers<V> kept(Seed seed, Place position, uint32_t number, uint32_t last_dropped) {
  const int64_t key = of_all_lanes<V>(seed);
  Lanes<uint32_t, lanes<V>> word;
  constexpr bool is_irregular =
      std::is_same_v<Place, Narrow<V>> || std::is_same_v<Place, Bounds<V>>;
  if constexpr (is_irregular || std::is_same_v<Place, LongIntegers<V>>) {
    word = words_at<V>(key, integers<V>(position), number);
  } else {
    const Stepped<V> place = stepped<V>(position);
    word = place.step == 1 ? words_in_a_row<V>(key, place.first, number)
                           : words_at<V>(key, place.vector(), number);
  }
  return __builtin_convertvector(word > last_dropped, Integers<V>);
}

}  // namespace math

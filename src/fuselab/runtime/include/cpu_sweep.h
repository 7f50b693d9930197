// The loops of C++ kernels that sweep over rows and columns (fuselab/runtime/sweep.py).
//
// A kernel says what is computed at one place, and this header walks over all places:
//
//   sweep<Real, lane>(loops, [&](const auto& rows) {
//     const auto total = rows.reduce([=](auto at) { return Sum{at(x_array)}; });
//     rows.each([=](auto at) { at.store(output_array, at(x_array) / at(total)); });
//   });
//
// The inner functions capture by value: what they hold is then known not to change by a store.
//
// `at` is the place of one vector. Its lanes are neighbouring columns of a row, or neighbouring
// rows at one column: whichever lies side by side in memory. at(array) loads, at(total) is what was
// reduced for the rows at hand. What is computed once per row is computed for a vector of rows in
// both cases. A thread owns a block of rows. Where there are few rows with many columns, the threads
// share the columns of a block, in pieces that depend on the sizes alone, so that results are the
// same for any number of threads.
#pragma once

#include <omp.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <tuple>
#include <utility>

#include "cpu_elements.h"
#include "cpu_positions.h"

enum class Lane { column, row };  // what the lanes of a vector are

// Sizes and strides in elements as fuselab/runtime/sweep.py passes them. Rows are four nested loops
// and columns three; the sizes of all but the outermost are given, and the product of all. An
// operand has four strides for the rows, outermost first, and three for the columns.
template <int operands>
struct Loops {
  int64_t rows, row_size_1, row_size_2, row_size_3, columns, column_size_1, column_size_2;
  int64_t strides[operands][7];
};

// The operand at `place` in the strides. One without elements stands for a position.
template <int place, class Element>
struct Array {
  Element* data;
};

template <class... Elements, std::size_t... place>
FUSELAB_INLINE auto arrays_of(std::index_sequence<place...>, Elements*... data) {
  return std::tuple{Array<int(place), Elements>{data}...};
}
template <class... Elements>
FUSELAB_INLINE auto arrays(Elements*... data) {
  return arrays_of(std::index_sequence_for<Elements...>{}, data...);
}
constexpr void* position = nullptr;

// Whether the numbers grow by `step` from lane to lane.
template <class V>
FUSELAB_INLINE bool is_regular(LongIntegers<V> number, int64_t step) {
  const LongIntegers<V> difference = number - math::Stepped<V>(number[0], step);
  return reduced<lanes<V> / 2>(difference, [](auto a, auto b) { return a | b; }) == 0;
}

// --- reductions -----------------------------------------------------------------------------------

// The last lane in all lanes.
template <class V>
FUSELAB_INLINE V last_lane(V value) {
  return math::splat<V>(value[lanes<V> - 1]);
}
// In each lane the reduction of the lanes before it and its own: first of two lanes, then of four.
template <int64_t step, class Term, class V, std::size_t... lane>
FUSELAB_INLINE V running_lanes(V value, std::index_sequence<lane...> each) {
  constexpr int64_t count = sizeof...(lane);
  if constexpr (step >= count) {
    return value;
  } else {
    const V before = __builtin_shufflevector(
        math::splat<V>(Term::neutral()), value,
        int(int64_t(lane) < step ? int64_t(lane) : count + int64_t(lane) - step)...);
    return running_lanes<2 * step, Term>(Term::combine(before, value), each);
  }
}

// A term of a reduction. Its Partial collects the terms of a short run in registers, and its State
// collects partial results: `fold` takes a Partial, `merge` another State, and `across` combines the
// lanes of the result.
template <class V>
struct Sum {
  V value;

  // Terms go to four accumulators in turn: an addition need not wait for the one before.
  struct Partial {
    V part[4] = {};

    FUSELAB_INLINE void add(V term) {
      const V next = part[0] + term;
      part[0] = part[1], part[1] = part[2], part[2] = part[3], part[3] = next;
    }
  };

  // The total's rounding error is kept (Knuth's two-sum), so that the error of a sum does not grow
  // with its length.
  struct State {
    V total = {}, error = {};

    FUSELAB_INLINE void fold(const Partial& run) {
      include((run.part[0] + run.part[1]) + (run.part[2] + run.part[3]));
    }
    FUSELAB_INLINE void include(V term) {
      const V sum = total + term;
      if constexpr (math::is_real<V>) {
        const V added = opaque(sum) - total;
        const V lost = (total - (sum - added)) + (term - added);
        error += choose(lost == lost, lost, V{});  // infinity - infinity is no error
      }
      total = sum;
    }
    FUSELAB_INLINE void merge(const State& other) {
      include(other.total);
      error += other.error;
    }
    FUSELAB_INLINE V result() const { return total + error; }
    FUSELAB_INLINE State last() const { return {last_lane(total), last_lane(error)}; }
    // The lanes of float numbers, added up in float64 as far as its vectors have fewer.
    FUSELAB_INLINE Doubles in_doubles() const {
      float lane[2 * lanes<V>];
      store<false>(lane, error);
      store<false>(lane + lanes<V>, total);
      Doubles sum{};
      for (int64_t i = 0; i < 2 * lanes<V>; i += lanes<Doubles>) sum += load<Doubles>(lane + i);
      return sum;
    }
    FUSELAB_INLINE Scalar<V> across() const {
      if constexpr (std::is_same_v<Scalar<V>, float>) {
        return float(sum_of(in_doubles()));
      } else {
        return sum_of(total) + sum_of(error);
      }
    }
  };
  static constexpr Scalar<V> neutral() { return 0; }
  static FUSELAB_INLINE V combine(V a, V b) { return a + b; }
};
template <class V>
Sum(V) -> Sum<V>;

// The sums of the lanes of terms(0), terms(1), ..., a vector of float64 for each lane of the result.
template <class Terms>
__attribute__((noinline, flatten)) Floats sums_across(Terms terms) {
  float sums[lanes<Floats>];
  for (int64_t first = 0; first < lanes<Floats>; first += lanes<Doubles>) {
    Doubles square[lanes<Doubles>];
#pragma GCC unroll 16
    for (int64_t i = 0; i < lanes<Doubles>; ++i) square[i] = terms(first + i);
    transpose<lanes<Doubles> / 2>(square);
    Doubles sum = square[0];
#pragma GCC unroll 16
    for (int64_t i = 1; i < lanes<Doubles>; ++i) sum += square[i];
    for (int64_t i = 0; i < lanes<Doubles>; ++i) sums[first + i] = float(sum[i]);
  }
  return load_as<Floats>(sums);
}

// The number of terms that are true. A run is counted in lanes as wide as a mask's.
template <class Mask>
struct Count {
  Mask value;
  using Numbers = Lanes<int64_t, lanes<Mask>>;

  struct Partial {
    Mask part[2] = {};

    FUSELAB_INLINE void add(Mask term) {
      const Mask next = part[0] - term;
      part[0] = part[1], part[1] = next;
    }
  };
  struct State {
    Numbers total = {};

    FUSELAB_INLINE void fold(const Partial& run) {
      total += __builtin_convertvector(run.part[0] + run.part[1], Numbers);
    }
    FUSELAB_INLINE void merge(const State& other) { total += other.total; }
    FUSELAB_INLINE Numbers result() const { return total; }
    FUSELAB_INLINE int64_t across() const { return sum_of(total); }
  };
  static constexpr Scalar<Mask> neutral() { return 0; }
};
template <class Mask>
Count(Mask) -> Count<Mask>;

// The partial result of a reduction by a function of two values.
template <class V, class Combined>
struct CombinedTerms {
  V part[2];

  FUSELAB_INLINE CombinedTerms() {
    for (V& one : part) one = math::splat<V>(Combined::neutral());
  }
  FUSELAB_INLINE void add(V term) {
    const V next = Combined::combine(part[0], term);
    part[0] = part[1], part[1] = next;
  }
};

// The state of such a reduction, which has no rounding errors to care for.
template <class V, class Combined>
struct Running {
  V value = math::splat<V>(Combined::neutral());

  FUSELAB_INLINE void fold(const CombinedTerms<V, Combined>& run) {
    value = Combined::combine(value, Combined::combine(run.part[0], run.part[1]));
  }
  FUSELAB_INLINE void include(V term) { value = Combined::combine(value, term); }
  FUSELAB_INLINE void merge(const Running& other) {
    value = Combined::combine(value, other.value);
  }
  FUSELAB_INLINE V result() const { return value; }
  FUSELAB_INLINE Running last() const { return {last_lane(value)}; }
  FUSELAB_INLINE Scalar<V> across() const {
    return reduced<lanes<V> / 2>(value, [](V a, V b) { return Combined::combine(a, b); });
  }
};

template <class V>
struct Product {
  V value;
  using Partial = CombinedTerms<V, Product>;
  using State = Running<V, Product>;
  static constexpr Scalar<V> neutral() { return 1; }
  static FUSELAB_INLINE V combine(V a, V b) { return a * b; }
};
template <class V>
Product(V) -> Product<V>;

template <class V>
struct Maximum {
  V value;
  using Partial = CombinedTerms<V, Maximum>;
  using State = Running<V, Maximum>;
  using Limits = std::numeric_limits<Scalar<V>>;
  static constexpr Scalar<V> neutral() {
    return Limits::has_infinity ? -Limits::infinity() : Limits::lowest();
  }
  static FUSELAB_INLINE V combine(V a, V b) { return math::maximum(a, b); }
};
template <class V>
Maximum(V) -> Maximum<V>;

template <class V>
struct Minimum {
  V value;
  using Partial = CombinedTerms<V, Minimum>;
  using State = Running<V, Minimum>;
  using Limits = std::numeric_limits<Scalar<V>>;
  static constexpr Scalar<V> neutral() {
    return Limits::has_infinity ? Limits::infinity() : Limits::max();
  }
  static FUSELAB_INLINE V combine(V a, V b) { return math::minimum(a, b); }
};
template <class V>
Minimum(V) -> Minimum<V>;

template <class Term>
FUSELAB_INLINE std::tuple<Term> as_tuple(Term term) {
  return {term};
}
template <class... Terms>
FUSELAB_INLINE std::tuple<Terms...> as_tuple(std::tuple<Terms...> terms) {
  return terms;
}

// --- scratch memory -------------------------------------------------------------------------------

// Begins the lives of `count` values, of which some types set members.
template <class Value>
void construct(Value* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) ::new (static_cast<void*>(values + i)) Value;
}

// The memory in which a thread keeps values of a block of rows. It serves block after block, and is
// kept from call to call unless it is large.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() {
    release();
    std::free(slots_);
  }

  // Returns memory for `count` values, which holds until the next reset. Addresses a multiple of
  // 4096 bytes apart would make loads wait for stores, so each memory begins at another offset.
  template <class Value>
  Value* take(int64_t count) {
    const std::size_t offset = next_ * 320 % 4096;
    if (next_ == count_) add_slot();
    Slot& slot = slots_[next_++];
    const std::size_t bytes = (offset + count * sizeof(Value) + 63) / 64 * 64;
    if (slot.bytes < bytes) slot.renew(bytes);
    return reinterpret_cast<Value*>(static_cast<std::byte*>(slot.memory) + offset);
  }
  void reset() { next_ = 0; }
  void release_if_large() {
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < count_; ++i) bytes += slots_[i].bytes;
    if (bytes > std::size_t{1} << 23) release();
  }

 private:
  struct Slot {
    void* memory;
    std::size_t bytes;

    void release() {
      std::free(memory);
      memory = nullptr, bytes = 0;
    }
    void renew(std::size_t wanted) {
      release();
      memory = std::aligned_alloc(64, wanted);
      if (!memory) throw std::bad_alloc();
      bytes = wanted;
    }
  };
  void add_slot() {
    void* const grown = std::realloc(slots_, (count_ + 1) * sizeof(Slot));
    if (!grown) throw std::bad_alloc();
    slots_ = static_cast<Slot*>(grown);
    slots_[count_++] = {nullptr, 0};
  }
  void release() {
    for (std::size_t i = 0; i < count_; ++i) slots_[i].release();
  }
  Slot* slots_ = nullptr;
  std::size_t count_ = 0, next_ = 0;
};

inline Scratch& scratch_of_thread() {
  static thread_local Scratch scratch;
  return scratch;
}

// From this size on a result is written past the caches: it would not remain there, and memory is
// not read for it first.
constexpr int64_t bytes_to_stream = 1 << 22;

// --- places ---------------------------------------------------------------------------------------

// A value for each row of a block: a vector of them, and where lanes are rows, one vector for each
// strip of the block's rows.
template <class Value, Lane lane>
struct PerRow {
  Value rows;
};
template <class Value>
struct PerRow<Value, Lane::row> {
  Value* strip;
};

// A vector of integers, told apart from a mask, with what a body asks of it at every column: whether the
// numbers grow regularly, and their lower bits.
template <class V>
struct Counts {
  LongIntegers<V> number;
  Integers<V> lower;
  bool is_regular;

  FUSELAB_INLINE Counts() = default;
  explicit FUSELAB_INLINE Counts(LongIntegers<V> numbers)
      : number(numbers), lower(math::narrowed_integers<V>(numbers)),
        is_regular(::is_regular<V>(numbers, numbers[1] - numbers[0])) {}
};

// The same of integers that reductions of rows give: they do not grow regularly from row to row.
template <class V>
struct Totals {
  LongIntegers<V> number;
};

// What a running reduction has come to, for each row of a block, or each strip of rows.
template <class Term>
struct SoFar {
  typename Term::State* states;
};

// A value for each element of a block's rows, kept from one sweep over the columns to the next.
template <class V>
struct Kept {
  Scalar<V>* data;
};

// A value that is computed where it is read.
template <class Body>
struct Deferred {
  Body body;
};

// A value for each column, the same in all rows.
template <class V>
struct PerColumn {
  const Scalar<V>* data;
};

// Sums over rows, one for each column. Where lanes are rows, each lane has a sum of its own.
template <class V>
struct RowSum {
  Scalar<V>* data;
};

enum class Extent {
  whole,   // all lanes, and every stride from lane to lane is 1 or 0
  part     // the first `count` lanes, of any stride
};

// What positions are at a place (cpu_positions.h): Stepped numbers; or Lines, within a stretch in which
// no condition on positions changes, or to find out how far one reaches; or numbers known to be small,
// or their Bounds, to find out whether they are. To find out, nothing is loaded, stored or added to
// anything.
enum class Positions { stepped, within_stretch, finding_stretch, small, finding_bounds };

// What a kernel's body is asked for: how far a stretch reaches; or whether its numbers are small, where
// `furthest` has the last position of each operand that stands for one, in the whole kernel, and
// `strips` is the number of strips in the block.
struct Findings : math::Stretch {
  bool is_small = true;
  const int64_t* furthest = nullptr;
  int64_t strips = 0;
};

// Offsets of all operands: at the first lane, from lane to lane, and from one vector to the next
// across the lanes: to the next row, or to the next column where lanes are rows.
template <int operands>
struct Offsets {
  int64_t base[operands], across[operands], along[operands];
};

// A short run of columns. Where lanes are rows, an operand whose columns are neighbours in memory is
// read and written in squares of columns and rows, which are transposed.
template <class V, int operands>
struct Run {
  Offsets<operands> offsets;
  int64_t first, last, before;  // columns of the innermost loop; columns before that loop
  V* squares;        // one for each operand
  int64_t elements;  // of the kernel
  bool along_rows = false;  // whether the next vector is that of the next rows

  template <int place>
  FUSELAB_INLINE bool is_transposed() const {
    return offsets.along[place] == 1 && offsets.across[place] > 1;
  }
  // Whether a large result's whole vectors are written past the caches. They must fill whole lines of
  // 64 bytes: in a short run of elements that begin anywhere, and where the next vector written lies
  // in another row of the result, the caches join what makes up a line.
  template <int place, Lane lane, class Element>
  FUSELAB_INLINE bool is_streamed() const {
    if (lane == Lane::row && !along_rows && lanes<V> * sizeof(Element) < 64) return false;
    const bool is_long = last - first >= 512 || offsets.along[place] % lanes<V> == 0;
    return is_long && elements * int64_t(sizeof(Element)) >= bytes_to_stream;
  }
};

// A vector's place: `first` is its first lane's column in the run (or row of the block), `along` its
// column, `strip` its row of the block (or strip of rows), and `kept` its offset in what is kept of
// the block.
template <class Real, Lane lane, int operands, Extent extent,
          Positions positions = Positions::stepped>
class At {
 public:
  using V = Vector<Real>;

  FUSELAB_INLINE At(const Run<V, operands>& run, int64_t first, int64_t along, int64_t count,
                    int64_t strip, int64_t kept, Findings* findings = nullptr)
      : run_(run), first_(first), along_(along), count_(count), strip_(strip), kept_(kept),
        findings_(findings) {}

  template <int place, class Element>
  FUSELAB_INLINE auto operator()(Array<place, Element> array) const {
    const int64_t stride = stride_of<place>();
    if constexpr (std::is_void_v<Element> && is_bounding) {
      return math::Bounds<V>(0, double(findings_->furthest[place]), &findings_->is_small);
    } else if constexpr (std::is_void_v<Element>) {
      return number(math::Stepped<V>(offset<place>() + first_ * stride, stride));
    } else if constexpr (is_finding) {
      return nothing<Element>();
    } else {
      using Plain = std::remove_const_t<Element>;
      const auto* from = reinterpret_cast<const Stored<Plain>*>(array.data) + offset<place>();
      if (stride == 0) {
        return computed<V, Plain>(*from - StoredLanes<V, Plain>{});  // a difference keeps -0.0
      }
      if constexpr (has_squares<Plain>) {
        if (run_.template is_transposed<place>()) {
          V* const square = square_of<place>();
          const int64_t column = (along_ - run_.first) % lanes<V>;
          if (column == 0) {
            const int64_t columns = smaller(run_.last - along_, lanes<V>);
            load_transposed<V, Plain>(square, from + first_ * stride, stride, count_, columns);
          }
          return square[column];
        }
      }
      if constexpr (extent == Extent::whole && (lane == Lane::column || has_squares<Plain>)) {
        return computed<V, Plain>(load_as<StoredLanes<V, Plain>>(from + first_));
      }
      if constexpr (has_masked_tail<V, Plain>) {
        if (stride == 1) return load<V>(array.data + offset<place>() + first_, First{count_});
      }
      return computed<V, Plain>(load_lanes<V, Plain>(from + first_ * stride, stride, count_));
    }
  }
  // Returns the elements that lie `beyond` elements behind those at this place, in each lane another
  // number. It grows regularly from lane to lane, as in a window; or mostly it does, or it is the same
  // in all, as that of a row chosen by an index.
  template <int place, class Element>
  FUSELAB_INLINE auto chosen(Array<place, Element> array, math::Line<V> beyond) const {
    return chosen(array, beyond.stepped());
  }
  template <int place, class Element>
  FUSELAB_INLINE auto chosen(Array<place, Element> array, math::SmallStepped<V> beyond) const {
    return chosen(array, math::stepped<V>(beyond));
  }
  template <int place, class Element>
  FUSELAB_INLINE auto chosen(Array<place, Element>, math::Bounds<V>) const {
    return nothing<Element>();
  }
  template <int place, class Element>
  FUSELAB_INLINE auto chosen(Array<place, Element> array, math::Narrow<V> beyond) const {
    return chosen_where(array, first_lanes<Integers<V>>(count_), beyond);
  }
  template <int place, class Element>
  FUSELAB_INLINE auto chosen(Array<place, Element> array, math::Stepped<V> beyond) const {
    if constexpr (is_finding) return nothing<Element>();
    using Plain = std::remove_const_t<Element>;
    const int64_t step = stride_of<place>() + beyond.step;
    const auto* const first = first_of<place, Plain>(array) + beyond.first;
    if (step == 0) return computed<V, Plain>(*first - StoredLanes<V, Plain>{});
    if constexpr (has_masked_tail<V, Plain>) {
      if (step == 1 && count_ < lanes<V>)
        return load<V>(reinterpret_cast<const Plain*>(first), First{count_});
    }
    return computed<V, Plain>(load_lanes<V, Plain>(first, step, count_));
  }
  template <int place, class Element>
  FUSELAB_INLINE auto chosen(Array<place, Element> array, LongIntegers<V> beyond) const {
    if constexpr (is_finding) return nothing<Element>();
    using Plain = std::remove_const_t<Element>;
    const auto* const first = first_of<place, Plain>(array);
    const int64_t stride = stride_of<place>(), step = stride + beyond[1] - beyond[0];
    if (count_ == lanes<V> && (step == 1 || step == 2) && is_regular<V>(beyond, step - stride))
      return computed<V, Plain>(load_lanes<V, Plain>(first + beyond[0], step, count_));
    Stored<Plain> found[lanes<V>] = {};
    for (int64_t i = 0; i < count_; ++i) found[i] = first[i * stride + beyond[i]];
    return computed<V, Plain>(load_as<StoredLanes<V, Plain>>(found));
  }
  // Returns integers that are only compared: of 32 bits beside float, they need not be widened.
  template <int place, class Element, class Beyond>
  FUSELAB_INLINE auto chosen_to_compare(Array<place, Element> array, Beyond beyond) const {
    using Plain = std::remove_const_t<Element>;
    if constexpr (std::is_same_v<Plain, Scalar<Integers<V>>> && sizeof(Plain) == 4 && is_small &&
                  std::is_same_v<Beyond, math::Narrow<V>>) {
      const math::Narrow<V> places(beyond), own = math::SmallStepped<V>(0, stride_of<place>());
      return math::Words<V>{gathered_where<V, Plain>(first_of<place, Plain>(array),
                                                     (places + own).lane,
                                                     first_lanes<Integers<V>>(count_))};
    } else {
      return chosen(array, beyond);
    }
  }
  // Returns these elements in the lanes where `condition` is true, and 0 in the others, for which
  // nothing is read.
  template <int place, class Element, class Beyond>
  FUSELAB_INLINE auto chosen_where(Array<place, Element> array, math::Same condition,
                                   Beyond beyond) const {
    return condition.value ? chosen(array, beyond) : nothing<Element>();
  }
  template <int place, class Element>
  FUSELAB_INLINE auto chosen_where(Array<place, Element> array, Integers<V> condition,
                                   math::Line<V> beyond) const {
    return chosen_where(array, condition, beyond.stepped());
  }
  template <int place, class Element>
  FUSELAB_INLINE auto chosen_where(Array<place, Element> array, Integers<V> condition,
                                   math::SmallStepped<V> beyond) const {
    return chosen_where(array, condition, math::stepped<V>(beyond));
  }
  template <int place, class Element>
  FUSELAB_INLINE auto chosen_where(Array<place, Element>, Integers<V>, math::Bounds<V>) const {
    return nothing<Element>();
  }
  template <int place, class Element, class Beyond>
  FUSELAB_INLINE auto chosen_where(Array<place, Element> array, Integers<V> condition,
                                   Beyond beyond) const {
    if constexpr (is_finding) return nothing<Element>();
    using Plain = std::remove_const_t<Element>;
    using Found = StoredLanes<V, Plain>;
    const auto* const first = first_of<place, Plain>(array);
    const int64_t stride = stride_of<place>();
    if (count_ < lanes<V>) condition &= first_lanes<Integers<V>>(count_);
    if constexpr (std::is_same_v<Beyond, math::Stepped<V>>) {
      if (count_ == lanes<V> && !math::any(~condition)) return chosen(array, beyond);
      const int64_t step = stride + beyond.step;
      const auto* const begin = first + beyond.first;
#if defined(__AVX2__)
      if constexpr (has_masked_load<V, Plain>) {
        constexpr auto each = std::make_index_sequence<lanes<V>>{};
        if (step == 1) return computed<V, Plain>(load_where<V, Plain>(begin, condition));
        if (step == -1) {
          const Integers<V> mask = backwards(condition, each);
          const Found found = load_where<V, Plain>(begin - (lanes<V> - 1), mask);
          return computed<V, Plain>(backwards(found, each));
        }
        if constexpr (sizeof(Found) == vector_bytes) {
          if (step == 2) return computed<V, Plain>(load_second_where<V, Plain>(begin, condition));
        }
      }
      if constexpr (std::is_same_v<Plain, float> && lanes<V> == lanes<Floats>) {
        if (math::is_small<V>(0, step)) {
          const Integers<V> places = math::small<V>(0, step);
          return gather_where(begin, places, condition);
        }
      }
#endif
      Stored<Plain> found[lanes<V>] = {};
      for (int64_t i = 0; i < count_; ++i)
        if (condition[i]) found[i] = begin[i * step];
      return computed<V, Plain>(load_as<Found>(found));
    } else if constexpr (std::is_same_v<Beyond, math::Narrow<V>>) {
      const math::Narrow<V> own = math::SmallStepped<V>(0, stride);
      return computed<V, Plain>(gathered_where<V, Plain>(first, (beyond + own).lane, condition));
    } else {
      Stored<Plain> found[lanes<V>] = {};
      for (int64_t i = 0; i < count_; ++i)
        if (condition[i]) found[i] = first[i * stride + beyond[i]];
      return computed<V, Plain>(load_as<Found>(found));
    }
  }
  template <class Value>
  FUSELAB_INLINE auto operator()(const PerRow<Value, Lane::row>& value) const {
    if constexpr (is_bounding && is_number<Value>) {
      auto bounds = bounds_of(value.strip[0]);
      for (int64_t strip = 1; strip < findings_->strips; ++strip)
        bounds = bounds.joined_with(bounds_of(value.strip[strip]));
      return bounds;
    } else {
      return number(value.strip[strip_]);
    }
  }
  // What belongs to a row is the same in all of its columns.
  template <class Value>
  FUSELAB_INLINE auto operator()(const PerRow<Value, Lane::column>& value) const {
    if constexpr (lane == Lane::row) {
      return number(value.rows);
    } else if constexpr (is_bounding && is_number<Value>) {
      return bounds_of(value.rows);
    } else if constexpr (std::is_same_v<Value, Counts<V>>) {
      return number(math::Stepped<V>(value.rows.number[strip_]));
    } else if constexpr (std::is_same_v<Value, Totals<V>>) {
      return math::splat<LongIntegers<V>>(value.rows.number[strip_]);
    } else if constexpr (std::is_same_v<Value, math::Stepped<V>>) {
      return number(math::Stepped<V>(value.rows.first + strip_ * value.rows.step));
    } else if constexpr (std::is_same_v<Value, Integers<V>> && has_lines) {
      return math::Same{value.rows[strip_] != 0};
    } else {
      return math::splat<Value>(value.rows[strip_]);
    }
  }
  template <class Body>
  FUSELAB_INLINE auto operator()(const Deferred<Body>& value) const {
    return value.body(*this);
  }
  // A vector behind a row's last column reads what no lane takes.
  FUSELAB_INLINE V operator()(PerColumn<V> value) const {
    if constexpr (is_finding) return V{};
    return load_as<V>(value.data + along_);
  }
  FUSELAB_INLINE V operator()(Kept<V> kept) const {
    if constexpr (is_finding) return V{};
    if constexpr (is_part_of_a_row) {
      return ::load<V>(kept.data + kept_, First{count_});
    } else {
      return load_as<V>(kept.data + kept_);
    }
  }

  // Adds a term to a running reduction of its row, and returns what it is at this column. Columns
  // come one after the other. Where lanes are columns, what came before is in all lanes of the state.
  template <class Term>
  FUSELAB_INLINE auto scan(SoFar<Term> so_far, Term term) const {
    if constexpr (is_finding) return term.value;
    typename Term::State& state = so_far.states[strip_];
    if constexpr (lane == Lane::row) {
      state.include(term.value);
      return state.result();
    } else {
      constexpr auto each = std::make_index_sequence<lanes<decltype(term.value)>>{};
      typename Term::State here = state;
      here.include(running_lanes<1, Term>(counted(term), each));
      state = here.last();
      return here.result();
    }
  }

  // Keeps a value for a later sweep, and returns it.
  FUSELAB_INLINE V keep(Kept<V> kept, V value) const {
    if constexpr (is_finding) return value;
    if constexpr (is_part_of_a_row) {
      ::store<false>(kept.data + kept_, value, First{count_});
    } else {
      ::store<false>(kept.data + kept_, value);
    }
    return value;
  }

  // Adds terms to the sums of their columns.
  FUSELAB_INLINE void add(RowSum<V> sum, V terms) const {
    if constexpr (is_finding) return;
    if constexpr (lane == Lane::row) {
      if constexpr (extent == Extent::part)
        terms = choose(first_lanes<Integers<V>>(count_), terms, V{});
      Scalar<V>* const data = sum.data + (run_.before + along_) * lanes<V>;
      ::store<false>(data, load_as<V>(data) + terms);
    } else if constexpr (is_part_of_a_row) {
      const First part{count_};
      ::store<false>(sum.data + along_, ::load<V>(sum.data + along_, part) + terms, part);
    } else {
      ::store<false>(sum.data + along_, load_as<V>(sum.data + along_) + terms);
    }
  }

  template <int place, class Element, class Value>
  FUSELAB_INLINE void store(Array<place, Element> array, Value value) const {
    if constexpr (is_finding) return;
    if constexpr (std::is_same_v<Value, math::Same>) return store(array, Integers<V>(value));
    const int64_t stride = stride_of<place>();
    auto* to = reinterpret_cast<Stored<Element>*>(array.data) + offset<place>();
    if constexpr (has_squares<Element>) {
      if (run_.template is_transposed<place>()) {
        V* const square = square_of<place>();
        const int64_t column = (along_ - run_.first) % lanes<V>;
        square[column] = value;
        if (column + 1 == lanes<V> || along_ + 1 == run_.last) {
          auto* const corner = to + first_ * stride - column;
          store_transposed<V, Element>(square, corner, stride, count_, column + 1);
        }
        return;
      }
    }
    if constexpr (extent == Extent::part && has_masked_tail<V, Element>) {
      if (stride == 1) {
        return ::store<false>(array.data + offset<place>() + first_, value, First{count_});
      }
    }
    const StoredLanes<V, Element> elements = stored<V, Element>(value);
    if constexpr (extent == Extent::whole && (lane == Lane::column || has_squares<Element>)) {
      const bool is_aligned = reinterpret_cast<uintptr_t>(to + first_) % sizeof elements == 0;
      if (is_aligned && run_.template is_streamed<place, lane, Element>()) {
        store_whole<true>(to + first_, elements);
      } else {
        store_whole<false>(to + first_, elements);
      }
    } else {
      store_lanes<V, Element>(to + first_ * stride, elements, stride, count_);
    }
  }

  // Returns the term's value, with the neutral element in lanes that do not exist. Lanes that are
  // rows need none: what is reduced for a row that does not exist is not stored.
  template <class Term>
  FUSELAB_INLINE auto counted(Term term) const {
    if constexpr (is_part_of_a_row) {
      using Value = decltype(term.value);
      const Value neutral = math::splat<Value>(Term::neutral());
      return choose(first_lanes<Integers<Value>>(count_), term.value, neutral);
    } else {
      return term.value;
    }
  }

 private:
  static constexpr bool is_part_of_a_row = lane == Lane::column && extent == Extent::part;
  static constexpr bool has_lines =
      positions == Positions::within_stretch || positions == Positions::finding_stretch;
  static constexpr bool is_small = positions == Positions::small;
  static constexpr bool is_bounding = positions == Positions::finding_bounds;
  static constexpr bool is_finding = positions == Positions::finding_stretch || is_bounding;
  template <class Value>
  static constexpr bool is_number =
      std::is_same_v<Value, Counts<V>> || std::is_same_v<Value, math::Stepped<V>>;
  template <class Element>
  static constexpr bool has_squares =
      lane == Lane::row && (is_short<Element> || std::is_floating_point_v<Element>);

  // Returns elements that have not been loaded.
  template <class Element>
  static FUSELAB_INLINE auto nothing() {
    using Plain = std::remove_const_t<Element>;
    return computed<V, Plain>(StoredLanes<V, Plain>{});
  }

  // Returns a value of the rows as positions are here. A vector of it says nothing of the next one.
  template <class Value>
  FUSELAB_INLINE auto number(const Value& value) const {
    if constexpr (std::is_same_v<Value, math::Stepped<V>> && has_lines) {
      return math::Line<V>(value.first, value.step, stretch_of());
    } else if constexpr (std::is_same_v<Value, Counts<V>> && has_lines) {
      const int64_t first = value.number[0], step = value.number[1] - first;
      if (is_finding) findings_->end_at(lanes<V>);
      if (is_finding && !value.is_regular) findings_->end_at_once();
      return math::Line<V>(first, step, stretch_of());
    } else if constexpr (std::is_same_v<Value, Integers<V>> && has_lines) {
      const bool is_true = value[0] != 0;
      if (is_finding) findings_->end_at(math::any(value) == math::any(~value) ? 1 : lanes<V>);
      return math::Same{is_true};
    } else if constexpr (std::is_same_v<Value, math::Stepped<V>> && is_small) {
      return math::SmallStepped<V>(value.first, value.step);
    } else if constexpr (std::is_same_v<Value, Counts<V>> && is_small) {
      return math::Narrow<V>(value.lower);
    } else if constexpr (std::is_same_v<Value, Counts<V>> || std::is_same_v<Value, Totals<V>>) {
      return value.number;
    } else {
      return value;
    }
  }
  // Returns the bounds of a number in the lanes that exist.
  FUSELAB_INLINE math::Bounds<V> bounds_of(const math::Stepped<V>& value) const {
    const double first = value.first, last = first + double(lanes<V> - 1) * double(value.step);
    return {first < last ? first : last, first < last ? last : first, &findings_->is_small};
  }
  FUSELAB_INLINE math::Bounds<V> bounds_of(const Counts<V>& value) const {
    const auto is_other = math::compared<V>(value.number, math::widened_integers<V>(value.lower),
                                            [](auto a, auto b) { return a != b; });
    if (math::any(is_other)) return {-INFINITY, INFINITY, &findings_->is_small};
    return {double(minimum_of(value.lower)), double(maximum_of(value.lower)),
            &findings_->is_small};
  }
  // A null pointer that the compiler knows to be one takes no test.
  FUSELAB_INLINE math::Stretch* stretch_of() const { return is_finding ? findings_ : nullptr; }

  template <int place>
  FUSELAB_INLINE int64_t stride_of() const {
    return run_.offsets.across[place];
  }
  template <int place>
  FUSELAB_INLINE int64_t offset() const {
    const int64_t steps = lane == Lane::column ? strip_ : along_;
    return run_.offsets.base[place] + steps * run_.offsets.along[place];
  }
  template <int place, class Plain, class Element>
  FUSELAB_INLINE const Stored<Plain>* first_of(Array<place, Element> array) const {
    const auto* from = reinterpret_cast<const Stored<Plain>*>(array.data) + offset<place>();
    return from + first_ * stride_of<place>();
  }
  template <int place>
  FUSELAB_INLINE V* square_of() const {
    return run_.squares + place * lanes<V>;
  }

  const Run<V, operands>& run_;
  int64_t first_, along_, count_, strip_, kept_;
  Findings* findings_;
};

// --- blocks of rows -------------------------------------------------------------------------------

constexpr int64_t elements_for_threads = 1 << 15;  // below, starting a thread takes longer
constexpr int64_t columns_to_share = 1 << 16;      // elements of a block that threads share
constexpr int64_t columns_per_piece = 1 << 14;
constexpr int64_t cached_elements = 1 << 16;  // of a block, for which a core's own cache has room
constexpr int64_t most_strips = 64;
constexpr int64_t elements_of_short_rows = 1 << 12;  // of a block

// Returns quotient and remainder of non-negative numbers; most nests have one loop, where the
// division is not needed.
struct Divided {
  int64_t quotient, remainder;
};
FUSELAB_INLINE Divided divided(int64_t number, int64_t by) {
  if (number < by) return {0, number};
  return {number / by, number % by};
}

// The blocks of a kernel's rows: neighbouring rows, at most a vector, or strips of a vector each. With
// `every`, a block has every second (third, ...) row of a run: positions that are divided by that
// number then grow regularly from lane to lane.
template <class Real, Lane lane, int operands>
struct Blocks {
  static constexpr int64_t width = lanes<Vector<Real>>;

  explicit Blocks(const Loops<operands>& loops, int64_t every_row = 1) : every(every_row) {
    const int64_t rows = (loops.row_size_3 + every - 1) / every;
    rows_per_block = lane == Lane::column ? short_rows(loops) : strips_per_block(loops, rows) * width;
    blocks_per_phase = (rows + rows_per_block - 1) / rows_per_block;
    blocks_per_run = every * blocks_per_phase;
    count = loops.rows == 0 ? 0 : loops.rows / loops.row_size_3 * blocks_per_run;
    is_dense = true;
    for (const auto& step : loops.strides) {
      const int64_t across = lane == Lane::column ? step[6] : every * step[3];
      const bool is_transposed = lane == Lane::row && step[6] == 1;
      is_dense = is_dense && (across == 0 || across == 1 || is_transposed);
    }
  }

  // Several rows if they are short: the work for each sweep is then shared, and a processor computes
  // on one row while it waits for the sum of another.
  static int64_t short_rows(const Loops<operands>& loops) {
    const int64_t rows = elements_of_short_rows / larger<int64_t>(1, loops.columns);
    return larger<int64_t>(1, smaller(smaller(rows, loops.row_size_3), width));
  }

  // Few strips if the block then stays in the cache from sweep to sweep. A sum over a long batch is
  // not read again, and many strips make it read memory in longer pieces.
  static int64_t strips_per_block(const Loops<operands>& loops, int64_t rows) {
    const int64_t strips = (rows + width - 1) / width;
    const int64_t cached = cached_elements / larger<int64_t>(1, loops.columns * width);
    if (cached < 4) return smaller(strips, most_strips);
    const int64_t for_64_blocks = loops.rows / (64 * width);
    return smaller(smaller(strips, larger<int64_t>(4, for_64_blocks)),
                   smaller(cached, most_strips));
  }

  int64_t every, rows_per_block, blocks_per_phase, blocks_per_run, count;
  bool is_dense;  // lanes lie side by side in memory, or are the same element
};

// A block of rows and what is done with it.
template <class Real, Lane lane, int operands>
class Rows {
 public:
  using V = Vector<Real>;
  static constexpr int64_t width = lanes<V>;
  template <Extent extent, Positions positions = Positions::stepped>
  using Place = At<Real, lane, operands, extent, positions>;
  template <Positions positions = Positions::stepped>
  using PlaceOfRows = At<Real, Lane::row, operands, Extent::part, positions>;  // without a column

  Rows(const Loops<operands>& loops, const Blocks<Real, lane, operands>& blocks, int64_t block,
       bool shares)
      : loops_(loops), scratch_(scratch_of_thread()), shares_(shares), is_dense_(blocks.is_dense) {
    const auto [run, block_of_run] = divided(block, blocks.blocks_per_run);
    const auto [outer_two, inner] = divided(run, loops.row_size_2);
    const auto [outer, middle] = divided(outer_two, loops.row_size_1);
    const auto [phase, block_of_phase] = divided(block_of_run, blocks.blocks_per_phase);
    const int64_t every = blocks.every, before = block_of_phase * blocks.rows_per_block;
    const int64_t first = before * every + phase;
    const int64_t left = (loops.row_size_3 - first + every - 1) / every;
    count_ = larger<int64_t>(0, smaller(left, blocks.rows_per_block));
    strips_ = (count_ + width - 1) / width;
    units_ = lane == Lane::column ? count_ : strips_;
    run_.elements = loops.rows * loops.columns;
    Offsets<operands>& offsets = run_.offsets;
    for (int k = 0; k < operands; ++k) {
      const int64_t* step = loops.strides[k];
      offsets.base[k] = outer * step[0] + middle * step[1] + inner * step[2] + first * step[3];
      offsets.across[k] = step[3] * every;
      offsets.along[k] = step[6];
    }
    scratch_.reset();
  }

  // Calls body(at) for every vector of the rows and all of their columns.
  template <class Body>
  void each(Body body) const {
    each_of<Walked{.in_any_order = true}>(body);
  }
  // Does the same, and is faster where the body compares positions.
  template <class Body>
  void each_by_stretch(Body body) const {
    each_of<Walked{.in_any_order = true, .by_stretch = true}>(body);
  }

  // Returns body(at) for every vector of rows, without a column.
  template <class Body>
  __attribute__((flatten)) auto value(Body body) const {
    using Value = decltype(body(place_of_rows(0)));
    if constexpr (lane == Lane::column) {
      return PerRow<Value, lane>{body(place_of_rows(0))};
    } else {
      Value* const values = scratch_.template take<Value>(strips_);
      for (int64_t strip = 0; strip < strips_; ++strip) values[strip] = body(place_of_rows(strip));
      return PerRow<Value, lane>{values};
    }
  }
  // Returns the integer body(at) for every vector of rows.
  template <class Body>
  FUSELAB_INLINE auto integer(Body body) const {
    return value([=](auto at) {
      const auto number = body(at);
      if constexpr (std::is_same_v<decltype(number), const math::Stepped<V>>) {
        return number;
      } else {
        return Counts<V>(number);
      }
    });
  }
  template <int place, class Element>
  auto load(Array<place, Element> array) const {
    const auto body = [=](auto at) { return at(array); };
    constexpr bool is_real = std::is_floating_point_v<std::remove_const_t<Element>>;
    if constexpr (is_real || is_short<std::remove_const_t<Element>> ||
                  std::is_same_v<std::remove_const_t<Element>, bool>) {
      return value(body);
    } else {
      return integer(body);
    }
  }
  // Stores body(at) for every column of the first row, in whole vectors.
  template <class Body>
  __attribute__((flatten)) void store_columns(Real* to, Body body) const {
    static_assert(lane == Lane::column);
    const int64_t inner = loops_.column_size_2;
    V squares[1];
    for (int64_t before = 0; before < loops_.columns; before += inner) {
      Run<V, operands> run = run_at(squares, before);
      run.last = inner;
      for (int64_t at = 0; at < inner; at += width) {
        // Lanes behind the last column are 0: other numbers there may take long to compute with.
        const int64_t count = smaller(inner - at, width);
        const Place<Extent::part> place(run, at, before + at, count, 0, 0);
        ::store<false>(to + before + at, choose(first_lanes<Integers<V>>(count), body(place), V{}));
      }
    }
  }

  // Calls body(at) for every vector of rows, without a column.
  template <class Body>
  __attribute__((flatten)) void once(Body body) const {
    for (int64_t strip = 0; strip < strips_; ++strip) body(place_of_rows(strip));
  }
  // Does the same, and is faster where the body compares positions.
  template <class Body>
  __attribute__((flatten)) void once_by_stretch(Body body) const {
    Known is_known = Known::unknown;
    for (int64_t strip = 0; strip < strips_; ++strip) {
      Findings stretch;
      body(place_of_rows<Positions::finding_stretch>(strip, &stretch));
      if (stretch.lanes >= smaller(count_ - strip * width, width)) {
        body(place_of_rows<Positions::within_stretch>(strip));
      } else if (is_small(is_known, body)) {
        body(place_of_rows<Positions::small>(strip));
      } else {
        body(place_of_rows(strip));
      }
    }
  }

  // Returns body(at) of every row at its column `index`, and 0 where there is no such column: what
  // the sum over a row is of values that are 0 in all other columns.
  template <class Index, class Body>
  auto pick(PerRow<Index, lane> index, Body body) const {
    PerRow<V, lane> found;
    if constexpr (lane == Lane::row) found.strip = scratch_.template take<V>(strips_);
    V squares[lane == Lane::row ? operands * width : 1];
    for (int64_t strip = 0; strip < strips_; ++strip) {
      const int64_t first = strip * width;
      Scalar<LongIntegers<V>> wanted[width];
      Real value[width] = {};
      const LongIntegers<V> of_rows = index_of(index, strip);
      std::memcpy(wanted, &of_rows, sizeof wanted);
      for (int64_t row = 0; row < smaller(count_ - first, width); ++row) {
        const int64_t column = wanted[row];
        if (column < 0 || column >= loops_.columns) continue;
        const Run<V, operands> run = run_at(squares, column);
        const V picked = body(place_in(run, first + row, column));
        value[row] = picked[lane == Lane::row ? row : 0];
      }
      if constexpr (lane == Lane::row) {
        found.strip[strip] = load_as<V>(value);
      } else {
        found.rows = load_as<V>(value);
      }
    }
    return found;
  }

  // Begins a running reduction of each row.
  template <class Term>
  SoFar<Term> running() const {
    auto* const states = scratch_.template take<typename Term::State>(units_);
    construct(states, units_);
    return {states};
  }

  // Returns room for a value of each element, which one sweep keeps and the next ones read.
  Kept<V> room() const {
    const int64_t rows = lane == Lane::column ? count_ : strips_ * width;
    return {scratch_.template take<Real>(loops_.columns * rows)};
  }

  // Returns the reductions over the columns of the terms that body(at) returns: a Sum, Product,
  // Maximum or Minimum, or a tuple of these.
  template <class Body>
  auto reduce(Body body) const {
    return reduce_of<Walked{}>(body);
  }
  // Does the same, and is faster where the body compares positions.
  template <class Body>
  auto reduce_by_stretch(Body body) const {
    return reduce_of<Walked{.by_stretch = true}>(body);
  }

 private:
  // How rows are walked: in any order where a sweep reduces nothing, and by stretches in which no
  // condition on positions changes.
  struct Walked {
    bool in_any_order = false, by_stretch = false;
  };

  template <Walked how, class Body>
  void each_of(Body body) const {
    in_pieces([&](int64_t, int64_t begin, int64_t end) {
      walk<how>(begin, end, body,
                [body](int64_t, auto run) __attribute__((always_inline)) { run(body); });
    });
  }
  template <Walked how, class Body>
  auto reduce_of(Body body) const {
    using Terms = decltype(as_tuple(body(std::declval<Place<Extent::part>>())));
    return reduced_terms<how, Terms>(body, std::make_index_sequence<std::tuple_size_v<Terms>>{});
  }

  template <Positions positions = Positions::stepped>
  FUSELAB_INLINE PlaceOfRows<positions> place_of_rows(int64_t strip,
                                                      Findings* findings = nullptr) const {
    const int64_t first = strip * width;
    return {run_, first, 0, smaller(count_ - first, width), strip, 0, findings};
  }

  // Whether every number of a body is small, at all rows of the block and in all columns: the answer is
  // found where it is first asked for.
  enum class Known { unknown, no, yes };
  template <class Body>
  FUSELAB_INLINE bool is_small(Known& is_known, const Body& body) const {
    if (is_known == Known::unknown) is_known = has_small_numbers(body) ? Known::yes : Known::no;
    return is_known == Known::yes;
  }
  template <class Body>
  __attribute__((noinline)) bool has_small_numbers(const Body& body) const {
    int64_t furthest[operands];
    const int64_t outer = loops_.row_size_1 * loops_.row_size_2 * loops_.row_size_3;
    const int64_t runs = loops_.column_size_1 * loops_.column_size_2;
    for (int k = 0; k < operands; ++k) {
      const int64_t* const step = loops_.strides[k];
      furthest[k] = (loops_.rows / outer - 1) * step[0] + (loops_.row_size_1 - 1) * step[1] +
                    (loops_.row_size_2 - 1) * step[2] + (loops_.row_size_3 - 1) * step[3] +
                    (loops_.columns / runs - 1) * step[4] + (loops_.column_size_1 - 1) * step[5] +
                    (loops_.column_size_2 - 1) * step[6];
    }
    Findings findings;
    findings.furthest = furthest, findings.strips = strips_;
    body(Place<Extent::part, Positions::finding_bounds>(run_, 0, 0, count_, 0, 0, &findings));
    return findings.is_small;
  }

  template <class Index>
  static LongIntegers<V> index_of(const PerRow<Index, lane>& index, int64_t strip) {
    Index found = [&] {
      if constexpr (lane == Lane::row) return index.strip[strip];
      if constexpr (lane == Lane::column) return index.rows;
    }();
    if constexpr (std::is_same_v<Index, Counts<V>> || std::is_same_v<Index, Totals<V>>) {
      return found.number;
    } else {
      return math::integers<V>(found);
    }
  }

  // The place of a row, or of the strip that it is in, in a run of a single column.
  Place<Extent::part> place_in(const Run<V, operands>& run, int64_t row, int64_t column) const {
    if constexpr (lane == Lane::column) {
      return {run, run.first, column, 1, row, row * loops_.columns + column};
    } else {
      const int64_t strip = row / width, first = strip * width;
      const int64_t kept = (column * strips_ + strip) * width;
      return {run, first, run.first, smaller(count_ - first, width), strip, kept};
    }
  }
  // A single column as a run of columns.
  Run<V, operands> run_at(V* squares, int64_t column) const {
    const auto [run_of_columns, first] = divided(column, loops_.column_size_2);
    const auto [outer, middle] = divided(run_of_columns, loops_.column_size_1);
    Run<V, operands> run = {run_.offsets, first, first + 1, column - first, squares, 0};
    for (int k = 0; k < operands; ++k)
      run.offsets.base[k] += outer * loops_.strides[k][4] + middle * loops_.strides[k][5];
    if constexpr (lane == Lane::column) std::swap(run.offsets.across, run.offsets.along);
    return run;
  }

  template <Walked how, class Terms, class Body, std::size_t... place>
  auto reduced_terms(Body body, std::index_sequence<place...>) const {
    using Partials = std::tuple<typename std::tuple_element_t<place, Terms>::Partial...>;
    using States = std::tuple<typename std::tuple_element_t<place, Terms>::State...>;
    const int64_t count = pieces();
    States* const states = scratch_.template take<States>(count * units_);
    construct(states, count * units_);
    in_pieces([&](int64_t piece, int64_t begin, int64_t end) {
      States* const own = states + piece * units_;
      walk<how>(begin, end, body, [body, own](int64_t unit, auto run)
                                      __attribute__((always_inline)) {
        Partials partials;
        run([&](auto at) __attribute__((always_inline)) {
          const Terms terms = as_tuple(body(at));
          (std::get<place>(partials).add(at.counted(std::get<place>(terms))), ...);
        });
        (std::get<place>(own[unit]).fold(std::get<place>(partials)), ...);
      });
    });
    for (int64_t later = units_; later < count * units_; ++later)
      (std::get<place>(states[later % units_]).merge(std::get<place>(states[later])), ...);
    if constexpr (sizeof...(place) == 1) {
      return (result<place>(states), ...);
    } else {
      return std::tuple{result<place>(states)...};
    }
  }

  template <std::size_t place, class States>
  auto result(const States* states) const {
    using Found = decltype(std::get<place>(states[0]).result());
    // Where real numbers have 64 bits, a vector of integers has the type of a mask.
    using Value = std::conditional_t<std::is_same_v<Found, LongIntegers<V>>, Totals<V>, Found>;
    using State = std::tuple_element_t<place, States>;
    if constexpr (lane == Lane::column && std::is_same_v<State, Sum<Floats>::State>) {
      return PerRow<Value, lane>{sums_across([&](int64_t row) __attribute__((always_inline)) {
        return row < count_ ? std::get<place>(states[row]).in_doubles() : Doubles{};
      })};
    } else if constexpr (lane == Lane::column) {
      Scalar<Found> across[width] = {};
      for (int64_t row = 0; row < count_; ++row) across[row] = std::get<place>(states[row]).across();
      return PerRow<Value, lane>{Value{load_as<Found>(across)}};
    } else {
      Value* const values = scratch_.template take<Value>(strips_);
      for (int64_t strip = 0; strip < strips_; ++strip)
        values[strip] = Value{std::get<place>(states[strip]).result()};
      return PerRow<Value, lane>{values};
    }
  }

  // The pieces in which a block's columns are walked: one, unless threads share them.
  int64_t pieces() const {
    if (!shares_) return 1;
    const int64_t elements = loops_.columns * count_;
    return smaller<int64_t>(64, larger<int64_t>(1, elements / columns_per_piece));
  }
  template <class Body>
  void in_pieces(Body body) const {
    const int64_t count = pieces();
    if (count == 1) return body(0, 0, loops_.columns);
#pragma omp parallel for schedule(static)
    for (int64_t piece = 0; piece < count; ++piece) {
      body(piece, loops_.columns * piece / count, loops_.columns * (piece + 1) / count);
      finish_streaming();
    }
  }

  // Calls visit(unit, run) for the rows (or strips of rows) and short runs of columns in
  // [begin, end); run(body) calls body(at) for the vectors of one. In any order (a sweep that reduces
  // nothing) strips are visited column by column, so that memory is written in one piece, unless
  // columns are transposed on the way. `kernel` is the body that compares positions.
  template <Walked how, class Kernel, class Visit>
  __attribute__((noinline, flatten)) void walk(int64_t begin, int64_t end, Kernel kernel,
                                               Visit visit) const {
    // 64 vectors of a row; or a few columns, with the strips side by side in memory, or more of them
    // where it is columns that lie so.
    const int64_t longest = lane == Lane::column ? 64 * width : is_direct() ? 16 : 64;
    if (begin == end) return;  // a loop of columns may have the size 0
    if constexpr (how.by_stretch && lane == Lane::row) {
      if (is_window() && end - begin == loops_.columns) return walk_windows(kernel, visit);
    }
    Known is_known = Known::unknown;
    const int64_t inner = loops_.column_size_2;
    auto [run_of_columns, first] = divided(begin, inner);
    auto [outer, middle] = divided(run_of_columns, loops_.column_size_1);
    V squares[lane == Lane::row ? operands * width : 1];
    for (int64_t column = begin; column < end;) {
      const int64_t last = first + smaller(smaller(inner - first, end - column), longest);
      const int64_t before = column - first;
      Run<V, operands> run = {run_.offsets, first, last, before, squares, run_.elements};
      for (int k = 0; k < operands; ++k)
        run.offsets.base[k] += outer * loops_.strides[k][4] + middle * loops_.strides[k][5];
      if constexpr (lane == Lane::column) {
        std::swap(run.offsets.across, run.offsets.along);
        for (int64_t row = 0; row < count_; ++row) {
          const int64_t kept = row * loops_.columns + before;
          visit(row, [&](auto body) __attribute__((always_inline)) {
            if constexpr (how.by_stretch) return walk_stretches(run, row, kept, is_known, kernel, body);
            int64_t at = first;
            if (is_dense_) {
              for (; at + width <= last; at += width)
                body(Place<Extent::whole>(run, at, before + at, width, row, kept + at));
            }
            for (; at < last; at += width) {
              const int64_t count = smaller(last - at, width);
              body(Place<Extent::part>(run, at, before + at, count, row, kept + at));
            }
          });
        }
      } else if (how.in_any_order && is_direct()) {
        run.along_rows = true;
        const int64_t whole = is_dense_ ? count_ / width : 0;
        for (int64_t at = first; at < last; ++at) {
          const int64_t kept = (before + at) * strips_ * width;
          for (int64_t strip = 0; strip < whole; ++strip) {
            const int64_t row = strip * width;
            visit(strip, [&](auto body) __attribute__((always_inline)) {
              body(Place<Extent::whole>(run, row, at, width, strip, kept + row));
            });
          }
          for (int64_t strip = whole; strip < strips_; ++strip) {
            const int64_t row = strip * width, count = smaller(count_ - row, width);
            visit(strip, [&](auto body) __attribute__((always_inline)) {
              body(Place<Extent::part>(run, row, at, count, strip, kept + row));
            });
          }
        }
      } else {
        for (int64_t strip = 0; strip < strips_; ++strip) {
          const int64_t row = strip * width, count = smaller(count_ - row, width);
          const int64_t kept = before * strips_ * width + row, step = strips_ * width;
          visit(strip, [&](auto body) __attribute__((always_inline)) {
            if (is_dense_ && count == width) {
              for (int64_t at = first; at < last; ++at)
                body(Place<Extent::whole>(run, row, at, width, strip, kept + at * step));
            } else {
              for (int64_t at = first; at < last; ++at)
                body(Place<Extent::part>(run, row, at, count, strip, kept + at * step));
            }
          });
        }
      }
      column += last - first;
      first = last;
      if (first == inner) {
        first = 0;
        if (++middle == loops_.column_size_1) middle = 0, ++outer;
      }
    }
  }

  // Takes a run to the one behind it, which is `of_middle` in the loop around it.
  FUSELAB_INLINE void next_run(Run<V, operands>& run, int64_t& of_middle) const {
    const bool is_last = ++of_middle == loops_.column_size_1;
    if (is_last) of_middle = 0;
    for (int k = 0; k < operands; ++k) {
      const int64_t* const step = loops_.strides[k];
      run.offsets.base[k] +=
          is_last ? step[4] - (loops_.column_size_1 - 1) * step[5] : step[5];
    }
  }

  // Calls body(at) for the vectors of a run of a row's columns. A vector within which few conditions of
  // `kernel` on positions change is computed with masks if its numbers are small. Where there are more,
  // pieces take less time if there are few of them: each is without the loads that it does not need.
  static constexpr int64_t most_pieces = 3;
  static constexpr int most_masks = 2;
  template <class Kernel, class Body>
  FUSELAB_INLINE void walk_stretches(Run<V, operands>& run, int64_t row, int64_t kept,
                                     Known& is_known, Kernel kernel, Body body) const {
    const int64_t before = run.before;
    bool has_few_masks = false, is_regular = true;
    const auto end_of_stretch = [&](int64_t from) __attribute__((always_inline)) {
      Findings stretch;
      kernel(Place<Extent::part, Positions::finding_stretch>(run, from, before + from, width, row,
                                                             kept + from, &stretch));
      has_few_masks = stretch.comparisons <= most_masks;
      is_regular = stretch.is_regular;
      return from + smaller(stretch.lanes, run.last - from);
    };
    int64_t end = end_of_stretch(run.first);
    const bool is_broken = end < run.last;
    const bool has_masks =
        is_broken && (has_few_masks || !is_regular) && is_small(is_known, kernel);
    // Pieces are not written past the caches, and nothing else may be in a line that has some.
    run.elements = is_broken && !has_masks ? 0 : run_.elements;
    const auto compute_with_masks = [&](int64_t at, int64_t count) __attribute__((always_inline)) {
      if (is_dense_ && count == width) {
        body(Place<Extent::whole, Positions::small>(run, at, before + at, width, row, kept + at));
      } else {
        body(Place<Extent::part, Positions::small>(run, at, before + at, count, row, kept + at));
      }
    };
    if (has_masks && !is_regular) {
      for (int64_t at = run.first; at < run.last; at += width)
        compute_with_masks(at, smaller(run.last - at, width));
      return;
    }
    for (int64_t at = run.first, next; at < run.last; at = next) {
      if (end <= at) end = end_of_stretch(at);
      for (; is_dense_ && at + width <= end; at += width) {
        body(Place<Extent::whole, Positions::within_stretch>(run, at, before + at, width, row,
                                                             kept + at));
      }
      next = smaller(at + width, run.last);
      if (at == run.last || end <= at) {
        next = at;
        continue;
      }
      int64_t ends[most_pieces] = {end}, pieces = 1;
      while (!has_masks && end < next && pieces < most_pieces)
        ends[pieces++] = end = end_of_stretch(end);
      if (end < next) {
        if (has_masks || is_small(is_known, kernel)) {
          compute_with_masks(at, next - at);
        } else {
          body(Place<Extent::part>(run, at, before + at, next - at, row, kept + at));
        }
        continue;
      }
      for (int64_t piece = 0, from = at; piece < pieces; from = ends[piece++]) {
        const int64_t count = smaller(ends[piece], next) - from;
        body(Place<Extent::part, Positions::within_stretch>(run, from, before + from, count, row,
                                                            kept + from));
      }
    }
  }

  // Whether the columns are a window of few elements.
  static constexpr int64_t longest_window = 16;  // in runs and in columns of a run
  bool is_window() const {
    return loops_.column_size_2 <= longest_window &&
           loops_.columns <= longest_window * loops_.column_size_2;
  }
  // Calls visit(strip, run) for the strips of rows of a window, whose columns are visited one after
  // the other. A condition on positions that grow regularly is the same in a strip and its window if
  // it is the same at their corners.
  template <class Kernel, class Visit>
  FUSELAB_INLINE void walk_windows(Kernel kernel, Visit visit) const {
    const int64_t inner = loops_.column_size_2, middle = loops_.column_size_1;
    const int64_t count_of_runs = loops_.columns / inner, last_outer = count_of_runs / middle - 1;
    Run<V, operands> runs[longest_window];
    V squares[operands * width];
    Run<V, operands> next = {run_.offsets, 0, inner, 0, squares, run_.elements};
    for (int64_t i = 0, of_middle = 0; i < count_of_runs; ++i) {
      next.before = i * inner;
      runs[i] = next;
      next_run(next, of_middle);
    }
    const auto place = [&](int64_t strip, int64_t run, int64_t at) {
      return ((run * inner + at) * strips_ + strip) * width;
    };
    // Returns the row up to which conditions do not change from the strip's first one on.
    bool is_regular = true;
    const auto end_of_stretch = [&](int64_t strip) {
      Findings stretch, other;
      const int64_t row = strip * width;
      for (int corner = 0; corner < 8; ++corner) {
        const bool is_last[3] = {(corner & 4) != 0, (corner & 2) != 0, (corner & 1) != 0};
        if ((is_last[0] && last_outer == 0) || (is_last[1] && middle == 1) ||
            (is_last[2] && inner == 1))
          continue;
        const int64_t run = is_last[0] * last_outer * middle + is_last[1] * (middle - 1);
        const int64_t at = is_last[2] * (inner - 1);
        Findings& found = corner == 0 ? stretch : other;
        found = {};
        kernel(Place<Extent::part, Positions::finding_stretch>(
            runs[run], row, at, width, strip, place(strip, run, at), &found));
        stretch.end_at(found.outcomes == stretch.outcomes ? found.lanes : 0);
        if (!found.is_regular) {
          is_regular = false;
          return row;
        }
      }
      return row + smaller(stretch.lanes, count_ - row);
    };
    Known is_known = Known::unknown;
    int64_t end = 0;
    for (int64_t strip = 0; strip < strips_; ++strip) {
      const int64_t row = strip * width, count = smaller(count_ - row, width);
      if (end < row + count && is_regular) end = end_of_stretch(strip);
      visit(strip, [&](auto body) __attribute__((always_inline)) {
        const auto walk_runs = [&](auto at_column) __attribute__((always_inline)) {
          for (int64_t run = 0; run < count_of_runs; ++run)
            for (int64_t at = 0; at < inner; ++at) at_column(run, at);
        };
        if (end < row + count && is_small(is_known, kernel)) {
          walk_runs([&](int64_t run, int64_t at) __attribute__((always_inline)) {
            body(Place<Extent::part, Positions::small>(runs[run], row, at, count, strip,
                                                       place(strip, run, at)));
          });
        } else if (end < row + count) {
          walk_runs([&](int64_t run, int64_t at) __attribute__((always_inline)) {
            body(Place<Extent::part>(runs[run], row, at, count, strip, place(strip, run, at)));
          });
        } else if (is_dense_ && count == width) {
          walk_runs([&](int64_t run, int64_t at) __attribute__((always_inline)) {
            body(Place<Extent::whole, Positions::within_stretch>(runs[run], row, at, width, strip,
                                                                 place(strip, run, at)));
          });
        } else {
          walk_runs([&](int64_t run, int64_t at) __attribute__((always_inline)) {
            body(Place<Extent::part, Positions::within_stretch>(runs[run], row, at, count, strip,
                                                                place(strip, run, at)));
          });
        }
      });
    }
  }

  // Whether no operand is transposed on its way (Run::is_transposed).
  bool is_direct() const {
    for (int k = 0; k < operands; ++k)
      if (run_.offsets.along[k] == 1 && run_.offsets.across[k] > 1) return false;
    return true;
  }

  const Loops<operands>& loops_;
  Scratch& scratch_;
  bool shares_, is_dense_;
  int64_t count_, strips_, units_;  // of rows, of vectors of rows, and of either by `lane`
  Run<V, operands> run_ = {{}, 0, 1, 0, nullptr, 0};  // a single column
};

// Whether threads share the columns of blocks, of which there are too few for all of them.
template <class Real, Lane lane, int operands>
bool shares_columns(const Loops<operands>& loops, const Blocks<Real, lane, operands>& blocks) {
  const int64_t block_elements = smaller(loops.rows, blocks.rows_per_block) * loops.columns;
  return blocks.count < 16 && block_elements >= columns_to_share;
}

// Calls body(rows) for every block of rows.
template <class Real, Lane lane, int operands, class Body>
void sweep(const Loops<operands>& loops, Body body, bool may_share = true, int64_t every = 1) {
  using Block = Rows<Real, lane, operands>;
  if (loops.rows == 0) return;
  const Blocks<Real, lane, operands> blocks(loops, every);
  if (may_share && shares_columns(loops, blocks)) {
    for (int64_t block = 0; block < blocks.count; ++block) body(Block(loops, blocks, block, true));
    finish_streaming();
    return scratch_of_thread().release_if_large();
  }
#pragma omp parallel if (loops.rows * loops.columns >= elements_for_threads)
  {
#pragma omp for schedule(static)
    for (int64_t block = 0; block < blocks.count; ++block) body(Block(loops, blocks, block, false));
    finish_streaming();
    scratch_of_thread().release_if_large();
  }
}

// Does the same for kernels that divide the position of the innermost rows, an array, by `every`. Where
// elements at places of their own are gathered, whole rows take less time than phases.
template <int64_t every, class Real, Lane lane, int operands, int place, class Body>
void sweep_in_phases(const Loops<operands>& loops, Array<place, void> position, Body body) {
  const bool is_divided = lane == Lane::row && loops.strides[place][3] != 0;
  const bool pays = !has_gathers<Vector<Real>> && is_divided && loops.row_size_3 >= every * lanes<Vector<Real>> / 2;
  sweep<Real, lane>(loops, body, true, pays ? every : 1);
}

// Calls body(rows) for every block of rows, whose columns one thread walks in their order.
template <class Real, Lane lane, int operands, class Body>
void sweep_in_order(const Loops<operands>& loops, Body body) {
  sweep<Real, lane>(loops, body, false);
}

// --- sums over rows -------------------------------------------------------------------------------

// The sums of one piece of the rows: terms go to `runs`, which are folded into `states` before they
// lose digits.
template <class V>
struct PieceOfSums {
  using State = typename Sum<V>::State;
  V* runs;
  State* states;
  int64_t count;  // of vectors

  void clear() const {
    for (int64_t i = 0; i < count; ++i) runs[i] = V{};
    construct(states, count);
  }
  void fold() const {
    for (int64_t i = 0; i < count; ++i) {
      states[i].include(runs[i]);
      runs[i] = V{};
    }
  }
};

// Stores `sums`, a number for each column, as the columns of an operand.
template <class V, int operands, int place, class Element>
void store_columns(const Loops<operands>& loops, Array<place, Element> array,
                   const Scalar<V>* sums) {
  const int64_t* const stride = loops.strides[place];
  auto* const data = reinterpret_cast<Stored<Element>*>(array.data);
  for (int64_t column = 0; column < loops.columns; column += loops.column_size_2) {
    const auto [outer, middle] = divided(column / loops.column_size_2, loops.column_size_1);
    Stored<Element>* const to = data + outer * stride[4] + middle * stride[5];
    for_each_vector<V>(loops.column_size_2, [&](int64_t i, auto part) {
      const auto elements = stored<V, Element>(load<V>(sums + column + i, part));
      const int64_t count = smaller(loops.column_size_2 - i, lanes<V>);
      store_lanes<V, Element>(to + i * stride[6], elements, stride[6], count);
    });
  }
}

// Calls body(rows, sum...) for every block of rows, like sweep. What is added to a RowSum is summed
// over all rows and stored in the array at its place in `results`. Rows are summed in pieces that
// depend on the sizes alone.
template <class Real, Lane lane, int operands, class... Arrays, class Body>
void sweep_and_sum(const Loops<operands>& loops, std::tuple<Arrays...> results, Body body) {
  using V = Vector<Real>;
  using State = typename Sum<V>::State;
  constexpr int64_t sums = sizeof...(Arrays);
  const int64_t across = lane == Lane::column ? 1 : lanes<V>;
  // Some vectors more, so that sums are not a multiple of 4096 bytes apart (Scratch::take).
  const int64_t vectors = (loops.columns * across + lanes<V> - 1) / lanes<V> + 5;
  const Blocks<Real, lane, operands> blocks(loops);
  const int64_t blocks_per_fold =
      lane == Lane::column ? larger<int64_t>(1, 16 / blocks.rows_per_block) : 1;
  const int64_t wanted = smaller(blocks.count / 4, loops.rows * loops.columns >> 15);
  const int64_t pieces = larger<int64_t>(1, smaller<int64_t>(wanted, 64));
  const bool shares = pieces == 1 && loops.columns >= columns_to_share;

  static thread_local Scratch memory;
  memory.reset();
  State* const states = memory.template take<State>(pieces * sums * vectors);
#pragma omp parallel if (pieces > 1)
  {
    static thread_local Scratch own_memory;
    own_memory.reset();
    V* const runs = own_memory.template take<V>(sums * vectors);
#pragma omp for schedule(static)
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const PieceOfSums<V> own = {runs, states + piece * sums * vectors, sums * vectors};
      own.clear();
      const int64_t first = blocks.count * piece / pieces;
      const int64_t last = blocks.count * (piece + 1) / pieces;
      for (int64_t block = first; block < last; ++block) {
        int64_t next = 0;
        const auto sum_of = [&](const auto&) {
          return RowSum<V>{reinterpret_cast<Real*>(runs + vectors * next++)};
        };
        std::apply(
            [&](const auto&... array) {
              const std::tuple row_sums{sum_of(array)...};
              const Rows<Real, lane, operands> rows(loops, blocks, block, shares);
              std::apply([&](auto... sum) { body(rows, sum...); }, row_sums);
            },
            results);
        if ((block - first + 1) % blocks_per_fold == 0) own.fold();
      }
      own.fold();
    }
    finish_streaming();
    scratch_of_thread().release_if_large();
    own_memory.release_if_large();
  }

  Real* const totals = memory.template take<Real>(vectors * lanes<V>);
  int64_t next = 0;
  const auto finish = [&](auto array) {
    for (int64_t vector = 0; vector < vectors; ++vector) {
      State total;
      for (int64_t piece = 0; piece < pieces; ++piece)
        total.merge(states[(piece * sums + next) * vectors + vector]);
      if constexpr (lane == Lane::column) {
        store<false>(totals + vector * lanes<V>, total.result());
      } else {
        totals[vector] = total.across();
      }
    }
    store_columns<V>(loops, array, totals);
    ++next;
  };
  std::apply([&](auto... array) { (finish(array), ...); }, results);
  memory.release_if_large();
}

// Calls body(at) for every vector of a kernel without reductions.
template <class Real, Lane lane, int operands, class Body>
void for_each(const Loops<operands>& loops, Body body) {
  sweep<Real, lane>(loops, [&](const auto& rows) { rows.each(body); });
}

// Does the same, and is faster where the body compares positions.
template <class Real, Lane lane, int operands, class Body>
void for_each_by_stretch(const Loops<operands>& loops, Body body) {
  sweep<Real, lane>(loops, [&](const auto& rows) { rows.each_by_stretch(body); });
}

// Calls body(rows, row_value, row_integer) for every block of rows of a kernel without reductions.
// row_value(f) is f(at) once per row, if the operands that it reads are the same in a row's columns,
// and row_integer(f) is that of an integer.
template <class Real, Lane lane, int operands, class... Elements, int... place, class Body>
void for_each_with_rows(const Loops<operands>& loops, std::tuple<Array<place, Elements>...>,
                        Body body) {
  if (loops.columns == 0) return;  // an operand without elements has nothing to read once per row
  const auto is_same = [&](const int64_t* step) { return (step[4] | step[5] | step[6]) == 0; };
  if ((is_same(loops.strides[place]) && ...)) {
    sweep<Real, lane>(loops, [&](const auto& rows) {
      body(
          rows, [&](auto value) { return rows.value(value); },
          [&](auto value) { return rows.integer(value); });
    });
  } else {
    sweep<Real, lane>(loops, [&](const auto& rows) {
      const auto deferred = [](auto value) { return Deferred<decltype(value)>{value}; };
      body(rows, deferred, deferred);
    });
  }
}

// Values for each column, which a thread computes in its first block of rows and reads in the later
// ones.
template <class Real>
struct ColumnValues {
  Scratch memory;
  int64_t next = 0;
  bool is_known = false;

  template <class Rows, class Body>
  auto operator()(const Rows& rows, int64_t columns, Body body) {
    constexpr int64_t width = lanes<Vector<Real>>;
    if (next == 0) memory.reset();
    Real* const data = memory.template take<Real>(columns + width);
    ++next;
    if (!is_known) rows.store_columns(data, body);
    return PerColumn<Vector<Real>>{data};
  }
};

// Calls body(rows, column_value) for every block of rows. column_value(f) is f(at) once per column, if
// the operands that it reads are the same in all rows.
constexpr int64_t rows_to_share = 4;            // from so many on, storing a value pays
constexpr int64_t most_columns_stored = 1 << 14;  // whose values remain in the cache
template <class Real, Lane lane, int operands, class... Elements, int... place, class Body>
void sweep_with_columns(const Loops<operands>& loops, std::tuple<Array<place, Elements>...>,
                        Body body) {
  const auto is_same = [&](const int64_t* step) {
    return (step[0] | step[1] | step[2] | step[3]) == 0;
  };
  if constexpr (lane == Lane::column) {
    const Blocks<Real, lane, operands> blocks(loops);
    if (loops.rows >= rows_to_share && loops.columns <= most_columns_stored &&
        !shares_columns(loops, blocks) && (is_same(loops.strides[place]) && ...)) {
#pragma omp parallel if (loops.rows * loops.columns >= elements_for_threads)
      {
        static thread_local ColumnValues<Real> values;
        values.is_known = false;
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks.count; ++block) {
          const Rows<Real, lane, operands> rows(loops, blocks, block, false);
          values.next = 0;
          body(rows, [&](auto value) { return values(rows, loops.columns, value); });
          values.is_known = true;
        }
        finish_streaming();
        values.memory.release_if_large();
        scratch_of_thread().release_if_large();
      }
      return;
    }
  }
  sweep<Real, lane>(loops, [&](const auto& rows) {
    body(rows, [](auto value) { return Deferred<decltype(value)>{value}; });
  });
}

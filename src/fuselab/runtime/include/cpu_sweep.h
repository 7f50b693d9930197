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
// reduced for the rows at hand. A thread owns a block of rows. Where there are few rows with many
// columns, the threads share the columns of a block, in pieces that depend on the sizes alone, so
// that results are the same for any number of threads.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <vector>

#include "cpu_math.h"

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

// --- elements -------------------------------------------------------------------------------------

template <class Element>
constexpr bool is_short = std::is_same_v<Element, Half> || std::is_same_v<Element, BFloat16>;
// A vector has bytes in place of bool, and bits in place of 16-bit numbers.
template <class Element>
using Stored = std::conditional_t<
    std::is_same_v<Element, bool>, uint8_t,
    std::conditional_t<is_short<Element>, uint16_t, std::remove_const_t<Element>>>;
template <class V, class Element>
using StoredLanes = Lanes<Stored<Element>, lanes<V>>;

// Returns elements as a kernel computes with them: real numbers, 64-bit integers, or a mask.
template <class V, class Element>
FUSELAB_INLINE auto computed(StoredLanes<V, Element> value) {
  if constexpr (is_short<Element>) {
    return __builtin_convertvector(widened<lanes<V>>(value, Element{}), V);
  } else if constexpr (std::is_floating_point_v<Element>) {
    return __builtin_convertvector(value, V);
  } else if constexpr (std::is_same_v<Element, bool>) {
    return __builtin_convertvector(value != 0, Integers<V>);
  } else {
    return __builtin_convertvector(value, LongIntegers<V>);
  }
}
template <class V, class Element, class Value>
FUSELAB_INLINE StoredLanes<V, Element> stored(Value value) {
  if constexpr (is_short<Element>) {
    return narrowed<lanes<V>>(__builtin_convertvector(value, Lanes<float, lanes<V>>), Element{});
  } else if constexpr (std::is_same_v<Element, bool>) {
    return (StoredLanes<V, Element>)(__builtin_convertvector(value != 0, Lanes<int8_t, lanes<V>>) &
                                     1);
  } else {
    return __builtin_convertvector(value, StoredLanes<V, Element>);
  }
}

template <class V, class Element, std::size_t... lane>
FUSELAB_INLINE StoredLanes<V, Element> gathered(const Stored<Element>* from, int64_t stride,
                                                std::index_sequence<lane...>) {
  return StoredLanes<V, Element>{from[int64_t(lane) * stride]...};
}

// Loads the first `count` lanes; the others are 0.
template <class V, class Element>
FUSELAB_INLINE StoredLanes<V, Element> load_lanes(const Stored<Element>* from, int64_t stride,
                                                  int64_t count) {
  if (count == lanes<V>) {
    if (stride == 1) return load_as<StoredLanes<V, Element>>(from);
    return gathered<V, Element>(from, stride, std::make_index_sequence<lanes<V>>{});
  }
  Stored<Element> lane[lanes<V>] = {};
  for (int64_t i = 0; i < count; ++i) lane[i] = from[i * stride];
  return load_as<StoredLanes<V, Element>>(lane);
}
template <class V, class Element>
FUSELAB_INLINE void store_lanes(Stored<Element>* to, StoredLanes<V, Element> value, int64_t stride,
                                int64_t count) {
  if (stride == 1 && count == lanes<V>) {
    std::memcpy(to, &value, sizeof value);
    return;
  }
  Stored<Element> lane[lanes<V>];
  std::memcpy(lane, &value, sizeof value);
  for (int64_t i = 0; i < count; ++i) to[i * stride] = lane[i];
}

// Whether cpu_vectors.h loads and stores a part of a vector of these elements by a mask.
template <class V, class Element>
constexpr bool has_masked_tail =
    sizeof(Scalar<V>) == 4 && (std::is_same_v<Element, float> || is_short<Element>);

// --- reductions -----------------------------------------------------------------------------------

// A term of a reduction. Its State collects terms; `fold` sums up what has been added since the last
// fold, `merge` adds another state, and `across` combines the lanes of the result.
template <class V>
struct Sum {
  V value;

  // Terms go to four accumulators in turn: an addition need not wait for the one before. A fold
  // adds them to a total whose rounding error is kept (Knuth's two-sum), so that the error of a sum
  // does not grow with its length.
  struct State {
    V part[4] = {}, total = {}, error = {};

    FUSELAB_INLINE void add(V term) {
      const V next = part[0] + term;
      part[0] = part[1], part[1] = part[2], part[2] = part[3], part[3] = next;
    }
    FUSELAB_INLINE void fold() {
      for (V& one : part) {
        include(one);
        one = V{};
      }
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
    FUSELAB_INLINE Scalar<V> across() const {
      if constexpr (std::is_same_v<Scalar<V>, float>) {
        float lane[2 * lanes<V>];
        store<false>(lane, error);
        store<false>(lane + lanes<V>, total);
        Doubles sum{};
        for (int64_t i = 0; i < 2 * lanes<V>; i += lanes<Doubles>) sum += load<Doubles>(lane + i);
        return float(sum_of(sum));
      } else {
        return sum_of(total) + sum_of(error);
      }
    }
  };
  static constexpr Scalar<V> neutral() { return 0; }
};
template <class V>
Sum(V) -> Sum<V>;

// The state of a reduction by a function of two values without rounding errors to care for.
template <class V, class Combined>
struct Running {
  V part[2];

  FUSELAB_INLINE Running() {
    for (V& one : part) one = math::splat<V>(Combined::neutral());
  }
  FUSELAB_INLINE void add(V term) {
    const V next = Combined::combine(part[0], term);
    part[0] = part[1], part[1] = next;
  }
  FUSELAB_INLINE void fold() {}
  FUSELAB_INLINE void merge(const Running& other) {
    for (int i = 0; i < 2; ++i) part[i] = Combined::combine(part[i], other.part[i]);
  }
  FUSELAB_INLINE V result() const { return Combined::combine(part[0], part[1]); }
  FUSELAB_INLINE Scalar<V> across() const {
    return reduced<lanes<V> / 2>(result(), [](V a, V b) { return Combined::combine(a, b); });
  }
};

template <class V>
struct Product {
  V value;
  using State = Running<V, Product>;
  static constexpr Scalar<V> neutral() { return 1; }
  static FUSELAB_INLINE V combine(V a, V b) { return a * b; }
};
template <class V>
Product(V) -> Product<V>;

template <class V>
struct Maximum {
  V value;
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

// --- places ---------------------------------------------------------------------------------------

// Values of a block's rows: one vector for each of its strips.
template <class Value, int strips>
struct PerRow {
  Value strip[strips];
};

enum class Extent {
  whole,   // all lanes, and every stride from lane to lane is 1 or 0
  part,    // the first `count` lanes, of any stride
  repeated // one place in all lanes
};

// Offsets of all operands: at the first lane, from lane to lane, and from one vector to the next
// where lanes are rows and vectors follow each other along a row.
template <int operands>
struct Offsets {
  int64_t base[operands], across[operands], along[operands];
};

// A vector's place: `first` is its first lane's column (or row of the block), `along` its column
// where lanes are rows.
template <class Real, Lane lane, int operands, Extent extent>
class At {
 public:
  using V = Vector<Real>;

  FUSELAB_INLINE At(const Offsets<operands>& offsets, int64_t first, int64_t along, int64_t count,
                    int strip)
      : offsets_(offsets), first_(first), along_(along), count_(count), strip_(strip) {}

  template <int place, class Element>
  FUSELAB_INLINE auto operator()(Array<place, Element> array) const {
    const int64_t stride = stride_of<place>();
    if constexpr (std::is_void_v<Element>) {
      LongIntegers<V> index;
      for (int64_t i = 0; i < lanes<V>; ++i) index[i] = offset<place>() + (first_ + i) * stride;
      return index;
    } else {
      using Plain = std::remove_const_t<Element>;
      const auto* from = reinterpret_cast<const Stored<Plain>*>(array.data) + offset<place>();
      if (extent == Extent::repeated || stride == 0) {
        return computed<V, Plain>(*from - StoredLanes<V, Plain>{});  // a difference keeps -0.0
      }
      if constexpr (extent == Extent::whole) {
        return computed<V, Plain>(load_as<StoredLanes<V, Plain>>(from + first_));
      }
      if constexpr (has_masked_tail<V, Plain>) {
        if (stride == 1) return load<V>(array.data + offset<place>() + first_, First{count_});
      }
      return computed<V, Plain>(load_lanes<V, Plain>(from + first_ * stride, stride, count_));
    }
  }
  template <class Value, int strips>
  FUSELAB_INLINE Value operator()(const PerRow<Value, strips>& value) const {
    return value.strip[strip_];
  }

  template <int place, class Element, class Value>
  FUSELAB_INLINE void store(Array<place, Element> array, Value value) const {
    const int64_t stride = stride_of<place>();
    auto* to = reinterpret_cast<Stored<Element>*>(array.data) + offset<place>();
    if constexpr (extent == Extent::part && has_masked_tail<V, Element>) {
      if (stride == 1) {
        return ::store<false>(array.data + offset<place>() + first_, value, First{count_});
      }
    }
    const StoredLanes<V, Element> elements = stored<V, Element>(value);
    if constexpr (extent == Extent::whole) {
      std::memcpy(to + first_, &elements, sizeof elements);
    } else {
      store_lanes<V, Element>(to + first_ * stride, elements, stride,
                              extent == Extent::repeated ? 1 : count_);
    }
  }

  // Returns the term's value, with the neutral element in lanes that do not exist. Lanes that are
  // rows need none: what is reduced for a row that does not exist is not stored.
  template <class Term>
  FUSELAB_INLINE auto counted(Term term) const {
    if constexpr (lane == Lane::column && extent == Extent::part) {
      using Value = decltype(term.value);
      const Value neutral = math::splat<Value>(Term::neutral());
      return choose(first_lanes<Integers<Value>>(count_), term.value, neutral);
    } else {
      return term.value;
    }
  }

 private:
  template <int place>
  FUSELAB_INLINE int64_t stride_of() const {
    return extent == Extent::repeated ? 0 : offsets_.across[place];
  }
  template <int place>
  FUSELAB_INLINE int64_t offset() const {
    if constexpr (lane == Lane::column) return offsets_.base[place];
    return offsets_.base[place] + along_ * offsets_.along[place];
  }

  const Offsets<operands>& offsets_;
  int64_t first_, along_, count_;
  int strip_;
};

// --- blocks of rows -------------------------------------------------------------------------------

constexpr int64_t vectors_per_fold = 64;      // terms of one accumulator until it is folded
constexpr int64_t elements_for_threads = 1 << 15;  // below, starting a thread takes longer
constexpr int64_t columns_to_share = 1 << 16;      // elements of a block that threads share
constexpr int64_t columns_per_piece = 1 << 14;

// Returns quotient and remainder of non-negative numbers; most nests have one loop, where the
// division is not needed.
struct Divided {
  int64_t quotient, remainder;
};
FUSELAB_INLINE Divided divided(int64_t number, int64_t by) {
  if (number < by) return {0, number};
  return {number / by, number % by};
}

// A block of rows and what is done with it: one row, or a few vectors of neighbouring rows.
template <class Real, Lane lane, int operands>
class Rows {
 public:
  using V = Vector<Real>;
  static constexpr int64_t width = lanes<V>;
  static constexpr int max_strips = lane == Lane::column ? 1 : 4;
  static constexpr int64_t rows_per_block = lane == Lane::column ? 1 : max_strips * width;
  template <Extent extent>
  using Place = At<Real, lane, operands, extent>;

  Rows(const Loops<operands>& loops, int64_t block, bool shares) : loops_(loops), shares_(shares) {
    const auto [run, block_of_run] = divided(block, blocks_per_run(loops));
    const auto [outer_two, inner] = divided(run, loops.row_size_2);
    const auto [outer, middle] = divided(outer_two, loops.row_size_1);
    const int64_t first = block_of_run * rows_per_block;
    count_ = std::min(loops.row_size_3 - first, rows_per_block);
    is_dense_ = true;
    for (int k = 0; k < operands; ++k) {
      const int64_t* step = loops.strides[k];
      offsets_.base[k] = outer * step[0] + middle * step[1] + inner * step[2] + first * step[3];
      offsets_.across[k] = step[lane == Lane::column ? 6 : 3];
      offsets_.along[k] = step[lane == Lane::column ? 3 : 6];
      is_dense_ = is_dense_ && (offsets_.across[k] == 0 || offsets_.across[k] == 1);
    }
  }

  static int64_t blocks_per_run(const Loops<operands>& loops) {
    return (loops.row_size_3 + rows_per_block - 1) / rows_per_block;
  }

  // Calls body(at) for every vector of the rows and all of their columns.
  template <class Body>
  void each(Body body) const {
    in_pieces([&](int64_t, int64_t begin, int64_t end) {
      walk(begin, end, [body](int, auto run) __attribute__((always_inline)) { run(body); });
    });
  }

  // Returns body(at), or only calls it, for every vector of rows, without a column.
  template <class Body>
  __attribute__((flatten)) auto value(Body body) const {
    PerRow<decltype(body(place_of_rows(0))), max_strips> values;
    for (int strip = 0; strip < strips(); ++strip) values.strip[strip] = body(place_of_rows(strip));
    return values;
  }
  template <int place, class Element>
  auto load(Array<place, Element> array) const {
    return value([&](auto at) { return at(array); });
  }
  template <class Body>
  __attribute__((flatten)) void once(Body body) const {
    for (int strip = 0; strip < strips(); ++strip) body(place_of_rows(strip));
  }

  // Returns the reductions over the columns of the terms that body(at) returns: a Sum, Product,
  // Maximum or Minimum, or a tuple of these.
  template <class Body>
  auto reduce(Body body) const {
    using Terms = decltype(as_tuple(body(std::declval<Place<Extent::part>>())));
    return reduced_terms<Terms>(body, std::make_index_sequence<std::tuple_size_v<Terms>>{});
  }

 private:
  int strips() const { return lane == Lane::column ? 1 : int((count_ + width - 1) / width); }

  FUSELAB_INLINE auto place_of_rows(int strip) const {
    if constexpr (lane == Lane::column) {
      return Place<Extent::repeated>(offsets_, 0, 0, 1, 0);
    } else {
      const int64_t first = strip * width;
      const int64_t count = std::min(count_ - first, width);
      return Place<Extent::part>(offsets_, first, 0, count, strip);
    }
  }

  template <class Terms, class Body, std::size_t... place>
  auto reduced_terms(Body body, std::index_sequence<place...>) const {
    using States = std::tuple<typename std::tuple_element_t<place, Terms>::State...>;
    const int64_t count = pieces();
    States own[max_strips];
    std::vector<States> shared(count == 1 ? 0 : count * max_strips);
    States* const states = count == 1 ? own : shared.data();
    in_pieces([&](int64_t piece, int64_t begin, int64_t end) {
      States* const own_states = states + piece * max_strips;
      walk(begin, end, [body, own_states](int strip, auto run) __attribute__((always_inline)) {
        States state = own_states[strip];
        run([&](auto at) __attribute__((always_inline)) {
          const Terms terms = as_tuple(body(at));
          (std::get<place>(state).add(at.counted(std::get<place>(terms))), ...);
        });
        (std::get<place>(state).fold(), ...);
        own_states[strip] = state;
      });
    });
    for (int64_t piece = 1; piece < count; ++piece)
      for (int strip = 0; strip < max_strips; ++strip)
        (std::get<place>(states[strip])
             .merge(std::get<place>(states[piece * max_strips + strip])),
         ...);
    if constexpr (sizeof...(place) == 1) {
      return (result<place>(states), ...);
    } else {
      return std::tuple{result<place>(states)...};
    }
  }

  template <std::size_t place, class States>
  auto result(const States* states) const {
    using Value = decltype(std::get<place>(states[0]).result());
    PerRow<Value, max_strips> values;
    for (int strip = 0; strip < max_strips; ++strip) {
      const auto& state = std::get<place>(states[strip]);
      if constexpr (lane == Lane::column) {
        values.strip[strip] = math::splat<Value>(state.across());
      } else {
        values.strip[strip] = state.result();
      }
    }
    return values;
  }

  // The pieces in which a block's columns are walked: one, unless threads share them.
  int64_t pieces() const {
    if (!shares_) return 1;
    const int64_t elements = loops_.columns * count_;
    return std::min<int64_t>(64, std::max<int64_t>(1, elements / columns_per_piece));
  }
  template <class Body>
  void in_pieces(Body body) const {
    const int64_t count = pieces();
    if (count == 1) return body(0, 0, loops_.columns);
#pragma omp parallel for schedule(static)
    for (int64_t piece = 0; piece < count; ++piece) {
      body(piece, loops_.columns * piece / count, loops_.columns * (piece + 1) / count);
    }
  }

  // Calls visit(strip, run) for the strips and pieces of columns in [begin, end); run(body) calls
  // body(at) for the vectors of one.
  template <class Visit>
  __attribute__((noinline, flatten)) void walk(int64_t begin, int64_t end, Visit visit) const {
    const int64_t inner = loops_.column_size_2;
    for (int64_t column = begin; column < end;) {
      const auto [run_of_columns, first] = divided(column, inner);
      const auto [outer, middle] = divided(run_of_columns, loops_.column_size_1);
      const int64_t longest = vectors_per_fold * (lane == Lane::column ? 4 * width : 1);
      const int64_t last = first + std::min({inner - first, end - column, longest});
      Offsets<operands> offsets = offsets_;
      for (int k = 0; k < operands; ++k)
        offsets.base[k] += outer * loops_.strides[k][4] + middle * loops_.strides[k][5];
      if constexpr (lane == Lane::column) {
        visit(0, [&](auto body) __attribute__((always_inline)) {
          int64_t at = first;
          if (is_dense_) {
            for (; at + width <= last; at += width)
              body(Place<Extent::whole>(offsets, at, 0, width, 0));
          }
          for (; at < last; at += width)
            body(Place<Extent::part>(offsets, at, 0, std::min(last - at, width), 0));
        });
      } else {
        for (int strip = 0; strip < strips(); ++strip) {
          const int64_t row = strip * width, count = std::min(count_ - row, width);
          visit(strip, [&](auto body) __attribute__((always_inline)) {
            if (is_dense_ && count == width) {
              for (int64_t at = first; at < last; ++at)
                body(Place<Extent::whole>(offsets, row, at, width, strip));
            } else {
              for (int64_t at = first; at < last; ++at)
                body(Place<Extent::part>(offsets, row, at, count, strip));
            }
          });
        }
      }
      column += last - first;
    }
  }

  const Loops<operands>& loops_;
  bool shares_, is_dense_;
  int64_t count_;  // of rows
  Offsets<operands> offsets_;
};

// Calls body(rows) for every block of rows.
template <class Real, Lane lane, int operands, class Body>
void sweep(const Loops<operands>& loops, Body body) {
  using Block = Rows<Real, lane, operands>;
  if (loops.rows == 0) return;
  const int64_t blocks = loops.rows / loops.row_size_3 * Block::blocks_per_run(loops);
  const int64_t block_elements = std::min(loops.rows, Block::rows_per_block) * loops.columns;
  if (blocks < 16 && block_elements >= columns_to_share) {
    for (int64_t block = 0; block < blocks; ++block) body(Block(loops, block, true));
    return;
  }
#pragma omp parallel for schedule(static) if (loops.rows * loops.columns >= elements_for_threads)
  for (int64_t block = 0; block < blocks; ++block) body(Block(loops, block, false));
}

// Walks the loop nest of a pointwise operator on the CPU, tile by tile and thread by thread.
//
// Outputs are dense and written in memory order; operands have a stride per dimension. A tile is a
// run of the innermost dimension; where an operand's innermost stride is not 1 its run is gathered
// into a buffer first, so that a kernel only ever sees contiguous runs.
#pragma once

#include <omp.h>

#include <algorithm>
#include <array>
#include <tuple>
#include <vector>

#include "../../runtime/include/cpu_vectors.h"
#include "activations.h"

constexpr int rank = 5;             // outermost dimension first; unused ones have size 1
constexpr int64_t tile = 1024;      // elements of a tile: buffers of a tile stay in L1
constexpr int64_t stream_from = 1 << 22;   // output bytes; below, the reader finds it in the cache

using Index = std::array<int64_t, rank>;

template <class Element>
struct Operand {
  const Element* data;
  Index strides;

  FUSELAB_INLINE const Element* at(const Index& index) const {
    const Element* pointer = data;
    for (int dim = 0; dim < rank; ++dim) pointer += index[dim] * strides[dim];
    return pointer;
  }
};

// A contiguous run of one operand's elements within a tile.
template <class Element>
class Run {
 public:
  Run() {}  // leaves the buffer uninitialised

  FUSELAB_INLINE const Element* gather(const Element* first, int64_t stride, int64_t count) {
    if (stride == 1) return first;
    if (stride == 0 && first == source_ && count <= filled_) return buffer_;
    for (int64_t i = 0; i < count; ++i) buffer_[i] = first[i * stride];
    source_ = stride == 0 ? first : nullptr;
    filled_ = count;
    return buffer_;
  }

 private:
  alignas(64) Element buffer_[tile];
  const Element* source_ = nullptr;
  int64_t filled_ = 0;
};

template <class... Elements>
std::tuple<Run<Elements>...> runs_of(const Operand<Elements>&...) {
  return {};
}

// Calls body(run...) with one contiguous run per operand, `count` elements from `index` on.
template <class Body, class... Elements>
FUSELAB_INLINE void with_runs(std::tuple<Run<Elements>...>& runs, const Index& index,
                              int64_t count, Body body, const Operand<Elements>&... operands) {
  std::apply(
      [&](Run<Elements>&... run) {
        body(run.gather(operands.at(index), operands.strides[rank - 1], count)...);
      },
      runs);
}

template <class Element>
FUSELAB_INLINE bool is_aligned(const Element* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 64 == 0;
}

// The number of elements from which threads pay. Starting threads costs 5 us; an element costs 0.1
// ns for an activation without a transcendental function, 0.4 to 0.7 ns for others.
template <class Activation>
constexpr int64_t parallel_from = std::is_same_v<Activation, Identity> ||
                                          std::is_same_v<Activation, Relu> ||
                                          std::is_same_v<Activation, LeakyRelu>
                                      ? 1 << 17
                                      : 1 << 15;

// Splits [0, total) over the threads, at multiples of a cache line of any element type.
template <class Body>
void for_each_thread(int64_t total, int64_t parallel_from, Body body) {
  if (total < parallel_from) return body(int64_t{0}, total);
#pragma omp parallel
  {
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const int64_t share = ((total + threads - 1) / threads + 63) / 64 * 64;
    const int64_t begin = std::min(total, thread * share);
    const int64_t end = std::min(total, begin + share);
    if (begin < end) body(begin, end);
  }
}

// Calls body(offset, count, run...) for every tile: `offset` elements into the outputs, `count`
// elements, one contiguous run per operand. With `aligned`, which streaming stores need, tiles start
// where `output` is aligned, if they can.
template <class Activation, class Output, class Body, class... Elements>
void for_each_tile(const Index& sizes, const Output* output, bool aligned, Body body,
                   const Operand<Elements>&... operands) {
  const int64_t inner = sizes[rank - 1];
  int64_t numel = 1;
  for (int64_t size : sizes) numel *= size;
  for_each_thread(numel, parallel_from<Activation>, [&](int64_t begin, int64_t end) {
    auto runs = runs_of(operands...);
    Index index;
    for (int64_t dim = rank - 1, rest = begin; dim >= 0; --dim) {
      index[dim] = rest % sizes[dim];
      rest /= sizes[dim];
    }
    for (int64_t offset = begin; offset < end;) {
      int64_t count = std::min({tile, inner - index[rank - 1], end - offset});
      const int64_t past_line =
          aligned ? reinterpret_cast<uintptr_t>(output + offset) % 64 / sizeof(Output) : 0;
      if (past_line != 0) count = std::min(count, int64_t(64 / sizeof(Output)) - past_line);
      with_runs(
          runs, index, count, [&](const Elements*... run) { body(offset, count, run...); },
          operands...);
      offset += count;
      index[rank - 1] += count;
      for (int dim = rank - 1; dim > 0 && index[dim] == sizes[dim]; --dim) {
        index[dim] = 0;
        ++index[dim - 1];
      }
    }
    finish_streaming();
  });
}

// Returns the rows of an operand from `row` on, with `repeat` of them treated as one.
template <class Element>
Operand<Element> folded(Operand<Element> operand, int64_t row, int64_t repeat) {
  operand.data += row * operand.strides[rank - 2];
  operand.strides[rank - 2] *= repeat;
  return operand;
}

// Short rows are slow. If all operands are contiguous from row to row, as many rows as fill a tile
// are treated as one, and the bias (null if it is not read) is repeated as often. Calls walk(sizes,
// row, repeat, bias) once for these folded rows and once for the remaining ones.
template <class Bias, class Walk, class... Elements>
void for_each_fold(const Index& sizes, const Operand<Bias>& bias, Walk walk,
                   const Operand<Elements>&... operands) {
  const int64_t rows = sizes[rank - 2], columns = sizes[rank - 1];
  const int64_t repeat = std::min(tile / columns, rows);
  const bool row_after_row = ((operands.strides[rank - 2] == columns * operands.strides[rank - 1]) &&
                              ... && (bias.strides[rank - 2] == 0));
  const bool two_dimensional = sizes[0] * sizes[1] * sizes[2] == 1;
  if (repeat < 2 || !row_after_row || !two_dimensional) return walk(sizes, 0, 1, bias);
  std::vector<Bias> pattern(repeat * columns);
  for (int64_t i = 0; i < repeat * columns && bias.data != nullptr; ++i) {
    pattern[i] = bias.data[i % columns * bias.strides[rank - 1]];
  }
  const Operand<Bias> repeated{pattern.data(), {0, 0, 0, 0, 1}};
  const int64_t whole = rows / repeat;
  walk(Index{1, 1, 1, whole, repeat * columns}, 0, repeat, repeated);
  if (rows % repeat != 0) {
    walk(Index{1, 1, 1, rows % repeat, columns}, whole * repeat, 1, bias);
  }
}

// Adds to totals[column] the sum of a column over all rows. The order depends only on the shape,
// not on the number of threads: row after row in a block of rows, then block after block, in
// double. body(first_row, last_row, column, count, sums) adds its rows' elements [column, column +
// count) to sums[0 .. count); `sums` has room for one more whole vector.
template <class Activation, class Body>
void for_each_column_sum(int64_t rows, int64_t columns, double* totals, Body body) {
  const int64_t tiles = (columns + tile - 1) / tile;
  const int64_t blocks = std::clamp<int64_t>(64 / tiles, 1, (rows + 31) / 32);
  const int64_t rows_per_block = (rows + blocks - 1) / blocks;
  std::vector<double> partial(blocks * columns);
#pragma omp parallel for schedule(static) if (rows * columns >= parallel_from<Activation>)
  for (int64_t item = 0; item < blocks * tiles; ++item) {
    const int64_t block = item / tiles, column = item % tiles * tile;
    const int64_t count = std::min(tile, columns - column);
    const int64_t first = std::min(rows, block * rows_per_block);
    alignas(64) double sums[tile + lanes<Floats>] = {};
    body(first, std::min(rows, first + rows_per_block), column, count, sums);
    std::copy_n(sums, count, partial.data() + block * columns + column);
    finish_streaming();
  }
  for (int64_t block = 0; block < blocks; ++block) {
    for (int64_t i = 0; i < columns; ++i) totals[i] += partial[block * columns + i];
  }
}

// What the outer interaction needs on CPUs between PyTorch's matrix products (cpu_launch.py).
//
// The pairs of a sample's elements are taken in squares of 16 x 16. For `form` and `fold` those on
// and below the diagonal are enough: on the diagonal a square has its pairs twice, as the outer
// product does; below it each pair stands once, and `fold` adds the weights of both its places. They
// work on a tile of 4 x 4 squares, whose rows are 64 neighbouring weights. Elements behind the last
// one count as zeros.

#include <algorithm>

#include "../../runtime/include/cpu_vectors.h"

constexpr int64_t side = 16;
constexpr int64_t pairs = side * side;
constexpr int64_t tile_side = 64;
constexpr int64_t parallel_from = 1 << 16;  // elements, below which starting a thread takes longer

// Calls body(number, row, column) for the squares of a tile of z's `width` elements, of which `row`
// and `column` are the first elements.
template <class Body>
FUSELAB_INLINE void for_squares(int64_t tile_row, int64_t tile_column, int64_t width, Body body) {
  int64_t number = 0;
  for (int64_t row = tile_row; row < std::min(tile_row + tile_side, width); row += side) {
    const int64_t end = std::min(tile_column + tile_side, row + side);
    for (int64_t column = tile_column; column < end; column += side) body(number++, row, column);
  }
}

template <class Real>
using Line = Lanes<Real, side>;

// Loads or stores `count` of 16 neighbouring elements; the others are 0.
template <class Real>
FUSELAB_INLINE Line<Real> load_line(const Real* from, int64_t count) {
  if (count >= side) return load_as<Line<Real>>(from);
  Real line[side] = {};
  for (int64_t i = 0; i < count; ++i) line[i] = from[i];
  return load_as<Line<Real>>(line);
}
template <class Real>
FUSELAB_INLINE void store_line(Real* to, Line<Real> line, int64_t count) {
  if (count >= side) {
    std::memcpy(to, &line, sizeof line);
  } else {
    std::memcpy(to, &line, std::max<int64_t>(count, 0) * sizeof *to);
  }
}

// Returns the first `count` elements, and 0 for the others, whatever they are.
template <class Real>
FUSELAB_INLINE Line<Real> first_of(Line<Real> line, int64_t count) {
  if (count >= side) return line;
  return choose(first_lanes<Integers<Line<Real>>>(count), line, Line<Real>{});
}

// Loads the square whose first element is `from`: `rows` lines of `columns` elements.
template <class Real>
FUSELAB_INLINE void load_square(Line<Real>* lines, const Real* from, int64_t width, int64_t rows,
                                int64_t columns) {
#pragma GCC unroll 16
  for (int64_t i = 0; i < side; ++i)
    lines[i] = i < rows ? load_line(from + i * width, columns) : Line<Real>{};
}

// Computes folded [columns, tile_pairs] from the weight [columns, width²], whose rows are
// `weight_stride` apart.
template <class Real>
void fold(const Real* weight, Real* folded, int64_t columns, int64_t width, int64_t weight_stride,
          int64_t tile_row, int64_t tile_column, int64_t tile_pairs) {
#pragma omp parallel for schedule(static)
  for (int64_t n = 0; n < columns; ++n) {
    const Real* const own = weight + n * weight_stride;
    // What the next output needs is on its way while this one is folded.
    const int64_t ahead = n + 1 < columns ? weight_stride : 0;
    for_squares(tile_row, tile_column, width, [&](int64_t number, int64_t row, int64_t column) {
      const int64_t rows = width - row, others = width - column;
      const Real* const lower = own + row * width + column;
      const Real* const upper = own + column * width + row;
      for (int64_t i = 0; i < std::min(side, rows); ++i)
        __builtin_prefetch(lower + ahead + i * width);
      Line<Real> lines[side];
      load_square(lines, lower, width, rows, others);
      if (row != column) {
        for (int64_t i = 0; i < std::min(side, others); ++i)
          __builtin_prefetch(upper + ahead + i * width);
        Line<Real> across[side];
        load_square(across, upper, width, others, rows);
        transpose<side / 2>(across);
        for (int64_t i = 0; i < side; ++i) lines[i] += across[i];
      }
      std::memcpy(folded + n * tile_pairs + number * pairs, lines, sizeof lines);
    });
  }
}

// Computes sums [columns, width, width], weight[i, j] + weight[j, i], from the weight [columns,
// width²], whose rows are `weight_stride` apart.
template <class Real>
void add_transposed(const Real* weight, Real* sums, int64_t columns, int64_t width,
                    int64_t weight_stride) {
  const int64_t blocks = (width + side - 1) / side;
#pragma omp parallel for schedule(dynamic, 4) if (columns * width * width >= parallel_from)
  for (int64_t strip = 0; strip < columns * blocks; ++strip) {
    const int64_t n = strip / blocks, row = strip % blocks * side, rows = width - row;
    const Real* const own = weight + n * weight_stride;
    Real* const to = sums + n * width * width;
    for (int64_t column = 0; column <= row; column += side) {
      const int64_t others = width - column;
      Line<Real> lines[side], across[side];
      load_square(lines, own + row * width + column, width, rows, others);
      load_square(across, own + column * width + row, width, others, rows);
      transpose<side / 2>(across);
      for (int64_t i = 0; i < side; ++i) lines[i] += across[i];
      for (int64_t i = 0; i < std::min(side, rows); ++i)
        store_line(to + (row + i) * width + column, lines[i], others);
      if (row == column) continue;
      transpose<side / 2>(lines);
      for (int64_t i = 0; i < std::min(side, others); ++i)
        store_line(to + (column + i) * width + row, lines[i], rows);
    }
  }
}

// Computes products [batch, tile_pairs] of the elements z [batch, width].
template <class Real>
void form(const Real* z, Real* products, int64_t batch, int64_t width, int64_t tile_row,
          int64_t tile_column, int64_t tile_pairs) {
#pragma omp parallel for schedule(static) if (batch * tile_pairs >= parallel_from)
  for (int64_t sample = 0; sample < batch; ++sample) {
    const Real* const own = z + sample * width;
    Real* const to = products + sample * tile_pairs;
    for_squares(tile_row, tile_column, width, [&](int64_t number, int64_t row, int64_t column) {
      const int64_t rows = width - row, others = width - column;
      const Line<Real> of_column = load_line(own + column, others);
      for (int64_t i = 0; i < side; ++i) {
        // A product with an element that is not there is 0, also with infinity.
        const Line<Real> line =
            i < rows ? first_of<Real>(of_column * own[row + i], others) : Line<Real>{};
        std::memcpy(to + number * pairs + i * side, &line, sizeof line);
      }
    });
  }
}

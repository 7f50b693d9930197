// The loops of kernels that sweep over rows and columns (runtime/sweep.py), in CUDA C++.
//
// A kernel is a template over a tile: how its threads share out the rows and columns. The launcher
// (runtime/cuda_sweep.py) chooses the tile for the sizes and strides of a call:
//
//   ElementTile     no reductions. A thread owns one pack of consecutive elements of a row.
//   TransposedTile  no reductions, an operand is transposed. A block owns 32 x 32 elements, so that
//                   the cache lines that it touches across the rows are used whole.
//   RowTile         a row belongs to 1 to 32 lanes of a warp, or to a block. Packs are consecutive
//                   columns, because columns are neighbours in memory.
//   ColumnTile      rows are neighbours in memory. A thread owns a pack of consecutive rows, and the
//                   threads of a block that own the same rows share out the columns.
//
// RowTile and ColumnTile keep what they load in registers where the row fits (`kept` packs per
// thread), so that every element is read once. Otherwise each loop over the packs reads it again.
// Where there are fewer rows than a GPU has room for, a kernel that only reduces is launched twice:
// blocks reduce parts of a row, then a warp merges the parts of a row in a fixed order.
#pragma once

#include "cuda_packs.h"
#include "special_functions.h"

struct LoopSizes {
  int64_t rows, row_sizes[3], columns, column_sizes[2];
};

// What a launch passes: the sizes of up to four loops over rows and three over columns, and the
// strides of each operand in these seven loops.
template <int operands>
struct Loops {
  LoopSizes sizes;
  int64_t strides[operands][7];
};

// How an operand's elements are read or written in the direction of the packs.
enum class Access { packed, strided, same };
template <class Type>
struct Packed {  // neighbours, aligned: one access for all
  using type = Type;
  static constexpr Access access = Access::packed;
};
template <class Type>
struct Strided {  // one by one
  using type = Type;
  static constexpr Access access = Access::strided;
};
template <class Type>
struct Same {  // one element for the whole pack
  using type = Type;
  static constexpr Access access = Access::same;
};

template <class Index>
struct UnsignedOf {
  using type = uint32_t;
};
template <>
struct UnsignedOf<int64_t> {
  using type = uint64_t;
};

// The counters of `loops` nested loops out of `depth`, innermost last. `sizes` are those of all
// loops but the outermost. Without loops there is nothing to count.
template <class Index, int loops, int depth>
struct Counters {
  Index index[depth] = {};

  FUSELAB_INLINE Counters(Index at, const int64_t (&sizes)[depth - 1]) {
    using Unsigned = typename UnsignedOf<Index>::type;  // division without a sign is cheaper
    Unsigned rest = Unsigned(at);
#pragma unroll
    for (int loop = depth - 1; loop > depth - loops; --loop) {
      const Unsigned outer = rest / Unsigned(sizes[loop - 1]);
      index[loop] = Index(rest - outer * Unsigned(sizes[loop - 1]));
      rest = outer;
    }
    if constexpr (loops > 0) index[depth - loops] = Index(rest);
  }
  FUSELAB_INLINE Index offset(const int64_t* strides) const {
    Index sum = 0;
#pragma unroll
    for (int loop = depth - loops; loop < depth; ++loop) sum += index[loop] * Index(strides[loop]);
    return sum;
  }
};

// `width` elements that a thread computes together, of which `count` exist: neighbours in a row, or
// in a ColumnTile in a column. `k` numbers the packs of a thread.
template <class Tile>
struct PackAt {
  int k;
  Counters<typename Tile::Index, Tile::row_loops, 4> row;
  Counters<typename Tile::Index, Tile::column_loops, 3> column;
  int count;

  FUSELAB_INLINE bool has(int i) const { return i < count; }
  FUSELAB_INLINE typename Tile::Index offset(const int64_t* strides) const {
    return row.offset(strides) + column.offset(strides + 4);
  }
  FUSELAB_INLINE typename Tile::Index element_offset(const int64_t* strides, int i) const {
    return offset(strides) + i * typename Tile::Index(strides[Tile::packed_loop]);
  }
};

// --- operands -------------------------------------------------------------------------------------

template <class Operand, class Tile>
FUSELAB_INLINE Pack<typename Operand::type, Tile::width> load_at(
    const typename Operand::type* pointer, const int64_t* strides, const PackAt<Tile>& pack) {
  using Element = typename Operand::type;
  Pack<Element, Tile::width> loaded = {};
  const Element* first = pointer + pack.offset(strides);
  if constexpr (Operand::access == Access::same) {
    if (pack.count > 0) {
      const Element element = *first;
#pragma unroll
      for (int i = 0; i < Tile::width; ++i) loaded.element[i] = element;
    }
  } else {
    constexpr bool aligned = Operand::access == Access::packed;
    const auto step = aligned ? 1 : typename Tile::Index(strides[Tile::packed_loop]);
    if (pack.count >= Tile::width) {
      if constexpr (aligned) {
        loaded = load<true, Tile::width>(first);
      } else {
#pragma unroll
        for (int i = 0; i < Tile::width; ++i) loaded.element[i] = first[i * step];
      }
    } else if constexpr (Tile::ragged) {
#pragma unroll
      for (int i = 0; i < Tile::width; ++i) {
        if (pack.has(i)) loaded.element[i] = first[i * step];
      }
    }
  }
  return loaded;
}

// An operand whose elements are loaded where they are used.
template <class Operand, class Tile>
struct Loaded {
  const typename Operand::type* pointer;
  const int64_t* strides;

  FUSELAB_INLINE Loaded(const Tile&, const typename Operand::type* pointer, const int64_t* strides)
      : pointer(pointer), strides(strides) {}
  FUSELAB_INLINE Pack<typename Operand::type, Tile::width> at(const PackAt<Tile>& pack) const {
    return load_at<Operand>(pointer, strides, pack);
  }
};

// An operand whose elements are loaded once if the tile keeps rows in registers.
template <class Operand, class Tile, int kept = Tile::kept>
struct Kept {
  Pack<typename Operand::type, Tile::width> packs[kept];

  FUSELAB_INLINE Kept(const Tile& tile, const typename Operand::type* pointer,
                      const int64_t* strides) {
#pragma unroll
    for (int k = 0; k < kept; ++k) packs[k] = load_at<Operand>(pointer, strides, tile.pack(k));
  }
  FUSELAB_INLINE const Pack<typename Operand::type, Tile::width>& at(
      const PackAt<Tile>& pack) const {
    return packs[pack.k];
  }
};
template <class Operand, class Tile>
struct Kept<Operand, Tile, 0> : Loaded<Operand, Tile> {
  using Loaded<Operand, Tile>::Loaded;
};

// The position of each element along some axes, which is an offset in a tensor of these axes.
template <class Tile>
FUSELAB_INLINE Pack<int64_t, Tile::width> positions_at(const int64_t* strides,
                                                       const PackAt<Tile>& pack) {
  Pack<int64_t, Tile::width> found;
#pragma unroll
  for (int i = 0; i < Tile::width; ++i) {
    found.element[i] = pack.offset(strides) + i * strides[Tile::packed_loop];
  }
  return found;
}

// Stores what exists of a pack.
template <class Operand, class Tile>
FUSELAB_INLINE void store_at(typename Operand::type* pointer, const int64_t* strides,
                             const PackAt<Tile>& pack,
                             const Pack<typename Operand::type, Tile::width>& values) {
  typename Operand::type* first = pointer + pack.offset(strides);
  const auto step = typename Tile::Index(strides[Tile::packed_loop]);
  if (pack.count >= Tile::width) {
    if constexpr (Operand::access == Access::packed) {
      store<true>(first, values);
    } else {
#pragma unroll
      for (int i = 0; i < Tile::width; ++i) first[i * step] = values.element[i];
    }
  } else if constexpr (Tile::ragged) {
#pragma unroll
    for (int i = 0; i < Tile::width; ++i) {
      if (pack.has(i)) first[i * step] = values.element[i];
    }
  }
}

// --- scalar functions -----------------------------------------------------------------------------

template <class Real>
FUSELAB_INLINE Real infinity() {
  return Real(__int_as_float(0x7f800000));
}
template <class Real>
FUSELAB_INLINE Real not_a_number() {
  return Real(__int_as_float(0x7fc00000));
}
// NaN if one of the two is NaN, as in PyTorch.
template <class Value>
FUSELAB_INLINE Value larger(Value a, Value b) {
  return a != a || a > b ? a : b;
}
template <class Value>
FUSELAB_INLINE Value smaller(Value a, Value b) {
  return a != a || a < b ? a : b;
}
template <class Real>
FUSELAB_INLINE Real sign_of(Real x) {
  return x > Real(0) ? Real(1) : x < Real(0) ? Real(-1) : x;
}
template <class Real>
FUSELAB_INLINE Real squared(Real x) {
  return x * x;
}
template <class Real>
FUSELAB_INLINE Real cubed(Real x) {
  return x * x * x;
}

// --- reductions -----------------------------------------------------------------------------------

template <class Value>
FUSELAB_INLINE Value highest() {
  if constexpr (Value(0.5) == Value(0)) {  // an integer
    return Value(~(1ull << (8 * sizeof(Value) - 1)));
  } else {
    return infinity<Value>();
  }
}

struct Sum {
  template <class Value>
  static FUSELAB_INLINE Value neutral() {
    return Value(0);
  }
  template <class Value>
  static FUSELAB_INLINE Value join(Value a, Value b) {
    return a + b;
  }
};
struct Product {
  template <class Value>
  static FUSELAB_INLINE Value neutral() {
    return Value(1);
  }
  template <class Value>
  static FUSELAB_INLINE Value join(Value a, Value b) {
    return a * b;
  }
};
struct Largest {
  template <class Value>
  static FUSELAB_INLINE Value neutral() {
    if constexpr (Value(0.5) == Value(0)) return -highest<Value>() - 1;
    return -highest<Value>();
  }
  template <class Value>
  static FUSELAB_INLINE Value join(Value a, Value b) {
    return larger(a, b);
  }
};
struct Smallest {
  template <class Value>
  static FUSELAB_INLINE Value neutral() {
    return highest<Value>();
  }
  template <class Value>
  static FUSELAB_INLINE Value join(Value a, Value b) {
    return smaller(a, b);
  }
};

// One reduction of a kernel: what this thread has found for each element of its packs, and after
// `reduce` the result of each of its rows. `slot` numbers the reductions of a kernel, for each has
// shared memory of its own, so that one barrier per `reduce` is enough.
template <int slot_, class Operation_, class Value_, class Tile>
struct Reduction {
  using Operation = Operation_;
  using Value = Value_;
  static constexpr int slot = slot_;
  Value so_far[Tile::width];
  Value result[Tile::rows];

  FUSELAB_INLINE Reduction() {
#pragma unroll
    for (int i = 0; i < Tile::width; ++i) so_far[i] = Operation::template neutral<Value>();
  }
  FUSELAB_INLINE void add(int i, Value value) { so_far[i] = Operation::join(so_far[i], value); }
  FUSELAB_INLINE Value operator[](int r) const { return result[r]; }
};

// A running reduction along the columns of a row, which belongs to lanes of a warp: the terms of a
// pack, and after `advance` what the reduction is at each of its elements.
template <class Operation, class Value, class Tile>
struct Running {
  Value so_far = Operation::template neutral<Value>();  // of all packs before
  Value element[Tile::width];

  FUSELAB_INLINE Running() { clear(); }
  FUSELAB_INLINE void clear() {
#pragma unroll
    for (int i = 0; i < Tile::width; ++i) element[i] = Operation::template neutral<Value>();
  }
  FUSELAB_INLINE void set(int i, Value term) {
    if (i == 0) clear();
    element[i] = term;
  }
  FUSELAB_INLINE Value operator[](int i) const { return element[i]; }
  FUSELAB_INLINE void advance() {
    static_assert(Tile::lanes_of_row <= 32, "a row belongs to lanes of one warp");
#pragma unroll
    for (int i = 1; i < Tile::width; ++i) element[i] = Operation::join(element[i - 1], element[i]);
    Value before = Operation::template neutral<Value>();  // of the lanes before this one
    Value all = element[Tile::width - 1];
#pragma unroll
    for (int distance = 1; distance < Tile::lanes_of_row; distance *= 2) {
      const Value other = __shfl_xor_sync(0xffffffffu, all, distance);
      if (int(threadIdx.x) & distance) before = Operation::join(other, before);
      all = Operation::join(all, other);
    }
#pragma unroll
    for (int i = 0; i < Tile::width; ++i) {
      element[i] = Operation::join(Operation::join(so_far, before), element[i]);
    }
    so_far = Operation::join(so_far, all);
  }
};

template <int slot, class Value, int size>
FUSELAB_INLINE Value* shared_values() {
  __shared__ Value values[size];
  return values;
}

// Joins the values of `lanes` neighbouring lanes, `apart` lanes from each other.
template <class Operation, int lanes, int apart = 1, class Value>
FUSELAB_INLINE Value over_lanes(Value value) {
#pragma unroll
  for (int distance = lanes / 2; distance >= apart; distance /= 2) {
    value = Operation::join(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  return value;
}

// Computes the results of reductions over the whole rows.
template <class Tile, class... Reductions>
FUSELAB_INLINE void reduce(const Tile& tile, Reductions&... reductions) {
  (tile.gather(reductions), ...);
  if constexpr (Tile::has_shared_rows) {
    __syncthreads();
    (tile.finish(reductions), ...);
  }
}

// --- tiles ----------------------------------------------------------------------------------------

// Which part of a row a launch reduces: all of it, one part per block of gridDim.y, or the parts'
// results. These lie in `partials`, 8 bytes for each reduction, row and part.
enum class Share { whole, part, merge };

template <class Value>
FUSELAB_INLINE Value* partial_at(int64_t* partials, int64_t place) {
  return reinterpret_cast<Value*>(partials + place);
}

// Computes the results of reductions, from the parts' results or over the part of this block.
// Returns whether they are those of the whole rows.
template <class Tile, class... Reductions>
FUSELAB_INLINE bool reduce_parts(const Tile& tile, int64_t* partials, int parts,
                                 Reductions&... reductions) {
  if constexpr (Tile::share == Share::merge) (tile.collect(partials, parts, reductions), ...);
  reduce(tile, reductions...);
  if constexpr (Tile::share == Share::part) {
#pragma unroll
    for (int r = 0; r < Tile::rows; ++r) {
      if (tile.owns_row(r)) (tile.hand_over(partials, parts, r, reductions), ...);
    }
  }
  return Tile::share != Share::part;
}

// `row_loops` is 0 where there is one row.
template <class Index_, int row_loops_, int width_, bool ragged_>
struct ElementTile {
  using Index = Index_;
  static constexpr int row_loops = row_loops_, column_loops = 1, packed_loop = 6;
  static constexpr int width = width_, rows = 1, kept = 0, unrolled = 1, threads = 256;
  static constexpr bool ragged = ragged_;
  Index row = 0, column;
  bool exists;

  FUSELAB_INLINE explicit ElementTile(const LoopSizes& sizes) : sizes(sizes) {
    using Unsigned = typename UnsignedOf<Index>::type;
    column = Index(blockIdx.x) * threads + Index(threadIdx.x);
    const Unsigned packs = (Unsigned(sizes.columns) + width - 1) / width;  // of a row
    if constexpr (row_loops > 0) {
      row = Index(Unsigned(column) / packs);
      column -= row * Index(packs);
    }
    exists = row < Index(sizes.rows) && column < Index(packs);
    column *= width;
  }
  FUSELAB_INLINE int packs() const { return 1; }
  FUSELAB_INLINE PackAt<ElementTile> pack(int k) const {
    const Index left = Index(sizes.columns) - column;
    const int count = !exists ? 0 : ragged && left < width ? int(left) : width;
    return {k, {row, sizes.row_sizes}, {column, sizes.column_sizes}, count};
  }

 private:
  const LoopSizes& sizes;
};

template <class Index_, int row_loops_>
struct TransposedTile {
  using Index = Index_;
  static constexpr int row_loops = row_loops_, column_loops = 1, packed_loop = 6;
  static constexpr int width = 1, rows = 1, kept = 0, unrolled = 4, threads = 256;
  static constexpr bool ragged = false;
  Index row, column;

  FUSELAB_INLINE explicit TransposedTile(const LoopSizes& sizes) : sizes(sizes) {
    using Unsigned = typename UnsignedOf<Index>::type;
    const Unsigned across = (Unsigned(sizes.columns) + 31) / 32;
    const Unsigned down = Unsigned(blockIdx.x) / across;
    row = Index(down) * 32 + Index(threadIdx.x / 32);
    column = Index(Unsigned(blockIdx.x) - down * across) * 32 + Index(threadIdx.x % 32);
  }
  FUSELAB_INLINE int packs() const { return 4; }
  FUSELAB_INLINE PackAt<TransposedTile> pack(int k) const {
    const Index at = row + 8 * k;
    const int count = at < Index(sizes.rows) && column < Index(sizes.columns);
    return {k, {at, sizes.row_sizes}, {column, sizes.column_sizes}, count};
  }

 private:
  const LoopSizes& sizes;
};

// A block has `rows_per_block` rows of `lanes` threads. Threads beyond the last row compute that
// row too, and store nothing.
template <class Index_, int row_loops_, int column_loops_, int width_, bool ragged_, int lanes,
          int rows_per_block, int kept_, Share share_>
struct RowTile {
  using Index = Index_;
  static constexpr int row_loops = row_loops_, column_loops = column_loops_, packed_loop = 6;
  static constexpr int width = width_, rows = 1, kept = kept_, unrolled = kept > 0 ? kept : 2;
  static constexpr int threads = lanes * rows_per_block, warps = lanes / 32, lanes_of_row = lanes;
  static constexpr bool ragged = ragged_, has_shared_rows = warps > 1;
  static constexpr Share share = share_;

  FUSELAB_INLINE explicit RowTile(const LoopSizes& sizes)
      : sizes(sizes),
        at(Index(blockIdx.x) * rows_per_block + Index(threadIdx.x) / lanes),
        lane(int(threadIdx.x) % lanes),
        row(at < Index(sizes.rows) ? at : Index(sizes.rows) - 1, sizes.row_sizes) {}
  static FUSELAB_INLINE int row_of(int) { return 0; }
  FUSELAB_INLINE int packs() const {
    if constexpr (kept > 0) return kept;
    if constexpr (share == Share::merge) return 0;
    const Index all = (Index(sizes.columns) + width - 1) / width;
    return all > first() ? int((all - first() - 1) / step()) + 1 : 0;
  }
  // The packs of the first lane, which has most.
  FUSELAB_INLINE int turns() const {
    if constexpr (kept > 0) return kept;
    return int((Index(sizes.columns) + width * lanes - 1) / (width * lanes));
  }
  FUSELAB_INLINE PackAt<RowTile> pack(int k) const {
    const Index start = (first() + k * step()) * width;
    const Index left = Index(sizes.columns) - start;
    const int count = left <= 0 ? 0 : ragged && left < width ? int(left) : width;
    return {k, row, {start, sizes.column_sizes}, count};
  }
  FUSELAB_INLINE Index row_offset(const int64_t* strides, int) const {
    return row.offset(strides);
  }
  FUSELAB_INLINE bool owns_row(int) const { return lane == 0 && at < Index(sizes.rows); }

  template <class Reduction>
  FUSELAB_INLINE void gather(Reduction& reduction) const {
    using Operation = typename Reduction::Operation;
    using Value = typename Reduction::Value;
    Value found = reduction.so_far[0];
#pragma unroll
    for (int i = 1; i < width; ++i) found = Operation::join(found, reduction.so_far[i]);
    found = over_lanes<Operation, (lanes < 32 ? lanes : 32)>(found);
    reduction.result[0] = found;
    if constexpr (has_shared_rows) {
      if (lane % 32 == 0) shared_values<Reduction::slot, Value, warps>()[lane / 32] = found;
    }
  }
  template <class Reduction>
  FUSELAB_INLINE void finish(Reduction& reduction) const {
    using Operation = typename Reduction::Operation;
    using Value = typename Reduction::Value;
    const Value* of_warp = shared_values<Reduction::slot, Value, warps>();
    const Value own = lane % 32 < warps ? of_warp[lane % 32] : Operation::template neutral<Value>();
    reduction.result[0] = over_lanes<Operation, 32>(own);
  }
  template <class Reduction>
  FUSELAB_INLINE void hand_over(int64_t* partials, int parts, int, Reduction& reduction) const {
    const int64_t place = (Reduction::slot * sizes.rows + at) * parts + blockIdx.y;
    *partial_at<typename Reduction::Value>(partials, place) = reduction.result[0];
  }
  template <class Reduction>
  FUSELAB_INLINE void collect(int64_t* partials, int parts, Reduction& reduction) const {
    const int64_t own_row = at < Index(sizes.rows) ? at : Index(sizes.rows) - 1;
    const int64_t place = (Reduction::slot * sizes.rows + own_row) * parts;
    for (int part = lane; part < parts; part += lanes) {
      reduction.add(0, *partial_at<typename Reduction::Value>(partials, place + part));
    }
  }

 private:
  const LoopSizes& sizes;
  Index at;
  int lane;
  Counters<Index, row_loops, 4> row;

  FUSELAB_INLINE Index first() const {
    return share == Share::part ? Index(blockIdx.y) * lanes + lane : Index(lane);
  }
  FUSELAB_INLINE Index step() const {
    return share == Share::part ? Index(gridDim.y) * lanes : Index(lanes);
  }
};

// A block has `lanes` packs of `width` neighbouring rows, and all of their columns: a thread has every
// `walkers`th. Rows are whole packs; threads beyond the last pack compute it too, and store no
// results of rows.
template <class Index_, int row_loops_, int column_loops_, int width_, int lanes, int warps,
          int kept_, Share share_>
struct ColumnTile {
  using Index = Index_;
  static constexpr int row_loops = row_loops_, column_loops = column_loops_, packed_loop = 3;
  static constexpr int width = width_, rows = width, kept = kept_;
  static constexpr int unrolled = kept > 0 ? kept : 2, threads = 32 * warps;
  static constexpr int walkers = threads / lanes;
  static constexpr bool ragged = false, has_shared_rows = warps > 1;
  static constexpr Share share = share_;

  FUSELAB_INLINE explicit ColumnTile(const LoopSizes& sizes)
      : sizes(sizes),
        at((Index(blockIdx.x) * lanes + Index(threadIdx.x % lanes)) * width),
        lane(int(threadIdx.x) % lanes),
        walker(int(threadIdx.x) / lanes),
        row(at < Index(sizes.rows) ? at : Index(sizes.rows) - width, sizes.row_sizes) {}
  static FUSELAB_INLINE int row_of(int i) { return i; }
  FUSELAB_INLINE int packs() const {
    if constexpr (kept > 0) return kept;
    const Index columns = Index(sizes.columns);
    return columns > first() ? int((columns - first() - 1) / step()) + 1 : 0;
  }
  FUSELAB_INLINE PackAt<ColumnTile> pack(int k) const {
    const Index column = first() + k * step();
    const int count = column < Index(sizes.columns) ? width : 0;
    return {k, row, {column, sizes.column_sizes}, count};
  }
  FUSELAB_INLINE Index row_offset(const int64_t* strides, int r) const {
    return row.offset(strides) + r * Index(strides[packed_loop]);
  }
  FUSELAB_INLINE bool owns_row(int) const { return walker == 0 && at < Index(sizes.rows); }

  template <class Reduction>
  FUSELAB_INLINE void gather(Reduction& reduction) const {
    using Value = typename Reduction::Value;
#pragma unroll
    for (int r = 0; r < width; ++r) {
      const Value found = over_lanes<typename Reduction::Operation, 32, lanes>(reduction.so_far[r]);
      reduction.result[r] = found;
      if constexpr (has_shared_rows) {
        Value* of_warp = shared_values<Reduction::slot, Value, warps * lanes * width>();
        if (threadIdx.x % 32 < lanes) of_warp[place(int(threadIdx.x) / 32, r)] = found;
      }
    }
  }
  template <class Reduction>
  FUSELAB_INLINE void finish(Reduction& reduction) const {
    using Operation = typename Reduction::Operation;
    using Value = typename Reduction::Value;
    const Value* of_warp = shared_values<Reduction::slot, Value, warps * lanes * width>();
#pragma unroll
    for (int r = 0; r < width; ++r) {
      Value found = of_warp[place(0, r)];
#pragma unroll
      for (int warp = 1; warp < warps; ++warp) {
        found = Operation::join(found, of_warp[place(warp, r)]);
      }
      reduction.result[r] = found;
    }
  }
  template <class Reduction>
  FUSELAB_INLINE void hand_over(int64_t* partials, int parts, int r, Reduction& reduction) const {
    const int64_t place = (Reduction::slot * sizes.rows + at + r) * parts + blockIdx.y;
    *partial_at<typename Reduction::Value>(partials, place) = reduction.result[r];
  }

 private:
  const LoopSizes& sizes;
  Index at;
  int lane, walker;
  Counters<Index, row_loops, 4> row;

  FUSELAB_INLINE int place(int warp, int r) const { return (warp * width + r) * lanes + lane; }
  FUSELAB_INLINE Index first() const {
    return share == Share::part ? Index(blockIdx.y) * walkers + walker : Index(walker);
  }
  FUSELAB_INLINE Index step() const {
    return share == Share::part ? Index(gridDim.y) * walkers : Index(walkers);
  }
};

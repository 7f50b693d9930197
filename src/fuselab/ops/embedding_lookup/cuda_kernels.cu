// Embedding look-up over many tables, and what its gradient does to them.
//
// A position is one id, sample * tables + table. Rows are moved by `lanes` neighbouring threads, 16
// bytes each where addresses allow, and every thread has several rows in flight: a gather waits for
// memory, not for bandwidth, until enough of them are under way.
//
// look_up: a block owns 256 / lanes * kItems consecutive positions, so ids are read and vectors
//   written coalesced. Each id is read once, each row once per position, each vector written once.
// scatter: adds gradients to rows by atomics. A block owns `samples` samples of one table; where the
//   table is small, it first sorts them by row in shared memory and adds up every row's in two levels,
//   in registers and then by join_piece: 1024 samples of a table of 3 rows take 3 atomics.
// key_positions, reduce_runs, join_runs: the same in a fixed order, and what Adagrad needs, a row's
//   whole gradient. Positions are sorted by row (between the first two); a group of lanes adds up
//   `run` sorted positions and writes every row that lies within them. The rest, runs of one row that
//   cross such a border, are partial sums of which join_runs makes one, in an order that depends on
//   their number alone. No row is read or written by two groups.
// update_tables: the same of few samples in one launch. A block owns a table and sorts, adds up and
//   joins in shared memory.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../indices/device_assert.cuh"
#include "tables.h"

constexpr int kThreads = 256;
constexpr int kItems = 4;     // rows that a thread of look_up has in flight
constexpr int kSmall = 1024;  // scatter sorts a table of fewer rows in shared memory

enum class Update { gradient, sgd, rowwise_adagrad };

template <class Element>
struct ComputeOf {
  using type = float;
};
template <>
struct ComputeOf<double> {
  using type = double;
};
template <class Element>
using Compute = typename ComputeOf<Element>::type;

__device__ __forceinline__ float widened(float x) { return x; }
__device__ __forceinline__ double widened(double x) { return x; }
__device__ __forceinline__ float widened(__half x) { return __half2float(x); }
__device__ __forceinline__ float widened(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void assign(float& to, float x) { to = x; }
__device__ __forceinline__ void assign(double& to, double x) { to = x; }
__device__ __forceinline__ void assign(__half& to, float x) { to = __float2half_rn(x); }
__device__ __forceinline__ void assign(__nv_bfloat16& to, float x) { to = __float2bfloat16_rn(x); }

// Rows loaded before the first is used: as many as registers hold.
template <int vector, int tiles>
constexpr int kAhead = vector * tiles > 8 ? 1 : 4;

// The same of partial sums to be joined.
template <int vector, int tiles>
constexpr int kJoined = vector * tiles > 4 ? kAhead<vector, tiles> : 8;

// Blocks of scatter that a multiprocessor shall hold: narrow rows wait for memory most.
template <int vector, int tiles>
constexpr int kBlocks = vector * tiles > 4 ? 1 : 5;

template <class Element, int vector>
struct alignas(sizeof(Element) * vector < 16 ? sizeof(Element) * vector : 16) Vector {
  Element at[vector];
};

// What L2 is told. stream: to keep the rows of tables rather than vectors and gradients, which are met
// once. prefetch: that, and of rows as soon as ids name them. ahead: that, and of a block's gradients
// before its ids are there.
enum class Hints { none, stream, prefetch, ahead };

template <class Stored>
__device__ __forceinline__ void prefetch(const Stored* row, int width) {
#pragma unroll 1
  for (int element = 0; element < width; element += 32 / sizeof(Stored)) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(row + element)));
  }
}

// Elements that are read once: L2 drops them first.
template <class Stored>
struct ReadOnce {
  const Stored* at;
  __device__ __forceinline__ ReadOnce operator+(int64_t elements) const { return {at + elements}; }
};

template <class Gradient, Hints hints>
struct Reading {
  using Source = ReadOnce<Gradient>;
};
template <class Gradient>
struct Reading<Gradient, Hints::none> {
  using Source = const Gradient*;
};

template <class Packed>
__device__ __forceinline__ Packed read_once(const Packed* from) {
  Packed packed;
  if constexpr (sizeof(Packed) == 16) {
    const uint4 bits = __ldcs(reinterpret_cast<const uint4*>(from));
    memcpy(&packed, &bits, 16);
  } else if constexpr (sizeof(Packed) == 8) {
    const uint2 bits = __ldcs(reinterpret_cast<const uint2*>(from));
    memcpy(&packed, &bits, 8);
  } else if constexpr (sizeof(Packed) == 4) {
    const unsigned bits = __ldcs(reinterpret_cast<const unsigned*>(from));
    memcpy(&packed, &bits, 4);
  } else {
    packed = *from;
  }
  return packed;
}

template <class Packed>
__device__ __forceinline__ void write_once(Packed* to, const Packed& packed) {
  if constexpr (sizeof(Packed) == 16) {
    uint4 bits;
    memcpy(&bits, &packed, 16);
    __stcs(reinterpret_cast<uint4*>(to), bits);
  } else if constexpr (sizeof(Packed) == 8) {
    uint2 bits;
    memcpy(&bits, &packed, 8);
    __stcs(reinterpret_cast<uint2*>(to), bits);
  } else {
    *to = packed;
  }
}

// Positions of one table are scattered over a warp: indexing the kernel's parameters by them would
// read constant memory once per lane.
template <int capacity>
__device__ __forceinline__ void share(const int64_t (&from)[capacity], int64_t (&to)[capacity],
                                      int tables) {
  static_assert(capacity <= kThreads);
  if (threadIdx.x < tables) to[threadIdx.x] = from[threadIdx.x];
}

template <Rule rule>
__device__ __forceinline__ int64_t checked_row_of(int64_t id, int64_t rows) {
  const int64_t row = row_of<rule>(id, rows);
  if (rule == Rule::error && row < 0) {
    fail("embedding: an id is out of range (out_of_range='clamp' and 'ignore' allow it)");
  }
  return row;
}

// ---------------------------------------------------------------------------- look-up

// What becomes of a chunk of a row: a copy, or its elements in another type.
template <class From>
struct Copy {
  using Chunk = From;
  using Result = From;
  static __device__ __forceinline__ Result of(const Chunk& chunk) { return chunk; }
};

template <class From, class Element, class Output>
struct Convert {
  using Chunk = From;
  static constexpr int vector = sizeof(Chunk) / sizeof(Element);
  using Result = Vector<Output, vector>;
  static __device__ __forceinline__ Result of(const Chunk& chunk) {
    Vector<Element, vector> from;
    memcpy(&from, &chunk, sizeof(chunk));
    Result result;
#pragma unroll
    for (int i = 0; i < vector; ++i) assign(result.at[i], widened(from.at[i]));
    return result;
  }
};

template <class Move, class Id, Rule rule, int lanes, Hints hints, int capacity, class Index>
__global__ void __launch_bounds__(kThreads)
    look_up(const Id* __restrict__ ids, typename Move::Result* __restrict__ output,
            int64_t positions, int tables,
            int chunks, int64_t id_sample_stride, int64_t id_table_stride,
            int64_t output_sample_stride, const __grid_constant__ Tables<capacity> description) {
  using Chunk = typename Move::Chunk;
  __shared__ int64_t address[capacity], pitch[capacity], rows[capacity];
  share(description.address, address, tables);
  share(description.pitch, pitch, tables);
  share(description.rows, rows, tables);
  __syncthreads();
  constexpr int groups = kThreads / lanes;
  const int lane = threadIdx.x % lanes;
  const Index first = static_cast<Index>(blockIdx.x) * (groups * kItems) + threadIdx.x / lanes;
  int64_t id[kItems];
  int table[kItems];
  typename Move::Result* target[kItems];
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const Index position = first + item * groups;
    target[item] = nullptr;
    id[item] = table[item] = 0;
    if (position < positions) {
      const Index sample = position / tables;
      table[item] = static_cast<int>(position - sample * tables);
      id[item] = ids[sample * id_sample_stride + table[item] * id_table_stride];
      target[item] = output + sample * output_sample_stride +
                     static_cast<int64_t>(table[item]) * chunks;
    }
  }
  const Chunk* source[kItems];
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    source[item] = nullptr;
    if (target[item] != nullptr) {
      const int64_t row = checked_row_of<rule>(id[item], rows[table[item]]);
      if (row >= 0) {
        source[item] =
            reinterpret_cast<const Chunk*>(address[table[item]] + row * pitch[table[item]]);
      }
    }
  }
#pragma unroll 1
  for (int chunk = lane; chunk < chunks; chunk += lanes) {
    Chunk value[kItems];
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      value[item] = source[item] != nullptr ? __ldg(source[item] + chunk) : Chunk{};
    }
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      if (target[item] == nullptr) continue;
      const auto result = Move::of(value[item]);
      if constexpr (hints == Hints::none) {
        target[item][chunk] = result;
      } else {
        write_once(target[item] + chunk, result);
      }
    }
  }
}

// ---------------------------------------------------------------------------- atomics on global memory

// By name: atomicAdd on an address that comes as an integer is one on generic memory, and returns.
__device__ __forceinline__ void reduce_add(float* to, float x) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "f"(x));
}
__device__ __forceinline__ void reduce_add(double* to, double x) {
  asm volatile("red.global.add.f64 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "d"(x));
}
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void reduce_add(float* to, float x, float y, float z, float w) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(
                   __cvta_generic_to_global(to)),
               "f"(x), "f"(y), "f"(z), "f"(w));
}
#endif

// ---------------------------------------------------------------------------- rows in registers

// `tiles` vectors of each of `lanes` threads: columns (tile * lanes + lane) * vector and on.
template <class Element, int vector, int lanes, int tiles>
struct Row {
  static constexpr int kLanes = lanes;
  static constexpr int ahead = kAhead<vector, tiles>;
  Compute<Element> at[tiles][vector];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
      for (int i = 0; i < vector; ++i) at[tile][i] = 0;
    }
  }

  // Of a row of Stored: Element, the gradient's or, for partial sums, what they are computed in.
  template <class Stored>
  __device__ __forceinline__ void load(const Stored* row, int width) {
    load(row, width, [](const Vector<Stored, vector>* from) { return *from; });
  }
  template <class Stored>
  __device__ __forceinline__ void load(ReadOnce<Stored> row, int width) {
    load(row.at, width, [](const Vector<Stored, vector>* from) { return read_once(from); });
  }
  template <class Stored, class Read>
  __device__ __forceinline__ void load(const Stored* row, int width, Read read) {
    const int lane = threadIdx.x % lanes;
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
      const int column = (tile * lanes + lane) * vector;
      if (column < width) {
        const auto packed = read(reinterpret_cast<const Vector<Stored, vector>*>(row + column));
#pragma unroll
        for (int i = 0; i < vector; ++i) at[tile][i] = widened(packed.at[i]);
      } else {
#pragma unroll
        for (int i = 0; i < vector; ++i) at[tile][i] = 0;
      }
    }
  }

  template <class Stored>
  __device__ __forceinline__ void store(Stored* row, int width) const {
    const int lane = threadIdx.x % lanes;
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
      const int column = (tile * lanes + lane) * vector;
      if (column < width) {
        Vector<Stored, vector> packed;
#pragma unroll
        for (int i = 0; i < vector; ++i) assign(packed.at[i], at[tile][i]);
        *reinterpret_cast<Vector<Stored, vector>*>(row + column) = packed;
      }
    }
  }

  // this += factor * other
  template <class Other>
  __device__ __forceinline__ void add(const Row<Other, vector, lanes, tiles>& other,
                                      Compute<Element> factor = 1) {
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
      for (int i = 0; i < vector; ++i) at[tile][i] += factor * other.at[tile][i];
    }
  }

  // row += factor * this, by atomics: four floats at once from sm_90 on.
  template <class Stored>
  __device__ __forceinline__ void add_to(Stored* row, int width, Stored factor) const {
    const int lane = threadIdx.x % lanes;
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
      const int column = (tile * lanes + lane) * vector;
      if (column >= width) continue;
#if __CUDA_ARCH__ >= 900
      if constexpr (sizeof(Stored) == 4 && vector == 4) {
        reduce_add(row + column, factor * at[tile][0], factor * at[tile][1], factor * at[tile][2],
                   factor * at[tile][3]);
        continue;
      }
#endif
#pragma unroll
      for (int i = 0; i < vector; ++i) reduce_add(row + column + i, factor * at[tile][i]);
    }
  }

  // Sum of squares over the whole row, the same in all its lanes.
  __device__ __forceinline__ Compute<Element> squares(unsigned mask) const {
    Compute<Element> sum = 0;
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
      for (int i = 0; i < vector; ++i) sum += at[tile][i] * at[tile][i];
    }
#pragma unroll
    for (int step = lanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(mask, sum, step);
    return sum;
  }

  // Adds the rows that the groups of a warp hold; every group gets the same sum.
  __device__ __forceinline__ void add_groups() {
#pragma unroll
    for (int step = lanes; step < 32; step *= 2) {
#pragma unroll
      for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
        for (int i = 0; i < vector; ++i) {
          at[tile][i] += __shfl_xor_sync(0xffffffffu, at[tile][i], step);
        }
      }
    }
  }
};

// The threads of a warp that share this thread's row.
template <int lanes>
__device__ __forceinline__ unsigned lanes_mask() {
  if constexpr (lanes == 32) return 0xffffffffu;
  return ((1u << lanes) - 1) << (threadIdx.x % 32 / lanes * lanes);
}

// What one step of an optimizer needs beside the gradient. A number that lies on the device (in a
// captured graph it may change from replay to replay) comes as a pointer.
template <class Number>
struct Step {
  const Number* learning_rate_tensor;
  Number learning_rate;
  const Number* eps_tensor;
  Number given_eps;

  __device__ __forceinline__ Number rate() const {
    return learning_rate_tensor != nullptr ? *learning_rate_tensor : learning_rate;
  }
  __device__ __forceinline__ Number eps() const {
    return eps_tensor != nullptr ? *eps_tensor : given_eps;
  }
};

// ---------------------------------------------------------------------------- atomics

// Walks `count` gradients and flushes the sum of each run of equal rows. `fetch(place, value)` loads
// one and returns its row, -1 for none; `flush(sum, row)`.
template <class Values, class Fetch, class Flush>
__device__ __forceinline__ void add_runs(int count, Fetch fetch, Flush flush) {
  constexpr int ahead = Values::ahead;
  Values sum;
  sum.clear();
  int64_t current = -1;
  for (int i = 0; i < count; i += ahead) {
    Values value[ahead];
    int64_t row[ahead];
#pragma unroll
    for (int j = 0; j < ahead; ++j) row[j] = i + j < count ? fetch(i + j, value[j]) : -1;
#pragma unroll
    for (int j = 0; j < ahead; ++j) {
      if (row[j] < 0) continue;
      if (row[j] != current) {
        if (current >= 0) flush(sum, current);
        sum.clear();
        current = row[j];
      }
      sum.add(value[j]);
    }
  }
  if (current >= 0) flush(sum, current);
}

// Exclusive prefix sum of kSmall counts by kThreads threads, in place.
__device__ __forceinline__ void scan(int (&counts)[kSmall]) {
  constexpr int each = kSmall / kThreads;
  __shared__ int warp_totals[kThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int own[each], total = 0;
#pragma unroll
  for (int i = 0; i < each; ++i) {
    own[i] = total;
    total += counts[threadIdx.x * each + i];
  }
  int inclusive = total;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int lower = __shfl_up_sync(0xffffffffu, inclusive, step);
    if (lane >= step) inclusive += lower;
  }
  if (lane == 31) warp_totals[warp] = inclusive;
  __syncthreads();
  int before = inclusive - total;
  for (int other = 0; other < warp; ++other) before += warp_totals[other];
#pragma unroll
  for (int i = 0; i < each; ++i) counts[threadIdx.x * each + i] = before + own[i];
  __syncthreads();
}

// ---------------------------------------------------------------------------- sorted runs

// A position's key is its row counted through all tables; that of an ignored id is past all rows.
template <class Id, class Key, Rule rule, int capacity>
__global__ void __launch_bounds__(kThreads)
    key_positions(const Id* __restrict__ ids, Key* __restrict__ keys, int64_t positions, int tables,
                  int64_t all_rows, int64_t id_sample_stride, int64_t id_table_stride,
                  const __grid_constant__ Tables<capacity> description) {
  __shared__ int64_t rows[capacity], first[capacity];
  share(description.rows, rows, tables);
  share(description.first, first, tables);
  __syncthreads();
  const int64_t position = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (position >= positions) return;
  const int64_t sample = position / tables;
  const int table = static_cast<int>(position - sample * tables);
  const int64_t row = checked_row_of<rule>(
      ids[sample * id_sample_stride + table * id_table_stride], rows[table]);
  keys[position] = static_cast<Key>(row < 0 ? all_rows : first[table] + row);
}

// position / tables; 32 bits, where they do, divide in a third of the instructions.
__device__ __forceinline__ int64_t quotient(int64_t position, int tables) {
  if (position >> 32 == 0) return static_cast<uint32_t>(position) / static_cast<uint32_t>(tables);
  return position / tables;
}

// A row that its whole gradient is to change, and its state: loaded before that gradient is known.
template <class Element, Update update, int vector, int lanes, int tiles>
struct Target {
  using Number = Compute<Element>;
  using Values = Row<Element, vector, lanes, tiles>;
  using Sums = Values;
  Element* weights = nullptr;
  Number* state;
  Values value;
  Number total;

  template <int capacity>
  __device__ __forceinline__ void load(int table, int64_t row, int width,
                                       const Tables<capacity>& description) {
    if (description.address[table] == 0) return;
    weights =
        reinterpret_cast<Element*>(description.address[table] + row * description.pitch[table]);
    if constexpr (update == Update::gradient) return;
    value.load(weights, width);
    if constexpr (update == Update::rowwise_adagrad) {
      state = reinterpret_cast<Number*>(description.state[table]) + row;
      total = *state;
    }
  }

  __device__ __forceinline__ void change(const Values& sum, int width, const Step<Number>& step) {
    if (weights == nullptr) return;
    if constexpr (update == Update::gradient) {
      sum.store(weights, width);
      return;
    }
    Number factor = step.rate();
    if constexpr (update == Update::rowwise_adagrad) {
      const unsigned mask = lanes_mask<lanes>();
      total += sum.squares(mask) / width;
      __syncwarp(mask);  // every lane has read the state before it changes
      if (threadIdx.x % lanes == 0) *state = total;
      factor /= sqrt(total) + step.eps();
    }
    value.add(sum, -factor);
    value.store(weights, width);
  }
};

// A row to which its gradient of one block is added by atomics. The sum of a block is in double:
// tables of 2 and 3 rows were 12 and 75 ulp off where eager was 2.1 and 13.5 (255 and 2048 floats).
template <class Element, Update update, int vector, int lanes, int tiles>
struct AtomicTarget {
  using Values = Row<Element, vector, lanes, tiles>;
  using Sums = Row<double, vector, lanes, tiles>;
  Element* weights;

  template <int capacity>
  __device__ __forceinline__ void load(int table, int64_t row, int,
                                       const Tables<capacity>& description) {
    weights =
        reinterpret_cast<Element*>(description.address[table] + row * description.pitch[table]);
  }
  template <class Sum>
  __device__ __forceinline__ void change(const Sum& sum, int width, const Step<Element>& step) {
    sum.add_to(weights, width, update == Update::gradient ? Element(1) : -step.rate());
  }
};

// Where the gradient of a sorted position lies, and the row it is for.
template <class Source>
struct Place {
  Source gradient;
  int table;
  int64_t row;
};

// All positions of all tables, sorted in global memory.
template <class Gradient, class Key, int capacity>
struct GlobalRuns {
  using Index = int64_t;
  const Key* __restrict__ keys;
  const int64_t* __restrict__ order;
  const Gradient* __restrict__ grad_output;
  int64_t positions;
  int tables;
  int64_t none;  // the key of an ignored id
  int64_t grad_sample_stride, grad_table_stride;
  const Tables<capacity>& description;

  __device__ __forceinline__ int64_t key(int64_t i) const { return keys[i]; }
  __device__ __forceinline__ Place<const Gradient*> at(int64_t i) const {
    const int64_t position = order[i], sample = quotient(position, tables);
    const int table = static_cast<int>(position - sample * tables);
    return {grad_output + sample * grad_sample_stride + table * grad_table_stride, table,
            keys[i] - description.first[table]};
  }
};

// The positions of one table, sorted in shared memory: keys are row * kMostSamples + sample.
constexpr int kMostSamples = 4096;
template <class Gradient, int capacity>
struct SharedRuns {
  using Index = int64_t;
  const uint64_t* keys;
  const Gradient* __restrict__ grads;
  int64_t positions;
  int table;
  int64_t grad_sample_stride;
  const Tables<capacity>& description;
  static constexpr int64_t none = ~uint64_t(0) / kMostSamples;

  __device__ __forceinline__ int64_t key(int64_t i) const { return keys[i] / kMostSamples; }
  __device__ __forceinline__ Place<const Gradient*> at(int64_t i) const {
    return {grads + keys[i] % kMostSamples * grad_sample_stride, table, key(i)};
  }
};

// The samples of a block of scatter, sorted by row in shared memory; ignored ones have row -1.
template <class Source, int capacity>
struct BlockRuns {
  using Index = int;
  const int64_t* rows;
  const unsigned short* order;
  Source grads;
  int positions;
  int table;
  int64_t grad_sample_stride;
  const Tables<capacity>& description;
  static constexpr int none = -1;

  __device__ __forceinline__ int key(int i) const { return static_cast<int>(rows[order[i]]); }
  __device__ __forceinline__ Place<Source> at(int i) const {
    return {grads + order[i] * grad_sample_stride, table, key(i)};
  }
};

// A group of lanes adds up the piece-th `run` sorted positions.
template <class Target, int run, class Runs, class Number, class StepNumber>
__device__ __forceinline__ void reduce_piece(const Runs& runs, typename Runs::Index piece, Number* heads,
                                             Number* tails, int width, const Step<StepNumber>& step) {
  using Index = typename Runs::Index;
  const Index begin = piece * run;
  if (begin >= runs.positions) return;
  const Index end = begin + run < runs.positions ? begin + run : runs.positions;
  constexpr int ahead = Target::Values::ahead;
  typename Target::Sums sum;
  sum.clear();
  bool began_before = begin > 0 && runs.key(begin - 1) == runs.key(begin);
  bool goes_on = false;
  for (Index i = begin; i < end; i += ahead) {
    typename Target::Values value[ahead];
    Target target[ahead];
    bool counts[ahead], ends[ahead];
#pragma unroll
    for (int j = 0; j < ahead; ++j) {
      counts[j] = ends[j] = false;
      if (i + j >= end) continue;
      const auto key = runs.key(i + j);
      counts[j] = key != runs.none;
      if (!counts[j]) continue;
      ends[j] = i + j + 1 == runs.positions || runs.key(i + j + 1) != key;
      const auto place = runs.at(i + j);
      value[j].load(place.gradient, width);
      if (ends[j]) target[j].load(place.table, place.row, width, runs.description);
    }
#pragma unroll
    for (int j = 0; j < ahead; ++j) {
      if (!counts[j]) continue;
      sum.add(value[j]);
      goes_on = !ends[j];
      if (goes_on) continue;
      if (began_before) {
        sum.store(heads + piece * width, width);
      } else {
        target[j].change(sum, width, step);
      }
      began_before = false;
      sum.clear();
    }
  }
  if (goes_on) sum.store((began_before ? heads : tails) + piece * width, width);
}

// One warp joins the run that begins in a piece and goes on in the next ones.
template <class Target, int run, int ahead, class Runs, class Number, class StepNumber>
__device__ __forceinline__ void join_piece(const Runs& runs, typename Runs::Index piece, const Number* heads,
                                           const Number* tails, int width,
                                           const Step<StepNumber>& step) {
  using Index = typename Runs::Index;
  const Index begin = piece * run, end = begin + run;
  if (end >= runs.positions) return;
  const auto key = runs.key(end - 1), next = runs.key(end);
  const bool began_before = begin > 0 && runs.key(begin - 1) == key;
  if (next != key || key == runs.none || began_before) return;

  // The first piece that the run does not reach. Most runs end within 32 pieces, which the lanes look
  // at first; of the rest they cut a 32nd out at a time.
  const int lane = threadIdx.x % 32;
  Index low = piece + 2, high = (runs.positions - 1) / run + 1;
  for (bool near = true; low < high; near = false) {
    const Index stride = near ? 1 : (high - low + 31) / 32, probe = low + lane * stride;
    const bool reached = probe < high && runs.key(probe * run) == key;
    const int count = __popc(__ballot_sync(0xffffffffu, reached));
    if (count < 32 && low + count * stride < high) high = low + count * stride;
    if (count > 0) low += (count - 1) * stride + 1;
  }
  const Index pieces = low - piece - 1;
  constexpr int groups = 32 / Target::Values::kLanes;
  const int group = lane / Target::Values::kLanes;
  Target target;
  typename Target::Sums sum;
  if (group == 0) {
    const auto place = runs.at(end - 1);
    target.load(place.table, place.row, width, runs.description);
    sum.load(tails + piece * width, width);
  } else {
    sum.clear();
  }
  for (Index i = group; i < pieces; i += groups * ahead) {
    typename Target::Sums value[ahead];
#pragma unroll
    for (int j = 0; j < ahead; ++j) {
      if (i + j * groups < pieces) {
        value[j].load(heads + (piece + 1 + i + j * groups) * width, width);
      }
    }
#pragma unroll
    for (int j = 0; j < ahead; ++j) {
      if (i + j * groups < pieces) sum.add(value[j]);
    }
  }
  __syncwarp();
  sum.add_groups();
  if (group == 0) target.change(sum, width, step);
}

template <class Element, class Gradient, class Id, Rule rule, Update update, int vector, int lanes,
          int tiles, int samples, Hints hints, int capacity>
__global__ void __launch_bounds__(kThreads, kBlocks<vector, tiles>)
    scatter(const Id* __restrict__ ids, const Gradient* __restrict__ grad_output, int64_t batch,
            int tables, int width, int64_t id_sample_stride, int64_t id_table_stride,
            int64_t grad_sample_stride, int64_t grad_table_stride,
            const Element* learning_rate_tensor, Element learning_rate,
            const __grid_constant__ Tables<capacity> description) {
  static_assert(samples <= kSmall);
  __shared__ int64_t rows_of_samples[samples];
  __shared__ int places[kSmall];
  __shared__ unsigned short order[samples];
  const int table = blockIdx.x % tables;
  const int64_t first = static_cast<int64_t>(blockIdx.x / tables) * samples;
  const int64_t rows = description.rows[table];
  if (description.address[table] == 0) return;
  const bool small = rows < kSmall;

  if (small) {
    for (int place = threadIdx.x; place < kSmall; place += kThreads) places[place] = 0;
    __syncthreads();
  }
  // All ids are under way before the first is looked at, which may stop the kernel.
  constexpr int each = samples / kThreads;
  Id id[each];
  int rank[each];
#pragma unroll
  for (int i = 0; i < each; ++i) {
    const int64_t sample = first + threadIdx.x + i * kThreads;
    if (sample >= batch) continue;
    id[i] = ids[sample * id_sample_stride + table * id_table_stride];
    if constexpr (hints == Hints::ahead && tiles == 1) {
      prefetch(grad_output + sample * grad_sample_stride + table * grad_table_stride, width);
    }
  }
#pragma unroll
  for (int i = 0; i < each; ++i) {
    const int sample = threadIdx.x + i * kThreads;
    const int64_t row = first + sample < batch ? checked_row_of<rule>(id[i], rows) : -1;
    rows_of_samples[sample] = row;
    if constexpr ((hints == Hints::prefetch || hints == Hints::ahead) && tiles == 1) {
      const int64_t target = description.address[table] + row * description.pitch[table];
      if (row >= 0 && !small) prefetch(reinterpret_cast<const Element*>(target), width);
    }
    if (small) rank[i] = atomicAdd(&places[row < 0 ? rows : row], 1);
  }
  __syncthreads();
  if (small) {
    scan(places);
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int sample = threadIdx.x + i * kThreads;
      const int64_t row = rows_of_samples[sample];
      order[places[row < 0 ? rows : row] + rank[i]] = static_cast<unsigned short>(sample);
    }
    __syncthreads();
  }

  if (learning_rate_tensor != nullptr) learning_rate = *learning_rate_tensor;  // once per thread
  const Step<Element> step{nullptr, learning_rate, nullptr, 0};
  using Added = AtomicTarget<Element, update, vector, lanes, tiles>;
  using Source = typename Reading<Gradient, hints>::Source;
  constexpr int groups = kThreads / lanes, piece = samples / groups;
  const Source grads{grad_output + first * grad_sample_stride + table * grad_table_stride};
  if constexpr (tiles == 1) {
    if (small) {
      __shared__ alignas(16) double heads[kThreads * vector], tails[kThreads * vector];
      const BlockRuns<Source, capacity> runs{rows_of_samples, order,  grads, samples, table,
                                             grad_sample_stride, description};
      reduce_piece<Added, piece>(runs, threadIdx.x / lanes, heads, tails, width, step);
      __syncthreads();
      for (int border = threadIdx.x / 32; border < groups; border += kThreads / 32) {
        join_piece<Added, piece, 2>(runs, border, heads, tails, width, step);
      }
      return;
    }
  }
  const int begin = threadIdx.x / lanes * piece;
  add_runs<typename Added::Values>(
      piece,
      [&](int place, typename Added::Values& value) {
        const int sample = small ? order[begin + place] : begin + place;
        const int64_t row = rows_of_samples[sample];
        if (row >= 0) value.load(grads + sample * grad_sample_stride, width);
        return row;
      },
      [&](const typename Added::Values& sum, int64_t row) {
        Added target;
        target.load(table, row, width, description);
        target.change(sum, width, step);
      });
}

template <class Element, class Gradient, class Key, Update update, int vector, int lanes, int tiles,
          int run, int capacity>
__global__ void __launch_bounds__(kThreads)
    reduce_runs(const Key* __restrict__ keys, const int64_t* __restrict__ order,
                const Gradient* __restrict__ grad_output, Compute<Element>* __restrict__ heads,
                Compute<Element>* __restrict__ tails, int64_t positions, int tables, int width,
                int64_t all_rows, int64_t grad_sample_stride, int64_t grad_table_stride,
                const Compute<Element>* learning_rate_tensor, Compute<Element> learning_rate,
                const Compute<Element>* eps_tensor, Compute<Element> eps,
                const __grid_constant__ Tables<capacity> description) {
  const int64_t piece = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / lanes;
  const GlobalRuns<Gradient, Key, capacity> runs{
      keys,     order,    grad_output, positions, tables, all_rows, grad_sample_stride,
      grad_table_stride, description};
  reduce_piece<Target<Element, update, vector, lanes, tiles>, run>(
      runs, piece, heads, tails, width,
      Step<Compute<Element>>{learning_rate_tensor, learning_rate, eps_tensor, eps});
}

template <class Element, class Key, Update update, int vector, int lanes, int tiles, int run,
          int capacity>
__global__ void __launch_bounds__(kThreads)
    join_runs(const Key* __restrict__ keys, const int64_t* __restrict__ order,
              const Compute<Element>* __restrict__ heads,
              const Compute<Element>* __restrict__ tails, int64_t positions, int tables, int width,
              int64_t all_rows, const Compute<Element>* learning_rate_tensor,
              Compute<Element> learning_rate, const Compute<Element>* eps_tensor,
              Compute<Element> eps,
              const __grid_constant__ Tables<capacity> description) {
  const int64_t piece = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  const GlobalRuns<Element, Key, capacity> runs{keys, order, nullptr, positions, tables, all_rows,
                                                0,    0,     description};
  join_piece<Target<Element, update, vector, lanes, tiles>, run, kJoined<vector, tiles>>(
      runs, piece, heads, tails, width,
      Step<Compute<Element>>{learning_rate_tensor, learning_rate, eps_tensor, eps});
}

// One step of a bitonic sort, with the key `stride` places on, which is another lane's.
__device__ __forceinline__ void compare_lanes(uint64_t& key, int place, int stride, int length) {
  const uint64_t other = __shfl_xor_sync(0xffffffffu, key, stride);
  const bool keeps_less = ((place & stride) == 0) == ((place & length) == 0);
  if ((other < key) == keeps_less) key = other;
}

// Bitonic: with a stride of up to 32 a warp stays within 64 keys, two in the registers of each lane.
template <int size, int threads>
__device__ __forceinline__ void sort_keys(uint64_t* keys) {
  static_assert(size >= 64 && threads % 32 == 0);
#pragma unroll 1
  for (int most = 64; most <= size; most *= 2) {
#pragma unroll 1
    for (int stride = most / 2; stride > 32; stride /= 2) {
      for (int i = threadIdx.x; i < size / 2; i += threads) {
        const int low = 2 * i - (i & (stride - 1)), high = low + stride;
        const uint64_t a = keys[low], b = keys[high];
        if ((a > b) == ((low & most) == 0)) {
          keys[low] = b;
          keys[high] = a;
        }
      }
      __syncthreads();
    }
    for (int begin = threadIdx.x / 32 * 64; begin < size; begin += 2 * threads) {
      const int low = begin + threadIdx.x % 32, high = low + 32;
      uint64_t a = keys[low], b = keys[high];
      for (int length = most == 64 ? 2 : most; length <= most; length *= 2) {
        if (length > 32 && (a > b) == ((low & length) == 0)) {
          const uint64_t less = b;
          b = a;
          a = less;
        }
        for (int stride = length / 2 < 16 ? length / 2 : 16; stride > 0; stride /= 2) {
          compare_lanes(a, low, stride, length);
          compare_lanes(b, high, stride, length);
        }
      }
      keys[low] = a;
      keys[high] = b;
    }
    __syncthreads();
  }
}

template <class Element, class Gradient, class Id, Rule rule, Update update, int vector, int lanes,
          int size, int capacity>
__global__ void __launch_bounds__(size / 2 < 1024 ? size / 2 : 1024)
    update_tables(const Id* __restrict__ ids, const Gradient* __restrict__ grad_output, int batch,
                  int width, int64_t id_sample_stride, int64_t id_table_stride,
                  int64_t grad_sample_stride, int64_t grad_table_stride,
                  const Compute<Element>* learning_rate_tensor, Compute<Element> learning_rate,
                  const Compute<Element>* eps_tensor, Compute<Element> eps,
                  const __grid_constant__ Tables<capacity> description) {
  static_assert(size <= kMostSamples);
  constexpr int threads = size / 2 < 1024 ? size / 2 : 1024;
  constexpr int groups = threads / lanes;
  extern __shared__ uint64_t keys[];  // (size)
  auto* heads = reinterpret_cast<Compute<Element>*>(keys + size);  // (groups, width)
  auto* tails = heads + groups * width;
  const int table = blockIdx.x;
  if (description.address[table] == 0) return;

  for (int sample = threadIdx.x; sample < size; sample += threads) {
    int64_t row = -1;
    if (sample < batch) {
      row = checked_row_of<rule>(ids[sample * id_sample_stride + table * id_table_stride],
                                 description.rows[table]);
    }
    keys[sample] = row < 0 ? ~uint64_t(0) : row * uint64_t(kMostSamples) + sample;
  }
  __syncthreads();
  sort_keys<size, threads>(keys);

  const Step<Compute<Element>> step{learning_rate_tensor, learning_rate, eps_tensor, eps};
  const SharedRuns<Gradient, capacity> runs{keys,  grad_output + table * grad_table_stride,
                                           batch, table, grad_sample_stride, description};
  constexpr int run = size / groups;
  using Changed = Target<Element, update, vector, lanes, 1>;
  reduce_piece<Changed, run>(runs, threadIdx.x / lanes, heads, tails, width, step);
  __syncthreads();
  for (int piece = threadIdx.x / 32; piece < groups; piece += threads / 32) {
    join_piece<Changed, run, kJoined<vector, 1>>(runs, piece, heads, tails, width, step);
  }
}

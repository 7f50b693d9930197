// Embedding look-up over many tables, and the change that its gradient makes to them.
//
// A position is one id, sample * tables + table. A row is moved by `lanes` neighbouring threads, 16
// bytes each where addresses allow, and every thread has several rows in flight: a gather is
// limited by latency, not by bandwidth, until enough rows are in flight.
//
// look_up: a block owns 256 / lanes * kItems consecutive positions, so that ids are read and
//   vectors written coalesced. Each id is read once, each row once per position, each vector
//   written once.
// scatter: adds gradients to rows by atomics. A block owns 256 samples of one table. If the table
//   has fewer rows than that, the block first sorts its samples by row in shared memory and adds
//   equal rows in registers, then over a warp and, for the smallest tables, in shared memory. So
//   256 samples of a table of 3 rows take 3 atomics per column, and no sum is one long chain of
//   floats.
// look_up_samples, scatter_samples: the same for many samples, by one block per multiprocessor that
//   stays until the end and takes whole samples, whose ids, upstream gradients and vectors are
//   contiguous in memory. A thread always has the same table and the same chunk of its vectors. It
//   copies its next data to its own place in shared memory some samples ahead, so no thread waits
//   for another. Rows of the smallest tables are summed in shared memory until the end, so that a
//   block makes one atomic for its whole share of a row.
// key_positions, reduce_runs, join_runs: the same in a fixed order, and for Adagrad, which needs a
//   row's whole gradient. Positions are sorted by row between the first two. A group of lanes adds
//   `run` sorted positions and changes every row whose run lies inside them. A run that crosses the
//   border leaves partial sums, which join_runs adds in an order that depends only on their number.
//   No row is read or written by two groups.
// update_tables: the same for few samples in one launch. A block owns a table and sorts, adds and
//   joins in shared memory.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../_shared/device_assert.cuh"
#include "tables.h"

constexpr int kThreads = 256;
constexpr int kItems = 4;           // rows that a thread of look_up has in flight
constexpr int kSums = 1024;         // numbers that a block of scatter sums in shared memory
constexpr int kMostThreads = 1024;  // of a block that takes whole samples
constexpr int kSamplesAhead = 4;    // samples that each of these threads has in flight

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

// The rows that are loaded before the first is used: as many as registers allow.
template <int vector, int tiles>
constexpr int kAhead = vector * tiles > 8 ? 1 : 4;

// The blocks of scatter that should fit a multiprocessor: narrow rows wait for memory most.
template <int vector, int tiles>
constexpr int kBlocks = vector * tiles > 4 ? 1 : 4;

template <class Element, int vector>
struct alignas(sizeof(Element) * vector < 16 ? sizeof(Element) * vector : 16) Vector {
  Element at[vector];
};

// Copies a kernel parameter's array to shared memory. The lanes of a warp have positions of
// different tables, and indexing the parameter by them would read constant memory once per lane.
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

// The treatment of a chunk of a row: a copy, or a conversion of its elements to another type.
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

template <class Move, class Id, Rule rule, int lanes, int capacity, class Index>
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
      if (target[item] != nullptr) target[item][chunk] = Move::of(value[item]);
    }
  }
}

// ---------------------------------------------------------------------------- whole samples

// Copies `bytes` (4, 8 or 16), of which both addresses are multiples, to shared memory, for this
// thread only. Streamed: 16-byte copies bypass L1 and are the first to be evicted from L2, which
// keeps room for other data; smaller ones always go through L1.
template <int bytes, bool streamed>
__device__ __forceinline__ void copy_ahead(void* to, const void* from) {
  const auto place = static_cast<unsigned>(__cvta_generic_to_shared(to));
  if constexpr (bytes == 16 && streamed) {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(place),
                 "l"(from), "l"(policy)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(place), "l"(from), "n"(bytes)
                 : "memory");
  }
}
__device__ __forceinline__ void end_of_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until all but the last `younger` groups of this thread's copies have arrived.
template <int younger>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(younger) : "memory");
}

// A thread's share in a block that takes whole samples. The thread is one of the `lanes` threads of
// a table, in one of `places` samples, as many as the block has threads for; spare threads do
// nothing.
template <int lanes>
struct Share {
  int table, lane, place, places;
  int64_t first, step;  // the first of its samples, and the distance to the next
  int steps;            // the number of its samples

  __device__ __forceinline__ Share(int64_t batch, int tables)
      : table(threadIdx.x / lanes % tables),
        lane(threadIdx.x % lanes),
        place(threadIdx.x / lanes / tables),
        places(blockDim.x / lanes / tables),
        first(static_cast<int64_t>(blockIdx.x) * places + place),
        step(static_cast<int64_t>(gridDim.x) * places),
        steps(place < places && first < batch ? static_cast<int>((batch - 1 - first) / step) + 1
                                              : 0) {}
};

// Rows are loaded `ahead` samples before their vectors are written, ids twice as early.
template <class Move, class Id, Rule rule, int lanes, int capacity>
__global__ void __launch_bounds__(kMostThreads, 1)
    look_up_samples(const Id* __restrict__ ids, typename Move::Result* __restrict__ output,
                    int64_t batch, int tables, int chunks, int64_t id_sample_stride,
                    int64_t id_table_stride, int64_t output_sample_stride,
                    const __grid_constant__ Tables<capacity> description) {
  using Chunk = typename Move::Chunk;
  constexpr int ahead = kSamplesAhead;
  extern __shared__ uint4 memory[];
  const Share<lanes> share(batch, tables);
  if (share.steps == 0 || share.lane >= chunks) return;
  auto* rows_ahead = reinterpret_cast<Chunk*>(memory) + threadIdx.x;  // (ahead, threads)
  auto* ids_ahead = reinterpret_cast<Id*>(reinterpret_cast<Chunk*>(memory) + ahead * kMostThreads) +
                    threadIdx.x;  // the same
  const int64_t rows = description.rows[share.table], pitch = description.pitch[share.table];
  const int64_t address = description.address[share.table] + share.lane * sizeof(Chunk);
  const int64_t id_step = share.step * id_sample_stride;
  const int64_t output_step = share.step * output_sample_stride;
  ids += share.first * id_sample_stride + share.table * id_table_stride;
  output += share.first * output_sample_stride + static_cast<int64_t>(share.table) * chunks +
            share.lane;
  const auto fetch_id = [&](int slot) {
    copy_ahead<sizeof(Id), false>(ids_ahead + slot * kMostThreads, ids);
    ids += id_step;
  };
  const auto fetch_row = [&](int slot) {
    const int64_t row = checked_row_of<rule>(ids_ahead[slot * kMostThreads], rows);
    if (row >= 0) {
      copy_ahead<sizeof(Chunk), false>(
          rows_ahead + slot * kMostThreads, reinterpret_cast<const void*>(address + row * pitch));
    } else {
      rows_ahead[slot * kMostThreads] = Chunk{};
    }
  };

#pragma unroll
  for (int slot = 0; slot < ahead; ++slot) {
    if (slot < share.steps) fetch_id(slot);
  }
  end_of_copies();
  wait_for_copies<0>();
#pragma unroll
  for (int slot = 0; slot < ahead; ++slot) {
    if (slot < share.steps) fetch_row(slot);
    if (slot + ahead < share.steps) fetch_id(slot);
    end_of_copies();
  }
  for (int begin = 0; begin < share.steps; begin += ahead) {
#pragma unroll
    for (int slot = 0; slot < ahead; ++slot) {
      const int left = share.steps - begin - slot;
      if (left <= 0) return;
      wait_for_copies<ahead - 1>();
      *output = Move::of(rows_ahead[slot * kMostThreads]);
      output += output_step;
      if (left > ahead) fetch_row(slot);
      if (left > 2 * ahead) fetch_id(slot);
      end_of_copies();
    }
  }
}

// ---------------------------------------------------------------------------- atomics on global memory

// Adds by an instruction that names global memory: atomicAdd on an address that is an integer in
// the source is one on generic memory, and returns a value. In float32 it takes what lies there for
// 0 if that is subnormal, so nothing is added where `x` is 0: an element without a gradient stays.
__device__ __forceinline__ void reduce_add(float* to, float x) {
  if (x == 0) return;
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "f"(x));
}
__device__ __forceinline__ void reduce_add(double* to, double x) {
  asm volatile("red.global.add.f64 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "d"(x));
}
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void reduce_add(float* to, float x, float y, float z, float w) {
  if (x == 0 || y == 0 || z == 0 || w == 0) {
    const float terms[] = {x, y, z, w};
#pragma unroll
    for (int i = 0; i < 4; ++i) reduce_add(to + i, terms[i]);
    return;
  }
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(
                   __cvta_generic_to_global(to)),
               "f"(x), "f"(y), "f"(z), "f"(w));
}
#endif

// ---------------------------------------------------------------------------- rows in registers

// A row in `tiles` vectors of each of `lanes` threads: columns (tile * lanes + lane) * vector on.
template <class Element, int vector, int lanes, int tiles>
struct Row {
  static constexpr int kLanes = lanes;
  Compute<Element> at[tiles][vector];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
      for (int i = 0; i < vector; ++i) at[tile][i] = 0;
    }
  }

  // Loads a row of Stored, which is Element or, for partial sums, the arithmetic type.
  template <class Stored>
  __device__ __forceinline__ void load(const Stored* row, int width) {
    const int lane = threadIdx.x % lanes;
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
      const int column = (tile * lanes + lane) * vector;
      if (column < width) {
        const auto packed = *reinterpret_cast<const Vector<Stored, vector>*>(row + column);
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
  __device__ __forceinline__ void add(const Row& other, Compute<Element> factor = 1) {
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
      for (int i = 0; i < vector; ++i) at[tile][i] += factor * other.at[tile][i];
    }
  }

  // row += factor * this, by atomics: four floats at once from sm_90 on.
  __device__ __forceinline__ void add_to(Element* row, int width, Element factor) const {
    const int lane = threadIdx.x % lanes;
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
      const int column = (tile * lanes + lane) * vector;
      if (column >= width) continue;
#if __CUDA_ARCH__ >= 900
      if constexpr (sizeof(Element) == 4 && vector == 4) {
        reduce_add(row + column, factor * at[tile][0], factor * at[tile][1], factor * at[tile][2],
                   factor * at[tile][3]);
        continue;
      }
#endif
#pragma unroll
      for (int i = 0; i < vector; ++i) reduce_add(row + column + i, factor * at[tile][i]);
    }
  }

  // Adds to a row in shared memory.
  __device__ __forceinline__ void add_to_shared(Compute<Element>* row, int width) const {
    const int lane = threadIdx.x % lanes;
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
      const int column = (tile * lanes + lane) * vector;
      if (column >= width) continue;
#pragma unroll
      for (int i = 0; i < vector; ++i) atomicAdd(row + column + i, at[tile][i]);
    }
  }

  __device__ __forceinline__ bool any() const {
    bool found = false;
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
      for (int i = 0; i < vector; ++i) found |= at[tile][i] != 0;
    }
    return found;
  }

  // Returns the sum of squares over the whole row, the same in all its lanes.
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

  // Returns the values of the lane `step` further on in the warp.
  __device__ __forceinline__ Row of_lane_behind(int step) const {
    Row other;
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
      for (int i = 0; i < vector; ++i) {
        other.at[tile][i] = __shfl_down_sync(0xffffffffu, at[tile][i], step);
      }
    }
    return other;
  }

  // Adds the rows of a warp's groups; every group gets the same sum.
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

// Returns the mask of the threads of a warp that share this thread's row.
template <int lanes>
__device__ __forceinline__ unsigned lanes_mask() {
  if constexpr (lanes == 32) return 0xffffffffu;
  return ((1u << lanes) - 1) << (threadIdx.x % 32 / lanes * lanes);
}

// The numbers of an optimizer's step besides the gradient. A number in device memory (which may
// change between replays of a captured graph) is passed as a pointer.
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

// Walks `count` gradients and flushes the sum of each run of equal rows except the last, which
// stays in `sum`; returns that row, or -1 for none. `fetch(place, value)` loads one gradient and
// returns its row, or -1 for none; `flush(sum, row)` stores a sum.
template <int ahead, class Values, class Fetch, class Flush>
__device__ __forceinline__ int add_runs(int count, Values& sum, Fetch fetch, Flush flush) {
  sum.clear();
  int current = -1;
  for (int i = 0; i < count; i += ahead) {
    Values value[ahead];
    int row[ahead];
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
  return current;
}

// Adds the values of a warp's groups with equal rows, which are neighbours, in a tree. Returns true
// in the groups that then have a row's sum.
template <class Values>
__device__ __forceinline__ bool join_groups(Values& sum, int row) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = Values::kLanes; step < 32; step *= 2) {
    const Values next = sum.of_lane_behind(step);
    if (__shfl_down_sync(0xffffffffu, row, step) == row && lane + step < 32) sum.add(next);
  }
  const int before = __shfl_up_sync(0xffffffffu, row, Values::kLanes);
  return row >= 0 && (lane < Values::kLanes || before != row);
}

// Computes the exclusive prefix sum of kThreads counts, in place.
__device__ __forceinline__ void scan(int (&counts)[kThreads]) {
  __shared__ int warp_totals[kThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = counts[threadIdx.x];
  int inclusive = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int lower = __shfl_up_sync(0xffffffffu, inclusive, step);
    if (lane >= step) inclusive += lower;
  }
  if (lane == 31) warp_totals[warp] = inclusive;
  __syncthreads();
  int before = inclusive - own;
  for (int other = 0; other < warp; ++other) before += warp_totals[other];
  counts[threadIdx.x] = before;
  __syncthreads();
}

// The samples of a block of scatter, and the rows of its table.
template <class Values, class Element, class Gradient, class Id, Rule rule>
struct Block {
  const Id* ids;  // of the block's first sample, as grads
  const Gradient* grads;
  int64_t id_stride, grad_stride;
  int count;  // of samples
  int width;
  int64_t rows, address, pitch;
  Element factor;

  __device__ __forceinline__ Id id(int sample) const { return ids[sample * id_stride]; }
  __device__ __forceinline__ void load(Values& value, int sample) const {
    value.load(grads + sample * grad_stride, width);
  }
  __device__ __forceinline__ int64_t row_of(Id id) const { return checked_row_of<rule>(id, rows); }
  __device__ __forceinline__ Element* row(int64_t row) const {
    return reinterpret_cast<Element*>(address + row * pitch);
  }
  __device__ __forceinline__ void add(const Values& sum, int64_t to) const {
    sum.add_to(row(to), width, factor);
  }
};

// Adds every gradient to its row; the gradient is loaded together with its id.
template <int ahead, class Values, class Element, class Gradient, class Id, Rule rule>
__device__ __forceinline__ void add_each(
    const Block<Values, Element, Gradient, Id, rule>& block) {
  constexpr int groups = kThreads / Values::kLanes;
#pragma unroll 1
  for (int i = threadIdx.x / Values::kLanes; i < block.count; i += ahead * groups) {
    Values value[ahead];
    Id id[ahead];
#pragma unroll
    for (int j = 0; j < ahead; ++j) {
      if (i + j * groups >= block.count) continue;
      id[j] = block.id(i + j * groups);
      block.load(value[j], i + j * groups);
    }
#pragma unroll
    for (int j = 0; j < ahead; ++j) {
      if (i + j * groups >= block.count) continue;
      const int64_t row = block.row_of(id[j]);
      if (row >= 0) block.add(value[j], row);
    }
  }
}

// Adds the sums of the samples, sorted by row, to the rows, of which there are fewer than kThreads:
// a thread sorts one sample, and a group of lanes adds as many samples as it has lanes. Gradients
// of up to 32 KB are loaded together with their ids and wait in shared memory until those are
// sorted; larger ones are read in sorted order.
template <int columns, int ahead, class Values, class Element, class Gradient, class Id, Rule rule>
__device__ __forceinline__ void add_sorted(
    const Block<Values, Element, Gradient, Id, rule>& block) {
  constexpr int piece = Values::kLanes, groups = kThreads / piece;
  constexpr bool staged = kThreads * columns * sizeof(Element) <= 32768;
  __shared__ int rows_of_samples[kThreads], places[kThreads];
  __shared__ unsigned char order[kThreads];
  __shared__ Element sums[kSums];
  __shared__ alignas(16) Element stage[staged ? kThreads * columns : 1];
  const int rows = static_cast<int>(block.rows), width = block.width;
  const int group = threadIdx.x / piece, own = threadIdx.x;
  const Id id = own < block.count ? block.id(own) : Id(0);
  Values value[staged ? piece : 1];
  if constexpr (staged) {
#pragma unroll
    for (int i = 0; i < piece; ++i) {
      if (group + i * groups < block.count) block.load(value[i], group + i * groups);
    }
  }
  const bool few = rows * width <= kSums;
  places[own] = 0;
  for (int i = own; few && i < rows * width; i += kThreads) sums[i] = 0;
  __syncthreads();
  const int own_row = own < block.count ? static_cast<int>(block.row_of(id)) : -1;
  rows_of_samples[own] = own_row;
  const int rank = atomicAdd(&places[own_row < 0 ? rows : own_row], 1);
  __syncthreads();
  scan(places);
  order[places[own_row < 0 ? rows : own_row] + rank] = static_cast<unsigned char>(own);
  if constexpr (staged) {
#pragma unroll
    for (int i = 0; i < piece; ++i) {
      const int sample = group + i * groups;
      if (sample < block.count) value[i].store(stage + sample * columns, width);
    }
  }
  __syncthreads();

  Values sum;
  const auto flush = [&](const Values& some, int row) {
    if (few) {
      some.add_to_shared(sums + row * width, width);
    } else {
      block.add(some, row);
    }
  };
  const int last = add_runs<ahead>(
      piece, sum,
      [&](int place, Values& loaded) {
        const int sample = order[group * piece + place], row = rows_of_samples[sample];
        if (row < 0) return row;
        if constexpr (staged) {
          loaded.load(stage + sample * columns, width);
        } else {
          block.load(loaded, sample);
        }
        return row;
      },
      flush);
  if (join_groups(sum, last)) flush(sum, last);
  if (!few) return;
  __syncthreads();
  for (int i = threadIdx.x; i < rows * width; i += kThreads) {
    const int row = i / width;
    if (places[row] == places[row + 1]) continue;
    reduce_add(block.row(row) + (i - row * width), block.factor * sums[i]);
  }
}

template <class Element, class Gradient, class Id, Rule rule, Update update, int vector, int lanes,
          int tiles, int capacity>
__global__ void __launch_bounds__(kThreads, kBlocks<vector, tiles>)
    scatter(const Id* __restrict__ ids, const Gradient* __restrict__ grad_output, int64_t batch,
            int tables, int width, int64_t id_sample_stride, int64_t id_table_stride,
            int64_t grad_sample_stride, int64_t grad_table_stride,
            const Element* learning_rate_tensor, Element learning_rate,
            const __grid_constant__ Tables<capacity> description) {
  const int table = blockIdx.x % tables;
  const int64_t first = static_cast<int64_t>(blockIdx.x / tables) * kThreads;
  if (description.address[table] == 0) return;
  const Step<Element> step{learning_rate_tensor, learning_rate, nullptr, 0};
  using Values = Row<Element, vector, lanes, tiles>;
  const Block<Values, Element, Gradient, Id, rule> block{
      ids + first * id_sample_stride + table * id_table_stride,
      grad_output + first * grad_sample_stride + table * grad_table_stride,
      id_sample_stride,
      grad_sample_stride,
      batch - first < kThreads ? static_cast<int>(batch - first) : kThreads,
      width,
      description.rows[table],
      description.address[table],
      description.pitch[table],
      update == Update::gradient ? Element(1) : -step.rate()};
  constexpr int columns = vector * lanes * tiles, ahead = kAhead<vector, tiles>;
  if (block.rows < kThreads) {
    add_sorted<columns, ahead>(block);
  } else {
    add_each<ahead>(block);
  }
}

// Tables of at most `most_rows` rows, `summed` rows together, are summed in shared memory. Each
// place has its own sums, to which only one thread adds. All threads clear them and, in the end,
// add them.
template <class Element, class Gradient, class Id, Rule rule, Update update, int vector, int lanes,
          int capacity>
__global__ void __launch_bounds__(kMostThreads, 1)
    scatter_samples(const Id* __restrict__ ids, const Gradient* __restrict__ grad_output,
                    int64_t batch, int tables, int width, int64_t id_sample_stride,
                    int64_t id_table_stride, int64_t grad_sample_stride,
                    int64_t grad_table_stride, const Element* learning_rate_tensor,
                    Element learning_rate, int most_rows, int summed,
                    const __grid_constant__ Tables<capacity> description) {
  using Values = Row<Element, vector, lanes, 1>;
  constexpr int columns = vector * lanes, ahead = kSamplesAhead;
  extern __shared__ uint4 memory[];
  const Share<lanes> share(batch, tables);
  const int64_t address = description.address[share.table];
  const int64_t rows = description.rows[share.table], pitch = description.pitch[share.table];
  const int steps = address != 0 ? share.steps : 0;
  const bool sums_up = rows <= most_rows;
  const int group = threadIdx.x / lanes, groups = blockDim.x / lanes;
  // (ahead, groups of lanes, columns), (ahead, threads), (summed, to an even number),
  // (places, summed, columns)
  auto* const stage = reinterpret_cast<Gradient*>(memory) + group * columns;
  auto* const all_ids =
      reinterpret_cast<Id*>(reinterpret_cast<Gradient*>(memory) + ahead * kMostThreads * vector);
  auto** const targets = reinterpret_cast<Element**>(all_ids + ahead * kMostThreads);
  auto* const sums = reinterpret_cast<Element*>(targets + (summed + 1) / 2 * 2);
  Id* const ids_ahead = all_ids + threadIdx.x;

  const bool has_columns = share.lane * vector < width;
  const int64_t id_step = share.step * id_sample_stride;
  const int64_t grad_step = share.step * grad_sample_stride;
  ids += share.first * id_sample_stride + share.table * id_table_stride;
  grad_output += share.first * grad_sample_stride + share.table * grad_table_stride +
                 share.lane * vector;
  const auto fetch = [&](int slot) {
    copy_ahead<sizeof(Id), false>(ids_ahead + slot * kMostThreads, ids);
    if (has_columns) {
      copy_ahead<sizeof(Gradient) * vector, true>(
          stage + slot * kMostThreads * vector + share.lane * vector, grad_output);
    }
    ids += id_step;
    grad_output += grad_step;
  };

#pragma unroll
  for (int slot = 0; slot < ahead; ++slot) {
    if (slot < steps) fetch(slot);
    end_of_copies();
  }
  int before = 0;  // the rows of earlier tables that are summed here
  for (int table = 0; table < share.table; ++table) {
    if (description.rows[table] <= most_rows) before += static_cast<int>(description.rows[table]);
  }
  const auto target = [&](int64_t row) {
    return reinterpret_cast<Element*>(address + row * pitch);
  };
  for (int row = share.lane; sums_up && share.place == 0 && row < rows; row += lanes) {
    targets[before + row] = target(row);
  }
  Values value;
  value.clear();
  for (int row = group; row < share.places * summed; row += groups) {
    value.store(sums + row * columns, width);
  }
  __syncthreads();
  Element* const own_sums = sums + (share.place * summed + before) * columns;
  const Step<Element> rate{learning_rate_tensor, learning_rate, nullptr, 0};
  const Element factor = update == Update::gradient ? Element(1) : -rate.rate();

  for (int begin = 0; begin < steps; begin += ahead) {
#pragma unroll
    for (int slot = 0; slot < ahead; ++slot) {
      const int left = steps - begin - slot;
      if (left <= 0) break;
      wait_for_copies<ahead - 1>();
      value.load(stage + slot * kMostThreads * vector, width);
      const int64_t row = checked_row_of<rule>(ids_ahead[slot * kMostThreads], rows);
      if (row >= 0 && sums_up) {
        Element* const to = own_sums + static_cast<int>(row) * columns;
        Values sum;
        sum.load(to, width);
        sum.add(value);
        sum.store(to, width);
      } else if (row >= 0) {
        value.add_to(target(row), width, factor);
      }
      if (left > ahead) fetch(slot);
      end_of_copies();
    }
  }

  __syncthreads();
  for (int row = group; row < summed; row += groups) {
    value.clear();
#pragma unroll 4
    for (int place = 0; place < share.places; ++place) {
      Values sum;
      sum.load(sums + (place * summed + row) * columns, width);
      value.add(sum);
    }
    if (value.any()) value.add_to(targets[row], width, factor);
  }
}

// ---------------------------------------------------------------------------- sorted runs

// A position's key is its row counted through all tables; an ignored id's key is past all rows.
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

// Returns position / tables; if it fits 32 bits, the division takes a third of the instructions.
__device__ __forceinline__ int64_t quotient(int64_t position, int tables) {
  if (position >> 32 == 0) return static_cast<uint32_t>(position) / static_cast<uint32_t>(tables);
  return position / tables;
}

// A row that its whole gradient will change, and its state, loaded before that gradient is known.
template <class Element, Update update, int vector, int lanes, int tiles>
struct Target {
  using Number = Compute<Element>;
  Element* weights = nullptr;
  Number* state;
  Row<Element, vector, lanes, tiles> value;
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

  __device__ __forceinline__ void change(const Row<Element, vector, lanes, tiles>& sum, int width,
                                         const Step<Number>& step) {
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

// The address of a sorted position's gradient, and the row it is for.
template <class Gradient>
struct Place {
  const Gradient* gradient;
  int table;
  int64_t row;
};

// All positions of all tables, sorted in global memory.
template <class Gradient, class Key, int capacity>
struct GlobalRuns {
  const Key* __restrict__ keys;
  const int64_t* __restrict__ order;
  const Gradient* __restrict__ grad_output;
  int64_t positions;
  int tables;
  int64_t none;  // the key of an ignored id
  int64_t grad_sample_stride, grad_table_stride;
  const Tables<capacity>& description;

  __device__ __forceinline__ int64_t key(int64_t i) const { return keys[i]; }
  __device__ __forceinline__ Place<Gradient> at(int64_t i) const {
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
  const uint64_t* keys;
  const Gradient* __restrict__ grads;
  int64_t positions;
  int table;
  int64_t grad_sample_stride;
  const Tables<capacity>& description;
  static constexpr int64_t none = ~uint64_t(0) / kMostSamples;

  __device__ __forceinline__ int64_t key(int64_t i) const { return keys[i] / kMostSamples; }
  __device__ __forceinline__ Place<Gradient> at(int64_t i) const {
    return {grads + keys[i] % kMostSamples * grad_sample_stride, table, key(i)};
  }
};

// Adds, by a group of lanes, the piece-th `run` sorted positions.
template <class Element, Update update, int vector, int lanes, int tiles, int run, class Runs>
__device__ __forceinline__ void reduce_piece(const Runs& runs, int64_t piece,
                                             Compute<Element>* heads, Compute<Element>* tails,
                                             int width, const Step<Compute<Element>>& step) {
  const int64_t begin = piece * run;
  if (begin >= runs.positions) return;
  const int64_t end = begin + run < runs.positions ? begin + run : runs.positions;
  constexpr int ahead = kAhead<vector, tiles>;
  Row<Element, vector, lanes, tiles> sum;
  sum.clear();
  bool began_before = begin > 0 && runs.key(begin - 1) == runs.key(begin);
  bool goes_on = false;
  for (int64_t i = begin; i < end; i += ahead) {
    Row<Element, vector, lanes, tiles> value[ahead];
    Target<Element, update, vector, lanes, tiles> target[ahead];
    bool counts[ahead], ends[ahead];
#pragma unroll
    for (int j = 0; j < ahead; ++j) {
      counts[j] = ends[j] = false;
      if (i + j >= end) continue;
      const int64_t key = runs.key(i + j);
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

// Joins, by one warp, the run that begins in a piece and continues in the next ones.
template <class Element, Update update, int vector, int lanes, int tiles, int run, class Runs>
__device__ __forceinline__ void join_piece(const Runs& runs, int64_t piece,
                                           const Compute<Element>* heads,
                                           const Compute<Element>* tails, int width,
                                           const Step<Compute<Element>>& step) {
  const int64_t begin = piece * run, end = begin + run;
  if (end >= runs.positions) return;
  const int64_t key = runs.key(end - 1), next = runs.key(end);
  const bool began_before = begin > 0 && runs.key(begin - 1) == key;
  if (next != key || key == runs.none || began_before) return;

  // Finds the first piece that the run does not reach. Most runs end within 32 pieces, which the
  // lanes test first; then each step narrows the rest to a 32nd.
  const int lane = threadIdx.x % 32;
  int64_t low = piece + 2, high = (runs.positions - 1) / run + 1;
  for (bool near = true; low < high; near = false) {
    const int64_t stride = near ? 1 : (high - low + 31) / 32, probe = low + lane * stride;
    const bool reached = probe < high && runs.key(probe * run) == key;
    const int count = __popc(__ballot_sync(0xffffffffu, reached));
    if (count < 32 && low + count * stride < high) high = low + count * stride;
    if (count > 0) low += (count - 1) * stride + 1;
  }
  const int64_t pieces = low - piece - 1;
  constexpr int ahead = vector * tiles > 4 ? kAhead<vector, tiles> : 8;
  constexpr int groups = 32 / lanes;
  const int group = lane / lanes;
  Target<Element, update, vector, lanes, tiles> target;
  Row<Element, vector, lanes, tiles> sum;
  if (group == 0) {
    const auto place = runs.at(end - 1);
    target.load(place.table, place.row, width, runs.description);
    sum.load(tails + piece * width, width);
  } else {
    sum.clear();
  }
  for (int64_t i = group; i < pieces; i += groups * ahead) {
    Row<Element, vector, lanes, tiles> value[ahead];
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
  reduce_piece<Element, update, vector, lanes, tiles, run>(
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
  join_piece<Element, update, vector, lanes, tiles, run>(
      runs, piece, heads, tails, width,
      Step<Compute<Element>>{learning_rate_tensor, learning_rate, eps_tensor, eps});
}

// Makes one step of a bitonic sort with the key `stride` places on, which another lane has.
__device__ __forceinline__ void compare_lanes(uint64_t& key, int place, int stride, int length) {
  const uint64_t other = __shfl_xor_sync(0xffffffffu, key, stride);
  const bool keeps_less = ((place & stride) == 0) == ((place & length) == 0);
  if ((other < key) == keeps_less) key = other;
}

// A bitonic sort: with a stride of up to 32 a warp stays within 64 keys, two in each lane's
// registers.
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
  reduce_piece<Element, update, vector, lanes, 1, run>(runs, threadIdx.x / lanes, heads, tails,
                                                       width, step);
  __syncthreads();
  for (int piece = threadIdx.x / 32; piece < groups; piece += threads / 32) {
    join_piece<Element, update, vector, lanes, 1, run>(runs, piece, heads, tails, width, step);
  }
}

// Embedding look-up over many tables, and what its gradient does to them.
//
// A position is one id, sample * tables + table. Rows are moved by `lanes` neighbouring threads, 16
// bytes each where addresses allow, and every thread has several rows in flight: a gather waits for
// memory, not for bandwidth, until enough of them are under way.
//
// look_up: a block owns 256 / lanes * items consecutive positions, so ids are read and vectors
//   written coalesced. Each id is read once, each row once per position, each vector written once.
// scatter: adds gradients to rows by atomics. A block owns `samples` samples of one table; where the
//   table is small, it first sorts them by row in shared memory, so that equal rows become
//   neighbours and most are added up in registers: 1024 samples of a table of 3 rows take 66
//   atomics instead of 1024.
// key_positions, reduce_runs, join_runs: the same in a fixed order, and what Adagrad needs, a row's
//   whole gradient. Positions are sorted by row (between the first two); a group of lanes adds up
//   kRun sorted positions and writes every row that lies within them. The rest, runs of one row that
//   cross such a border, are partial sums of which join_runs makes one, in an order that depends on
//   their number alone. No row is read or written by two groups.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../indices/device_assert.cuh"
#include "tables.h"

constexpr int kThreads = 256;
constexpr int kRun = 32;     // sorted positions per group of lanes
constexpr int kSmall = 1024; // a table of fewer rows is sorted in shared memory

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

template <class Element, int vector>
struct alignas(sizeof(Element) * vector < 16 ? sizeof(Element) * vector : 16) Vector {
  Element at[vector];
};

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

template <class Chunk, class Id, Rule rule, int lanes, int items, int capacity, class Index>
__global__ void __launch_bounds__(kThreads)
    look_up(const Id* __restrict__ ids, Chunk* __restrict__ output, int64_t positions, int tables,
            int chunks, int64_t id_sample_stride, int64_t id_table_stride,
            int64_t output_sample_stride, const __grid_constant__ Tables<capacity> description) {
  __shared__ int64_t address[capacity], pitch[capacity], rows[capacity];
  share(description.address, address, tables);
  share(description.pitch, pitch, tables);
  share(description.rows, rows, tables);
  __syncthreads();
  constexpr int groups = kThreads / lanes;
  const int lane = threadIdx.x % lanes;
  const Index first = static_cast<Index>(blockIdx.x) * (groups * items) + threadIdx.x / lanes;
  int64_t id[items];
  int table[items];
  Chunk* target[items];
#pragma unroll
  for (int item = 0; item < items; ++item) {
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
  const Chunk* source[items];
#pragma unroll
  for (int item = 0; item < items; ++item) {
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
    Chunk value[items];
#pragma unroll
    for (int item = 0; item < items; ++item) {
      value[item] = source[item] != nullptr ? __ldg(source[item] + chunk) : Chunk{};
    }
#pragma unroll
    for (int item = 0; item < items; ++item) {
      if (target[item] != nullptr) target[item][chunk] = value[item];
    }
  }
}

// ---------------------------------------------------------------------------- rows in registers

// `tiles` vectors of each of `lanes` threads: columns (tile * lanes + lane) * vector and on.
template <class Element, int vector, int lanes, int tiles>
struct Row {
  Compute<Element> at[tiles][vector];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
      for (int i = 0; i < vector; ++i) at[tile][i] = 0;
    }
  }

  // Of a row of Stored, which is Element or, for partial sums, what it is computed in.
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
        atomicAdd(reinterpret_cast<float4*>(row + column),
                  make_float4(factor * at[tile][0], factor * at[tile][1], factor * at[tile][2],
                              factor * at[tile][3]));
        continue;
      }
#endif
#pragma unroll
      for (int i = 0; i < vector; ++i) atomicAdd(row + column + i, factor * at[tile][i]);
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

template <class Element, class Id, Rule rule, Update update, int vector, int lanes, int tiles,
          int samples, int capacity>
__global__ void __launch_bounds__(kThreads)
    scatter(const Id* __restrict__ ids, const Element* __restrict__ grad_output, int64_t batch,
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
  constexpr int each = samples / kThreads;
  int rank[each];
#pragma unroll
  for (int i = 0; i < each; ++i) {
    const int sample = threadIdx.x + i * kThreads;
    int64_t row = -1;
    if (first + sample < batch) {
      row = checked_row_of<rule>(
          ids[(first + sample) * id_sample_stride + table * id_table_stride], rows);
    }
    rows_of_samples[sample] = row;
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

  const Step<Element> step{learning_rate_tensor, learning_rate, nullptr, 0};
  const Element factor = update == Update::gradient ? Element(1) : -step.rate();
  constexpr int ahead = kAhead<vector, tiles>;
  constexpr int piece = samples * lanes / kThreads;
  const int begin = threadIdx.x / lanes * piece;
  const Element* grads = grad_output + first * grad_sample_stride + table * grad_table_stride;
  auto* weights = reinterpret_cast<char*>(description.address[table]);
  Row<Element, vector, lanes, tiles> sum;
  sum.clear();
  int64_t current = -1;
  for (int i = 0; i < piece; i += ahead) {
    Row<Element, vector, lanes, tiles> value[ahead];
    int64_t row[ahead];
#pragma unroll
    for (int j = 0; j < ahead; ++j) {
      row[j] = -1;
      if (i + j < piece) {
        const int sample = small ? order[begin + i + j] : begin + i + j;
        row[j] = rows_of_samples[sample];
        if (row[j] >= 0) value[j].load(grads + sample * grad_sample_stride, width);
      }
    }
#pragma unroll
    for (int j = 0; j < ahead; ++j) {
      if (row[j] < 0) continue;
      if (row[j] != current) {
        if (current >= 0) {
          auto* target = weights + current * description.pitch[table];
          sum.add_to(reinterpret_cast<Element*>(target), width, factor);
        }
        sum.clear();
        current = row[j];
      }
      sum.add(value[j]);
    }
  }
  if (current >= 0) {
    auto* target = weights + current * description.pitch[table];
    sum.add_to(reinterpret_cast<Element*>(target), width, factor);
  }
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

// Does to one row of one table what its whole gradient asks for.
template <class Element, Update update, int vector, int lanes, int tiles, int capacity>
__device__ __forceinline__ void apply(const Row<Element, vector, lanes, tiles>& sum, int64_t key,
                                      int table, int width, const Step<Compute<Element>>& step,
                                      const Tables<capacity>& description) {
  using Number = Compute<Element>;
  if (description.address[table] == 0) return;
  const int64_t row = key - description.first[table];
  auto* weights =
      reinterpret_cast<Element*>(description.address[table] + row * description.pitch[table]);
  if constexpr (update == Update::gradient) {
    sum.store(weights, width);
    return;
  }
  Number factor = step.rate();
  if constexpr (update == Update::rowwise_adagrad) {
    auto* state = reinterpret_cast<Number*>(description.state[table]) + row;
    const unsigned mask = lanes_mask<lanes>();
    const Number total = *state + sum.squares(mask) / width;
    __syncwarp(mask);  // every lane has read the state before it changes
    if (threadIdx.x % lanes == 0) *state = total;
    factor /= sqrt(total) + step.eps();
  }
  Row<Element, vector, lanes, tiles> value;
  value.load(weights, width);
  value.add(sum, -factor);
  value.store(weights, width);
}

template <class Element, class Key, Update update, int vector, int lanes, int tiles, int capacity>
__global__ void __launch_bounds__(kThreads)
    reduce_runs(const Key* __restrict__ keys, const int64_t* __restrict__ order,
                const Element* __restrict__ grad_output, Compute<Element>* __restrict__ heads,
                Compute<Element>* __restrict__ tails, int64_t positions, int tables, int width,
                int64_t all_rows, int64_t grad_sample_stride, int64_t grad_table_stride,
                const Compute<Element>* learning_rate_tensor, Compute<Element> learning_rate,
                const Compute<Element>* eps_tensor, Compute<Element> eps,
                const __grid_constant__ Tables<capacity> description) {
  const Step<Compute<Element>> step{learning_rate_tensor, learning_rate, eps_tensor, eps};
  const int64_t piece = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / lanes;
  const int64_t begin = piece * kRun;
  if (begin >= positions) return;
  const int64_t end = begin + kRun < positions ? begin + kRun : positions;

  constexpr int ahead = kAhead<vector, tiles>;
  Row<Element, vector, lanes, tiles> sum;
  sum.clear();
  Key current = keys[begin];
  int table = 0;
  bool began_before = begin > 0 && keys[begin - 1] == current;
  const auto finish = [&](bool goes_on) {
    if (current == all_rows) return;
    if (began_before) {
      sum.store(heads + piece * width, width);
    } else if (goes_on) {
      sum.store(tails + piece * width, width);
    } else {
      apply<Element, update>(sum, current, table, width, step, description);
    }
  };
  for (int64_t i = begin; i < end; i += ahead) {
    Row<Element, vector, lanes, tiles> value[ahead];
    Key key[ahead];
    int of_table[ahead];
#pragma unroll
    for (int j = 0; j < ahead; ++j) {
      if (i + j < end) {
        key[j] = keys[i + j];
        const int64_t position = order[i + j];
        const int64_t sample = position / tables;
        of_table[j] = static_cast<int>(position - sample * tables);
        value[j].load(grad_output + sample * grad_sample_stride + of_table[j] * grad_table_stride,
                      width);
      }
    }
#pragma unroll
    for (int j = 0; j < ahead; ++j) {
      if (i + j < end) {
        if (key[j] != current) {
          finish(false);
          began_before = false;
          sum.clear();
          current = key[j];
        }
        table = of_table[j];
        sum.add(value[j]);
      }
    }
  }
  finish(end < positions && keys[end] == current);
}

// One warp per piece: joins the run that begins in it and goes on in the next ones.
template <class Element, class Key, Update update, int vector, int lanes, int tiles, int capacity>
__global__ void __launch_bounds__(kThreads)
    join_runs(const Key* __restrict__ keys, const int64_t* __restrict__ order,
              const Compute<Element>* __restrict__ heads,
              const Compute<Element>* __restrict__ tails, int64_t positions, int tables, int width,
              int64_t all_rows, const Compute<Element>* learning_rate_tensor,
              Compute<Element> learning_rate, const Compute<Element>* eps_tensor,
              Compute<Element> eps,
              const __grid_constant__ Tables<capacity> description) {
  const Step<Compute<Element>> step{learning_rate_tensor, learning_rate, eps_tensor, eps};
  const int64_t piece = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  const int64_t begin = piece * kRun, end = begin + kRun;
  if (end >= positions) return;
  const Key key = keys[end - 1];
  if (keys[end] != key || key == all_rows) return;
  if (begin > 0 && keys[begin - 1] == key) return;

  int64_t low = end, high = positions;  // the run's end: the first larger key
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (keys[middle] == key) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  constexpr int ahead = kAhead<vector, tiles>;
  const int64_t pieces = (low - 1) / kRun - piece;
  constexpr int groups = 32 / lanes;
  const int group = threadIdx.x % 32 / lanes;
  Row<Element, vector, lanes, tiles> sum;
  if (group == 0) {
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
  if (group == 0) {
    const int table = static_cast<int>(order[end - 1] % tables);
    apply<Element, update>(sum, key, table, width, step, description);
  }
}

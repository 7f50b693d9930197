// act(input Wᵀ + b) in 16-bit floats on Hopper's warpgroup matrix instructions (sm_90a only).
//
// Blocks stay on their multiprocessor and walk tiles of 128 x tile_columns of the output. One of
// three warp groups loads: one thread of it lets the copy engine fill a ring of `stages` slots,
// each 64 deep, with 128 rows of input and tile_columns rows of weight, zero beyond their edges.
// The other two own 64 rows each. They multiply (wgmma m64nNk16, float32 accumulators in
// registers), add the bias and apply the activation in float32, round once, and store from their
// registers. That waits for nothing and leaves the ring all shared memory; stores by the copy
// engine were slower (H200). The ring is filled on while they finish a tile. A full and an empty
// mbarrier per slot hand it over.
//
// The blocks of a cluster take tiles below each other. Each block loads its part of the weights,
// and the copy engine sends it to all of them, which divides the weights' traffic from L2 by their
// number.
//
// An element of input is read columns / tile_columns times, one of weight rows / (128 * cluster)
// times, mostly from L2; the output is written once.
//
// Rows in shared memory are 128 bytes, swizzled by the copy engine: 16-byte word j of row r is
// stored at j ^ (r % 8), as the matrix unit expects; every array is aligned to 1024 bytes.

#include "../_shared/cuda_vectors.h"
#include "../_shared/rounded_activations.h"
#include "../_shared/hopper.h"

constexpr int tile_rows = 128, tile_depth = 64;
constexpr int multipliers = 2;  // warp groups that multiply, 64 rows each
constexpr int threads = 128 * (1 + multipliers);

// Computes sum (64 x columns) = a (64 x 16) bᵀ (columns x 16), plus sum if `adds`; multiply_across
// reads b as (16 x columns). Accumulator 4 j + 2 h + i of thread (g, t) = (lane / 4, lane % 4) of
// warp w is row 16 w + g + 8 h, column 8 j + 2 t + i.
#define FUSELAB_MULTIPLY(function, columns, across, type, element, names, a_name, b_name,     \
                         adds_name, ...)                                                     \
  FUSELAB_INLINE void function(float (&sum)[columns / 2], uint64_t a, uint64_t b, int adds,  \
                               element) {                                                    \
    asm volatile(                                                                            \
        "{\n.reg .pred p;\nsetp.ne.b32 p, " adds_name ", 0;\n"                               \
        "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " {" names     \
        "}, " a_name ", " b_name ", p, 1, 1, 0, " #across ";\n}"                             \
        : __VA_ARGS__                                                                        \
        : "l"(a), "l"(b), "r"(adds));                                                        \
  }
#define FUSELAB_MULTIPLY_WIDTHS(function, across, type, element)                             \
  FUSELAB_MULTIPLY(function, 64, across, type, element, FUSELAB_NAMES_32, "%32", "%33",      \
                   "%34", FUSELAB_SUMS_32(0))                                                \
  FUSELAB_MULTIPLY(function, 128, across, type, element, FUSELAB_NAMES_64, "%64", "%65",     \
                   "%66", FUSELAB_SUMS_32(0), FUSELAB_SUMS_32(32))                           \
  FUSELAB_MULTIPLY(function, 256, across, type, element, FUSELAB_NAMES_128, "%128", "%129",  \
                   "%130", FUSELAB_SUMS_32(0), FUSELAB_SUMS_32(32), FUSELAB_SUMS_32(64),     \
                   FUSELAB_SUMS_32(96))
#define FUSELAB_MULTIPLY_ALL(type, element)              \
  FUSELAB_MULTIPLY_WIDTHS(multiply, 0, type, element)    \
  FUSELAB_MULTIPLY_WIDTHS(multiply_across, 1, type, element)
FUSELAB_MULTIPLY_ALL("f16", __half)
FUSELAB_MULTIPLY_ALL("bf16", __nv_bfloat16)

// The layout of a block's shared memory, in bytes from its first multiple of 1024. shared_bytes of
// wgmma_launch.py computes the same.
template <int tile_columns, int stages>
struct Shared {
  static constexpr int input_bytes = tile_rows * tile_depth * 2;
  static constexpr int stage_bytes = input_bytes + tile_columns * tile_depth * 2;
  static constexpr int bias = stages * stage_bytes;  // one per warp group
  static constexpr int full = bias + multipliers * tile_columns * 2;
  static constexpr int empty = full + stages * 8;
};

// The tiles, in an order in which neighbours share their operands in L2: down `height` clusters,
// then across. Their number fits an int, because 2^31 tiles would be 256 GB of output or more. A
// 64-bit division would be a subroutine that needs more registers than the loading role has (seen
// in SASS).
template <int tile_columns, int cluster>
struct Tiles {
  int count, down, across;
  FUSELAB_INLINE Tiles(int rows, int columns) {
    down = (rows - 1) / (tile_rows * cluster) + 1;
    across = (columns - 1) / tile_columns + 1;
    count = down * across;
  }
  FUSELAB_INLINE void locate(int tile, uint32_t rank, int& row, int& column) const {
    constexpr int height = 16 / cluster;
    const int in_group = height * across;
    const int first = tile / in_group * height;
    const int tall = min(height, down - first);
    const int place = tile % in_group;
    row = ((first + place % tall) * cluster + int(rank)) * tile_rows;
    column = place / tall * tile_columns;
  }
};

// Returns two neighbours of a row with bias and activation, rounded, in one word.
template <class Activation, class Element>
FUSELAB_INLINE uint32_t finished(const float* pair, const Element* added) {
  const uint32_t added_pair = *reinterpret_cast<const uint32_t*>(added);
  Element result[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float bias = widened<float>(reinterpret_cast<const Element*>(&added_pair)[i]);
    assign(result[i], activated<Activation, Element>(pair[i] + bias));
  }
  return uint32_t(*reinterpret_cast<const uint16_t*>(&result[0])) |
         uint32_t(*reinterpret_cast<const uint16_t*>(&result[1])) << 16;
}

// Stores 64 rows from (row, column) on, by the warp group that has their sums. packed: columns are
// a multiple of 8. Then four threads, which have 4 bytes each of every 16 of a row, exchange them,
// and each stores 16 bytes.
template <class Activation, class Element, bool packed, int count>
FUSELAB_INLINE void write_rows(const float (&sum)[count], const Element* added,
                               Element* __restrict__ output, int row, int column, int rows,
                               int columns) {
  const int thread = threadIdx.x % 128, t = thread % 4;
  const int64_t own_row = row + thread / 32 * 16 + thread % 32 / 4;  // and own_row + 8
#pragma unroll
  for (int first = 0; first < count / 4; first += 4) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t word[4];  // columns 2 t and the next of each of 4 times 8
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        word[j] = finished<Activation, Element>(sum + (first + j) * 4 + half * 2,
                                                added + (first + j) * 8 + 2 * t);
      }
      const int64_t to = own_row + half * 8;
      Element* const line = output + to * columns;
      if constexpr (packed) {
        // Transposes the 4 x 4 words of four threads: each pair of threads, then the pairs.
#pragma unroll
        for (int apart = 1; apart < 4; apart *= 2) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            if (j & apart) continue;
            uint32_t& other = word[j | apart];
            const uint32_t given = t & apart ? word[j] : other;
            const uint32_t taken = __shfl_xor_sync(~0u, given, apart);
            if (t & apart) {
              word[j] = taken;
            } else {
              other = taken;
            }
          }
        }
        const int at = column + (first + t) * 8;
        if (to < rows && at < columns) {
          *reinterpret_cast<uint4*>(line + at) = make_uint4(word[0], word[1], word[2], word[3]);
        }
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int at = column + (first + j) * 8 + 2 * t + i;
            if (to < rows && at < columns) {
              line[at] = reinterpret_cast<const Element*>(&word[j])[i];
            }
          }
        }
      }
    }
  }
}

// packed: see above. adapts: up to 64 further columns of input and weight are in separate matrices,
// padded with zeros; across: weights are stored as (depth, columns). Both are used by lora_linear.
template <class Activation, class Element, int tile_columns, int stages, int cluster, bool packed,
          bool adapts, bool across>
FUSELAB_INLINE void multiply_tiles(const TensorMap& input_map, const TensorMap& weight_map,
                                   const TensorMap& further_input_map,
                                   const TensorMap& further_weight_map,
                                   const Element* __restrict__ bias, Element* __restrict__ output,
                                   int rows, int columns, int depth, int64_t bias_stride) {
  using Layout = Shared<tile_columns, stages>;
  extern __shared__ uint8_t unaligned[];
  const uint32_t shared = (shared_address(unaligned) + 1023) / 1024 * 1024;
  uint8_t* const bytes = unaligned + (shared - shared_address(unaligned));
  const uint32_t rank = cluster == 1 ? 0 : cluster_rank();
  const int group = threadIdx.x / 128;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < stages; ++stage) {
      barrier_init(shared + Layout::full + stage * 8, 1);
      barrier_init(shared + Layout::empty + stage * 8, multipliers * 4 * cluster);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  if constexpr (cluster > 1) cluster_sync();

  const Tiles<tile_columns, cluster> tiles(rows, columns);
  const int steps = (depth - 1) / tile_depth + 1 + adapts;
  const int begin = blockIdx.x / cluster, stride = gridDim.x / cluster;
  Slot<stages> slot;
  // 40 * 128 + 232 * 256 registers are the 168 * 384 with which the block starts.
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      for (int tile = begin; tile < tiles.count; tile += stride) {
        int row, column;
        tiles.locate(tile, rank, row, column);
        for (int step = 0; step < steps; ++step, slot.next()) {
          const uint32_t full = shared + Layout::full + slot.at * 8;
          const uint32_t to = shared + slot.at * Layout::stage_bytes;
          const bool further = adapts && step == steps - 1;
          const TensorMap& left = further ? further_input_map : input_map;
          const TensorMap& right = further ? further_weight_map : weight_map;
          const int at = further ? 0 : step * tile_depth;
          // The slots begin empty: for a new barrier, the phase before the first counts as over.
          wait(shared + Layout::empty + slot.at * 8, slot.parity ^ 1);
          expect_bytes(full, Layout::stage_bytes);
          copy_in(to, left, at, row, full);
          if constexpr (across) {
            constexpr int boxes = tile_columns / 64 / cluster;
#pragma unroll
            for (int i = 0; i < boxes; ++i) {
              const int box = int(rank) * boxes + i;
              const uint32_t place = to + Layout::input_bytes + box * box_bytes;
              if constexpr (cluster == 1) {
                copy_in(place, right, column + box * 64, at, full);
              } else {
                copy_in_all<cluster>(place, right, column + box * 64, at, full);
              }
            }
          } else if constexpr (cluster == 1) {
            copy_in(to + Layout::input_bytes, right, at, column, full);
          } else {
            const int part = int(rank) * (tile_columns / cluster);
            copy_in_all<cluster>(to + Layout::input_bytes + part * tile_depth * 2, right, at,
                                 column + part, full);
          }
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int multiplier = group - 1, thread = threadIdx.x % 128;
    Element* const added = reinterpret_cast<Element*>(bytes + Layout::bias) +
                           multiplier * tile_columns;
    // The first threads of each warp release a slot, each in one block of the cluster.
    const int lane = thread % 32;
    const bool releases = lane < cluster;
    int added_column = -1;
    for (int tile = begin; tile < tiles.count; tile += stride) {
      int row, column;
      tiles.locate(tile, rank, row, column);
      row += multiplier * 64;
      if (column != added_column) {
        group_sync(multiplier);
        for (int i = thread; i < tile_columns; i += 128) {
          const bool inside = bias != nullptr && column + i < columns;
          added[i] = inside ? __ldg(bias + (column + i) * bias_stride) : Element(0.0f);
        }
        group_sync(multiplier);
        added_column = column;
      }
      float sum[tile_columns / 2];
      int previous = 0;
      for (int step = 0; step < steps; ++step, slot.next()) {
        wait(shared + Layout::full + slot.at * 8, slot.parity);
        const uint32_t from = shared + slot.at * Layout::stage_bytes;
        const uint64_t a = descriptor(from + multiplier * 64 * tile_depth * 2);
        const uint64_t b = across ? across_descriptor(from + Layout::input_bytes)
                                  : descriptor(from + Layout::input_bytes);
        hold(sum);
        multiply_fence();
#pragma unroll
        for (int k = 0; k < tile_depth / 16; ++k) {
          if constexpr (across) {
            multiply_across(sum, a + 2 * k, b + 128 * k, step + k != 0, Element(0.0f));
          } else {
            multiply(sum, a + 2 * k, b + 2 * k, step + k != 0, Element(0.0f));
          }
        }
        multiply_commit();
        hold(sum);
        // This step continues while the step before is known to be done with its slot.
        multiply_wait<1>();
        if (step > 0 && releases) {
          arrive<cluster>(shared + Layout::empty + previous * 8, rank ^ lane);
        }
        previous = slot.at;
      }
      multiply_wait<0>();
      hold(sum);
      if (releases) arrive<cluster>(shared + Layout::empty + previous * 8, rank ^ lane);
      write_rows<Activation, Element, packed>(sum, added, output, row, column, rows, columns);
    }
  }
  // Another block may still arrive on this block's barriers.
  if constexpr (cluster > 1) cluster_sync();
}

template <class Activation, class Element, int tile_columns, int stages, int cluster, bool packed>
__global__ void __cluster_dims__(cluster, 1, 1) __launch_bounds__(threads, 1)
    forward(const __grid_constant__ TensorMap input_map,
            const __grid_constant__ TensorMap weight_map, const Element* __restrict__ bias,
            Element* __restrict__ output, int rows, int columns, int depth, int64_t bias_stride) {
  multiply_tiles<Activation, Element, tile_columns, stages, cluster, packed, false, false>(
      input_map, weight_map, input_map, weight_map, bias, output, rows, columns, depth, bias_stride);
}

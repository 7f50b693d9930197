// act(input Wᵀ + b) in 16-bit floats on Hopper's matrix unit (sm_90a only), for many rows and a
// weight of which tile_columns rows fit shared memory beside the ring (up to 128 KB).
//
// A block loads its rows of weight once and streams 128 rows of input after the other through the
// ring, 64 deep a slot. The two warp groups that multiply take whole tiles in turn: one multiplies
// while the other finishes. A cluster of blocks owns neighbouring columns; each loads its part of
// the input's rows for all, so that an element of input is read columns / (tile_columns * cluster)
// times. The output is written once.
//
// 65536 x 512 -> 256 in 2 x 128 columns: 101 MB, 26 us at 4 TB/s, beside 19 us of matrix unit. 66
// clusters keep 5.3 MB of input on the way: 2 us at the 2.6 TB/s that are the input's.

#include "wgmma_kernels.cu"

// What lies where in a block's shared memory, in bytes from its first multiple of 1024.
// shared_bytes of resident_launch.py counts the same.
template <int tile_columns, int stages, int weight_steps>
struct ResidentShared {
  static constexpr int stage_bytes = tile_rows * tile_depth * 2;
  static constexpr int weight_bytes = tile_columns * tile_depth * 2;  // of 64 in depth
  static constexpr int weight = stages * stage_bytes;
  static constexpr int chunks = weight + weight_steps * weight_bytes;  // one per warp group
  static constexpr int bias = chunks + multipliers * chunk_bytes;
  static constexpr int full = bias + tile_columns * 2;
  static constexpr int empty = full + stages * 8;
  static constexpr int loaded = empty + stages * 8;  // one per 64 of the weight's depth
  static constexpr int turn = loaded + weight_steps * 8;  // one per warp group
};

// bulk: as in forward. `across` clusters stand beside each other; the grid is a multiple of them.
template <class Activation, class Element, int tile_columns, int stages, int cluster,
          int weight_steps, bool bulk>
__global__ void __cluster_dims__(cluster, 1, 1) __launch_bounds__(threads, 1)
    resident(const __grid_constant__ TensorMap input_map,
             const __grid_constant__ TensorMap weight_map,
             const __grid_constant__ TensorMap output_map, const Element* __restrict__ bias,
             Element* __restrict__ output, int rows, int columns, int depth, int across,
             int64_t bias_stride) {
  using Layout = ResidentShared<tile_columns, stages, weight_steps>;
  extern __shared__ uint8_t unaligned[];
  const uint32_t shared = (shared_address(unaligned) + 1023) / 1024 * 1024;
  uint8_t* const bytes = unaligned + (shared - shared_address(unaligned));
  const uint32_t rank = cluster == 1 ? 0 : cluster_rank();
  const int own_cluster = blockIdx.x / cluster;
  const int column = (own_cluster % across * cluster + int(rank)) * tile_columns;
  Element* const added = reinterpret_cast<Element*>(bytes + Layout::bias);
  if (threadIdx.x < tile_columns) {
    const int at = column + threadIdx.x;
    const bool inside = bias != nullptr && at < columns;
    added[threadIdx.x] = inside ? __ldg(bias + at * bias_stride) : Element(0.0f);
  }
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < stages; ++stage) {
      barrier_init(shared + Layout::full + stage * 8, 1);
      barrier_init(shared + Layout::empty + stage * 8, 4 * cluster);  // the warps of one group
    }
    for (int step = 0; step < weight_steps; ++step) {
      barrier_init(shared + Layout::loaded + step * 8, 1);
    }
    for (int i = 0; i < multipliers; ++i) barrier_init(shared + Layout::turn + i * 8, 4);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  if constexpr (cluster > 1) cluster_sync();

  const int tiles = (rows - 1) / tile_rows + 1, steps = (depth - 1) / tile_depth + 1;
  const int begin = own_cluster / across, stride = gridDim.x / cluster / across;
  const int group = threadIdx.x / 128;
  Slot<stages> slot;
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      for (int tile = begin; tile < tiles; tile += stride) {
        for (int step = 0; step < steps; ++step, slot.next()) {
          if (tile == begin) {  // the weight arrives in the order in which it is multiplied
            const uint32_t loaded = shared + Layout::loaded + step * 8;
            expect_bytes(loaded, Layout::weight_bytes);
            copy_in(shared + Layout::weight + step * Layout::weight_bytes, weight_map,
                    step * tile_depth, column, loaded);
          }
          const uint32_t full = shared + Layout::full + slot.at * 8;
          const uint32_t to = shared + slot.at * Layout::stage_bytes;
          wait(shared + Layout::empty + slot.at * 8, slot.parity ^ 1);
          expect_bytes(full, Layout::stage_bytes);
          if constexpr (cluster == 1) {
            copy_in(to, input_map, step * tile_depth, tile * tile_rows, full);
          } else {
            const int part = int(rank) * (tile_rows / cluster);
            copy_in_all<cluster>(to + part * tile_depth * 2, input_map, step * tile_depth,
                                 tile * tile_rows + part, full);
          }
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int multiplier = group - 1, thread = threadIdx.x % 128, lane = thread % 32;
    // The first threads of each warp release a slot, each in one block, the first in its own.
    const bool releases = lane < cluster;
    const uint32_t buffer = shared + Layout::chunks + multiplier * chunk_bytes;
    const auto skip_tile = [&] {
      const int at = slot.at + steps;
      slot.parity ^= at / stages % 2;
      slot.at = at % stages;
    };
    if (multiplier == 1) skip_tile();
    bool is_first = true;
    uint32_t turn_parity = multiplier ^ 1;  // the first group's first turn is there from the start
    for (int tile = begin + multiplier * stride; tile < tiles; tile += 2 * stride) {
      // A slot's barrier tells two phases apart: none may be waited for before the other group has
      // seen the one before it.
      wait(shared + Layout::turn + multiplier * 8, turn_parity);
      turn_parity ^= 1;
      float sum[2][tile_columns / 2];  // of 64 rows each
      int previous = 0;
      for (int step = 0; step < steps; ++step, slot.next()) {
        if (is_first) wait(shared + Layout::loaded + step * 8, 0);
        wait(shared + Layout::full + slot.at * 8, slot.parity);
        const uint64_t a = descriptor(shared + slot.at * Layout::stage_bytes);
        const uint64_t b = descriptor(shared + Layout::weight + step * Layout::weight_bytes);
        hold(sum[0]);
        hold(sum[1]);
        multiply_fence();
#pragma unroll
        for (int k = 0; k < tile_depth / 16; ++k) {
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            multiply(sum[m], a + m * (64 * tile_depth * 2 / 16) + 2 * k, b + 2 * k, step + k != 0,
                     Element(0.0f));
          }
        }
        multiply_commit();
        hold(sum[0]);
        hold(sum[1]);
        // This step runs on while the one before is known to be done with its slot.
        multiply_wait<1>();
        if (step > 0 && releases) {
          arrive<cluster>(shared + Layout::empty + previous * 8, rank ^ lane);
        }
        previous = slot.at;
      }
      if (lane == 0) arrive<1>(shared + Layout::turn + (multiplier ^ 1) * 8, 0);
      multiply_wait<0>();
      hold(sum[0]);
      hold(sum[1]);
      if (releases) arrive<cluster>(shared + Layout::empty + previous * 8, rank ^ lane);
      is_first = false;
      skip_tile();
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const int row = tile * tile_rows + m * 64;
#pragma unroll
        for (int first = 0; first < tile_columns; first += chunk_columns) {
          if (row >= rows || column + first >= columns) break;
          if (thread == 0) copy_out_wait<0>();
          group_sync(multiplier);
          finish_chunk<Activation, Element, bulk>(sum[m] + first / 2, added + first, buffer,
                                                  output_map, output, row, column + first, rows,
                                                  columns, multiplier);
        }
      }
    }
    if (thread == 0) copy_out_wait<0>();
  }
  // A neighbour may still arrive on this block's barriers.
  if constexpr (cluster > 1) cluster_sync();
}

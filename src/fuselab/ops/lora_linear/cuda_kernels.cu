// The single pass of lora_linear's backward over dY, Y and x, for 16-bit floats on GPUs with
// clusters of blocks (sm_90 and newer).
//
// With S = x Aᵀ, dZ = dY act'(Y) and dS = scale dZ B it writes dZ and dS, and sums dB = dZᵀ S and
// dA = dSᵀ x. dY, Y and x are read once and dZ is written once; other traffic is negligible. S is
// computed again at no cost, because dA reads x anyway.
//
// S needs a whole row of x and dS a whole row of dZ. So a cluster of blocks owns whole rows, 16 at
// a time, and each of its blocks 512 columns of both, in strips of 64 for its 8 warps. A warp
// copies its 16 x 64 tiles of the next rows into a ring of shared memory ahead of time. It pulls
// back its part of dZ there, multiplies it by the strip's part of B, and x by that of Aᵀ. The
// warps' parts are added in a block, and the blocks' sums are sent to all blocks of the cluster.
// Then every warp adds its strip's part of dB and dA, which stay in registers to the end. `finish`
// adds the clusters' parts. All sums have a fixed order.
//
// A tile's rows are 128 bytes in shared memory. 16-byte word j of row r is stored at j ^ (r % 8),
// so that neither the copies nor ldmatrix, by rows or transposed, have bank conflicts.

#include "../_shared/cuda_vectors.h"
#include "../_shared/activations.h"
#include "../_shared/hopper.h"
#include "../_shared/warp_instructions.h"

// These sizes are those of cuda_launch.py.
constexpr int warps = 8, threads = 32 * warps;
constexpr int tile_rows = 16, strip_columns = 64;
// Tiles of a warp in shared memory at a time. More were not faster (H200).
constexpr int stages = 2;
constexpr int tile_bytes = tile_rows * strip_columns * 2;
constexpr int steps = strip_columns / 16;  // of a product along a strip

// Returns the offset in bytes of a 16-byte word of a row from its tile's beginning.
FUSELAB_INLINE int place(int row, int word) { return row * 128 + (word ^ row % 8) * 16; }

// Copies a warp's strip of a matrix to shared memory tile by tile: a lane copies 16 bytes of every
// fourth row.
template <class Element>
struct Stream {
  const Element* from;
  int64_t four_rows, step;
  bool inside;  // whether the lane's columns of the strip are columns of the matrix

  // step: the distance from one tile to the next, in elements.
  FUSELAB_INLINE Stream(const Element* matrix, int64_t row_stride, int64_t first, int64_t stride,
                        int column, int columns) {
    const int lane = threadIdx.x % 32, own = column + lane % 8 * 8;
    from = matrix + (first + lane / 8) * row_stride + own;
    four_rows = 4 * row_stride;
    step = stride * row_stride;
    inside = own < columns;
  }

  // Starts copying the next tile, of which the matrix has `height` rows; rows past them become
  // zero.
  FUSELAB_INLINE void fetch(uint8_t* tile, int height) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 8 + 4 * i;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                       shared_address(tile + place(row, lane % 8))),
                   "l"(from + i * four_rows), "r"(inside && row < height ? 16 : 0)
                   : "memory");
    }
    from += step;
  }
};
FUSELAB_INLINE void end_of_fetches() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int pending>
FUSELAB_INLINE void wait_for_fetches() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
  __syncwarp();
}

// Loads four 8 x 8 matrices whose rows begin at the addresses of lanes 0 to 7, 8 to 15, ... With g
// = lane / 4 and q = 2 (lane % 4), a lane gets (g, q) and (g, q + 1) of each; transposed, (q, g)
// and (q + 1, g).
template <bool transposed>
FUSELAB_INLINE void load_matrices(unsigned (&to)[4], const void* from) {
  if constexpr (transposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(from))
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(from))
                 : "memory");
  }
}

// Loads columns 16 step to 16 step + 15 of a tile as a left operand: its rows, or its columns.
FUSELAB_INLINE void load_rows(unsigned (&to)[4], const uint8_t* tile, int step) {
  const int lane = threadIdx.x % 32, matrix = lane / 8;
  load_matrices<false>(to, tile + place(lane % 8 + matrix % 2 * 8, step * 2 + matrix / 2));
}
FUSELAB_INLINE void load_columns(unsigned (&to)[4], const uint8_t* tile, int step) {
  const int lane = threadIdx.x % 32, matrix = lane / 8;
  load_matrices<true>(to, tile + place(lane % 8 + matrix / 2 * 8, step * 2 + matrix % 2));
}

template <class Element>
FUSELAB_INLINE unsigned packed(Element low, Element high) {
  return unsigned(*reinterpret_cast<const uint16_t*>(&low)) |
         unsigned(*reinterpret_cast<const uint16_t*>(&high)) << 16;
}

// Loads a strip's part of a factor (column, rank) as right operands, zeros past its edges.
template <int rank_blocks, class Element>
FUSELAB_INLINE void load_factor(unsigned (&to)[steps][rank_blocks][2], const Element* factor,
                                int64_t column_stride, int64_t rank_stride, int column, int columns,
                                int rank) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < steps; ++step) {
#pragma unroll
    for (int block = 0; block < rank_blocks; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int component = block * 8 + lane / 4;
        Element pair[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = column + step * 16 + half * 8 + lane % 4 * 2 + i;
          const bool inside = at < columns && component < rank;
          pair[i] = inside ? factor[at * column_stride + component * rank_stride] : Element(0.0f);
        }
        to[step][block][half] = packed(pair[0], pair[1]);
      }
    }
  }
}

// Opens the mbarrier for what the blocks of a cluster send each other: 16-byte messages that count
// themselves on the receiver's mbarrier. A cluster barrier with release would also wait for the
// stores of dZ (MEMBAR.ALL.GPU).
FUSELAB_INLINE void open(uint32_t arrived, int bytes) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      barrier_init(arrived + i * 8, 1);
      expect_bytes(arrived + i * 8, bytes);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

FUSELAB_INLINE void send(const float4* slot, uint32_t arrived, unsigned rank, float4 value) {
  asm volatile(
      "{\n.reg .b32 to, barrier;\n"
      "mapa.shared::cluster.u32 to, %0, %2;\n"
      "mapa.shared::cluster.u32 barrier, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [to], {%3, %4, %5, %6}, "
      "[barrier];\n}" ::"r"(shared_address(slot)),
      "r"(arrived), "r"(rank), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
      : "memory");
}

FUSELAB_INLINE void add(float4& total, float4 part) {
  total.x += part.x;
  total.y += part.y;
  total.z += part.z;
  total.w += part.w;
}

// The matrices are row-major, with rows of a multiple of 8 elements, aligned to 16 bytes; lora_a
// (rank, inner) and lora_b (columns, rank) may have any strides. saved: the argument of the
// activation's derivative, not read for identity. grad: dZ, or null if not needed. parts: float32
// (clusters, columns + inner, rank), per cluster dB / scale and dAᵀ. Grid: as many clusters as run
// at a time.
template <class Activation, class Element, class Scale, int cluster, int rank_blocks>
__global__ void __cluster_dims__(cluster, 1, 1) __launch_bounds__(threads, 1)
    pull_back_and_reduce(const Element* __restrict__ upstream, const Element* __restrict__ saved,
                         const Element* __restrict__ input, const Element* __restrict__ lora_a,
                         const Element* __restrict__ lora_b, Element* __restrict__ grad,
                         Element* __restrict__ grad_projection, float* __restrict__ parts,
                         int64_t rows, int columns, int inner, int rank, int64_t upstream_row,
                         int64_t saved_row, int64_t input_row, int64_t a_component,
                         int64_t a_column, int64_t b_column, int64_t b_component, Scale scale) {
  constexpr bool passes = Activation::derivative_of == Saved::nothing;
  constexpr int slot_bytes = (passes ? 2 : 3) * tile_bytes;  // dY, x and the saved tensor
  constexpr int ranks = 8 * rank_blocks, sums = 2 * tile_rows * ranks;  // of S and dS
  extern __shared__ __align__(128) uint8_t bytes[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint8_t* const ring = bytes + warp * stages * slot_bytes;
  float* const of_warps = reinterpret_cast<float*>(bytes + warps * stages * slot_bytes);
  float* const of_blocks = of_warps + warps * sums;  // [2][cluster][sums], for clusters only
  constexpr int from_blocks = cluster == 1 ? 0 : cluster * sums;
  Element* const narrow = reinterpret_cast<Element*>(of_blocks + 2 * from_blocks);
  const uint32_t arrived = shared_address(narrow + sums);  // two mbarriers
  const unsigned rank_of_block = cluster == 1 ? 0 : cluster_rank();
  if constexpr (cluster > 1) open(arrived, from_blocks * sizeof(float));

  const int column = (rank_of_block * warps + warp) * strip_columns;
  const int64_t stride = int64_t(gridDim.x / cluster) * tile_rows;
  const int64_t begin = int64_t(blockIdx.x / cluster) * tile_rows;
  Stream<Element> of_upstream(upstream, upstream_row, begin, stride, column, columns);
  Stream<Element> of_input(input, input_row, begin, stride, column, inner);
  Stream<Element> of_saved(saved, saved_row, begin, stride, column, columns);
  const auto fetch = [&](int slot, int64_t first) {
    uint8_t* const to = ring + slot * slot_bytes;
    const int height = int(min(rows - first, int64_t(tile_rows)));
    of_upstream.fetch(to, height);
    of_input.fetch(to + tile_bytes, height);
    if constexpr (!passes) of_saved.fetch(to + 2 * tile_bytes, height);
    end_of_fetches();
  };
#pragma unroll
  for (int slot = 0; slot < stages - 1; ++slot) fetch(slot, begin + slot * stride);

  unsigned up[steps][rank_blocks][2], down[steps][rank_blocks][2];
  load_factor(up, lora_b, b_column, b_component, column, columns, rank);
  load_factor(down, lora_a, a_column, a_component, column, inner, rank);
  float of_b[steps][rank_blocks][4] = {}, of_a[steps][rank_blocks][4] = {};
  const float factor = scale_of<float>(scale);
  const Element element{};

  int slot = 0;
  unsigned turn = 0;
  for (int64_t first = begin; first < rows; first += stride, ++turn) {
    // The slot of the tile before, which the warp has finished reading.
    __syncwarp();
    fetch(slot == 0 ? stages - 1 : slot - 1, first + (stages - 1) * stride);
    wait_for_fetches<stages - 1>();
    uint8_t* const tile_of_grad = ring + slot * slot_bytes;
    const uint8_t* const tile_of_input = tile_of_grad + tile_bytes;
    const int height = int(min(rows - first, int64_t(tile_rows)));
    if (++slot == stages) slot = 0;

    if constexpr (!passes) {
      Element* const of_pulled = grad + (first + lane / 8) * columns + column + lane % 8 * 8;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 8 + 4 * i, word = lane % 8;
        auto& pack = *reinterpret_cast<Pack<Element, 8>*>(tile_of_grad + place(row, word));
        const auto by = *reinterpret_cast<const Pack<Element, 8>*>(
            tile_of_grad + 2 * tile_bytes + place(row, word));
        Pack<Element, 8> pulled = pack;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          // Past the edges both are 0, and so is every activation's pullback of them.
          assign(pulled.element[j],
                 Activation::template pullback<float>(widened<float>(pulled.element[j]),
                                                      widened<float>(by.element[j])));
        }
        pack = pulled;
        if (grad != nullptr && of_upstream.inside && row < height) {
          store<true, 8>(of_pulled + i * 4 * int64_t(columns), pulled);
        }
      }
      __syncwarp();
    }

    float part[2][rank_blocks][4] = {};  // of S, of dS / scale
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      unsigned x[4], g[4];
      load_rows(x, tile_of_input, step);
      load_rows(g, tile_of_grad, step);
#pragma unroll
      for (int block = 0; block < rank_blocks; ++block) {
        multiply_add(element, part[0][block], x, down[step][block][0], down[step][block][1]);
        multiply_add(element, part[1][block], g, up[step][block][0], up[step][block][1]);
      }
    }
#pragma unroll
    for (int which = 0; which < 2; ++which) {
#pragma unroll
      for (int block = 0; block < rank_blocks; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = lane / 4 + half * 8;
          float* const to = of_warps + warp * sums + (which * tile_rows + row) * ranks +
                            block * 8 + lane % 4 * 2;
          *reinterpret_cast<float2*>(to) =
              make_float2(part[which][block][half * 2], part[which][block][half * 2 + 1]);
        }
      }
    }
    __syncthreads();
    if (threadIdx.x < sums / 4) {
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int i = 0; i < warps; ++i) {
        add(sum, reinterpret_cast<const float4*>(of_warps + i * sums)[threadIdx.x]);
      }
      if constexpr (cluster > 1) {
        // A block that fills a buffer again, two turns later, has all blocks' sums of the turn
        // between. These are sent after a barrier that a block's warps reach only when they have
        // read this turn's.
        float4* const box = reinterpret_cast<float4*>(of_blocks + turn % 2 * from_blocks);
        const int own = rank_of_block * (sums / 4) + threadIdx.x;
        const uint32_t barrier = arrived + turn % 2 * 8;
#pragma unroll
        for (int to = 0; to < cluster; ++to) send(box + own, barrier, to, sum);
        wait(barrier, turn / 2 % 2);
        __syncwarp();
        if (threadIdx.x == 0) expect_bytes(barrier, from_blocks * sizeof(float));
        sum = box[threadIdx.x];
#pragma unroll
        for (int from = 1; from < cluster; ++from) add(sum, box[from * (sums / 4) + threadIdx.x]);
      }
      const int at = threadIdx.x * 4, which = at / (tile_rows * ranks);
      const int row = at / ranks % tile_rows, component = at % ranks;
      const float multiple = which == 0 ? 1.0f : factor;
      const float values[4] = {sum.x, sum.y, sum.z, sum.w};
      Element rounded[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Past the last row an infinite factor would make 0 * inf, which is NaN, of the zeros.
        assign(rounded[i], row < height ? values[i] * multiple : 0.0f);
        if (which == 1 && rank_of_block == 0 && row < height && component + i < rank) {
          grad_projection[(first + row) * rank + component + i] = rounded[i];
        }
      }
      *reinterpret_cast<uint2*>(narrow + at) =
          make_uint2(packed(rounded[0], rounded[1]), packed(rounded[2], rounded[3]));
    }
    __syncthreads();

    unsigned s[rank_blocks][2], grad_s[rank_blocks][2];  // right operands of (row, rank)
    {
      // Matrices: rows 0 to 7 and 8 to 15 of a block of the rank of S, then of dS.
      const int row = lane % 8 + lane / 8 % 2 * 8, which = lane / 16;
#pragma unroll
      for (int block = 0; block < rank_blocks; ++block) {
        unsigned both[4];
        load_matrices<true>(both, narrow + (which * tile_rows + row) * ranks + block * 8);
        s[block][0] = both[0], s[block][1] = both[1];
        grad_s[block][0] = both[2], grad_s[block][1] = both[3];
      }
    }
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      unsigned x[4], g[4];
      load_columns(g, tile_of_grad, step);
      load_columns(x, tile_of_input, step);
#pragma unroll
      for (int block = 0; block < rank_blocks; ++block) {
        multiply_add(element, of_b[step][block], g, s[block][0], s[block][1]);
        multiply_add(element, of_a[step][block], x, grad_s[block][0], grad_s[block][1]);
      }
    }
  }

  float* const of_cluster = parts + int64_t(blockIdx.x / cluster) * (columns + inner) * rank;
#pragma unroll
  for (int step = 0; step < steps; ++step) {
#pragma unroll
    for (int block = 0; block < rank_blocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = column + step * 16 + lane / 4 + i / 2 * 8;
        const int component = block * 8 + lane % 4 * 2 + i % 2;
        if (component < rank && at < columns) {
          of_cluster[at * rank + component] = of_b[step][block][i];
        }
        if (component < rank && at < inner) {
          of_cluster[(columns + at) * rank + component] = of_a[step][block][i];
        }
      }
    }
  }
}

// Adds the clusters' parts in a fixed order: grad_b (columns, rank) times scale, and grad_a (rank,
// inner). A block owns 32 elements; each of its 8 warps adds every eighth part.
template <class Element, class Scale>
__global__ void __launch_bounds__(threads)
    finish(const float* __restrict__ parts, Element* __restrict__ grad_a,
           Element* __restrict__ grad_b, int clusters, int columns, int inner, int rank,
           Scale scale) {
  __shared__ float of_warps[warps][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int count = (columns + inner) * rank, element = blockIdx.x * 32 + lane;
  float sum = 0.0f;
  if (element < count) {
#pragma unroll 4
    for (int i = warp; i < clusters; i += warps) sum += parts[int64_t(i) * count + element];
  }
  of_warps[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || element >= count) return;
#pragma unroll
  for (int i = 1; i < warps; ++i) sum += of_warps[i][lane];
  if (element < columns * rank) {
    assign(grad_b[element], sum * scale_of<float>(scale));
  } else {
    const int place = element - columns * rank;
    assign(grad_a[int64_t(place % rank) * inner + place / rank], sum);
  }
}

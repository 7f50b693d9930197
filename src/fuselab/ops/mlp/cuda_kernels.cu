// A whole MLP in one launch, 16-bit weights, on NVIDIA GPUs from sm_80 on.
//
// A cluster of blocks takes 16 * row_tiles rows of the input through all layers; without clusters
// (cluster = 1) a block does. The activations of its rows stay in shared memory, in two buffers: a
// layer reads one and writes the other. A layer's outputs are divided into units of 8 *
// column_tiles columns, which are dealt to the warps of all blocks of the cluster; each warp writes
// its own units into the shared memory of every block. A weight is read once per cluster, an
// element of input by each of its blocks, straight from global memory. At 64 bytes per clock a
// multiprocessor needs 5.7 us for the 0.64 MB of DLRM's prediction layers (1.75 GHz), a block of a
// cluster of 8 an eighth of that.
//
// Products are mma.m16n8k16 with float32 sums. A thread's 16 bytes of a weight's row are 8
// neighbours in depth, k to k + 7. The tensor core accepts any order of depths that both operands
// share, so the first 4 of all four threads of a row are one step of 16 and the last 4 the next,
// and neither operand needs ldmatrix. Weights are loaded `slots` steps of 32 in depth ahead, also
// past the end of a unit and of a layer, because they depend on nothing.
#include "../_shared/cuda_vectors.h"
#include "../_shared/activations.h"
#include "../_shared/hopper.h"
#include "../_shared/warp_instructions.h"

constexpr int warps = 8;
constexpr int threads = 32 * warps;
constexpr int most_layers = 16;
constexpr int loads = 8;  // 16-byte loads that a thread has in flight

#if __CUDA_ARCH__ >= 900
#define FUSELAB_CLUSTER(cluster) __cluster_dims__(cluster, 1, 1)
constexpr bool has_clusters = true;
#else  // the launcher does not ask for clusters here
#define FUSELAB_CLUSTER(cluster)
constexpr bool has_clusters = false;
#endif

// weight (columns, depth), whose rows are `stride` elements apart; bias (columns) or null.
struct Layer {
  const void* weight;
  const void* bias;
  int64_t stride;
  int depth, columns;
};
// row_strides: of the buffers that even and odd layers read, in elements. All layers' depths fit,
// rounded up to 32. It is an odd multiple of 32, so that neighbouring rows use different halves of
// the banks.
struct Network {
  Layer layer[most_layers];
  int layers;
  int row_strides[2];
};

FUSELAB_INLINE void round_to(float& to, float value) { to = value; }
template <class Element>
FUSELAB_INLINE void round_to(Element& to, float value) {
  assign(to, value);
}

// Returns eight neighbours of a row, `step` apart in memory, as 16-bit Elements; zeros past
// `count`, the remaining elements of the row. whole: step is 1, address and count are multiples of
// eight.
template <class Element, bool whole, class From>
FUSELAB_INLINE uint4 eight(const From* first, int64_t step, int count) {
  Pack<Element, 8> pack;
#pragma unroll
  for (int i = 0; i < 8; ++i) pack.element[i] = Element(0.0f);
  if constexpr (whole) {
    if (count > 0) {
      const Pack<From, 8> read = load<true, 8>(first);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if constexpr (sizeof(From) == sizeof(Element)) {
          pack.element[i] = read.element[i];
        } else {
          assign(pack.element[i], read.element[i]);
        }
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < count) assign(pack.element[i], widened<float>(__ldg(first + i * step)));
    }
  }
  return *reinterpret_cast<const uint4*>(pack.element);
}

// Returns the columns to write: the next layer reads steps of 32 in depth, padded with zeros.
FUSELAB_INLINE int covered(int columns) { return (columns + 31) / 32 * 32; }

template <int column_tiles>
FUSELAB_INLINE int units_of(const Network& network, int index) {
  constexpr int width = 8 * column_tiles;
  const int columns = network.layer[index].columns;
  return ((index + 1 < network.layers ? covered(columns) : columns) + width - 1) / width;
}

// A thread's loads of the weights, in the order in which its warp multiplies them.
template <class Element, int column_tiles>
struct Weights {
  static constexpr int slots = loads / column_tiles;
  const Network& network;
  const int worker, workers;
  int index, unit, units = 0, base, depth = 0;  // layer, unit of it, depth of the first slot
  bool whole = false;                           // rows are read 16 bytes at a time
  const Element* from[column_tiles];  // the thread's part of the first slot, of each tile's column
  int left[column_tiles];             // the elements from there to the end of the row

  FUSELAB_INLINE Weights(const Network& network, int worker, int workers)
      : network(network), worker(worker), workers(workers) {
    open(0);
  }
  // Opens the first layer from `first` on that has a unit for this warp; past the last none is
  // read.
  FUSELAB_INLINE void open(int first) {
    index = first;
    unit = worker;
    base = 0;
    while (index < network.layers && unit >= units_of<column_tiles>(network, index)) ++index;
    if (index == network.layers) {
      units = depth = 0;
#pragma unroll
      for (int tile = 0; tile < column_tiles; ++tile) {
        from[tile] = nullptr;
        left[tile] = 0;
      }
      return;
    }
    units = units_of<column_tiles>(network, index);
    open_unit();
  }
  FUSELAB_INLINE void open_unit() {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const Layer& layer = network.layer[index];
    const Element* const weight = static_cast<const Element*>(layer.weight);
    depth = layer.depth;
    whole =
        reinterpret_cast<uintptr_t>(weight) % 16 == 0 && layer.stride % 8 == 0 && depth % 8 == 0;
#pragma unroll
    for (int tile = 0; tile < column_tiles; ++tile) {
      const int column = (unit * column_tiles + tile) * 8 + g;
      from[tile] = weight + column * layer.stride + 8 * t;
      left[tile] = column < layer.columns ? depth - 8 * t : 0;
    }
  }
  FUSELAB_INLINE void advance() {
    base += 32 * slots;
    if (base < depth) {
#pragma unroll
      for (int tile = 0; tile < column_tiles; ++tile) {
        from[tile] += 32 * slots;
        left[tile] -= 32 * slots;
      }
      return;
    }
    base = 0;
    unit += workers;
    if (unit < units) {
      open_unit();
    } else if (index < network.layers) {
      open(index + 1);
    }
  }
  template <bool whole>
  FUSELAB_INLINE void read(uint4 (&words)[column_tiles], int slot) const {
#pragma unroll
    for (int tile = 0; tile < column_tiles; ++tile) {
      words[tile] =
          eight<Element, whole>(from[tile] + 32 * slot, int64_t(1), left[tile] - 32 * slot);
    }
  }
};

// Multiplies the weights of all slots, and loads the following ones into the slots. from: in shared
// memory, the thread's part of the first slot in row lane / 4; depth: the rest of a row.
template <bool whole, int slots, int chains, int row_tiles, int column_tiles, class Element>
FUSELAB_INLINE void multiply(float (&sum)[chains][row_tiles][column_tiles][4],
                             uint4 (&words)[slots][column_tiles],
                             const Weights<Element, column_tiles>& following, const Element* from,
                             int row_stride, int depth) {
#pragma unroll
  for (int slot = 0; slot < slots; ++slot) {
    if (32 * slot < depth) {
#pragma unroll
      for (int part = 0; part < row_tiles; ++part) {
        const Element* const at = from + part * 16 * row_stride + 32 * slot;
        const uint4 upper = *reinterpret_cast<const uint4*>(at);
        const uint4 lower = *reinterpret_cast<const uint4*>(at + 8 * row_stride);
        const unsigned first[4] = {upper.x, lower.x, upper.y, lower.y};
        const unsigned next[4] = {upper.z, lower.z, upper.w, lower.w};
#pragma unroll
        for (int tile = 0; tile < column_tiles; ++tile) {
          const uint4 word = words[slot][tile];
          multiply_add(Element{}, sum[0][part][tile], first, word.x, word.y);
          multiply_add(Element{}, sum[chains - 1][part][tile], next, word.z, word.w);
        }
      }
    }
    following.template read<whole>(words[slot], slot);
  }
}

// Prefetches all weights but the first layer's into L2, a line per thread of the grid: with a cold
// L2 each layer would otherwise wait for memory.
template <class Element>
FUSELAB_INLINE void prefetch(const Network& network) {
  const int64_t thread = int64_t(blockIdx.x) * threads + threadIdx.x;
  for (int index = 1; index < network.layers; ++index) {
    const Layer& layer = network.layer[index];
    const char* const weight = static_cast<const char*>(layer.weight);
    const int64_t bytes =
        (int64_t(layer.columns - 1) * layer.stride + layer.depth) * int64_t(sizeof(Element));
    for (int64_t at = thread * 128; at < bytes; at += int64_t(gridDim.x) * threads * 128) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(weight + at));
    }
  }
}

template <int cluster>
FUSELAB_INLINE int rank_in() {
  if constexpr (cluster == 1 || !has_clusters) {
    return 0;
  } else {
    return int(cluster_rank());
  }
}

// Makes all blocks' writes to shared memory visible to all blocks.
template <int cluster>
FUSELAB_INLINE void sync_blocks() {
  if constexpr (cluster == 1 || !has_clusters) {
    __syncthreads();
  } else {
    cluster_sync();
  }
}

// Stores 16 bytes at the same address in block `rank`.
FUSELAB_INLINE void send(const void* place, int rank, uint4 value) {
  asm volatile(
      "{\n.reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "st.shared::cluster.v4.b32 [there], {%2, %3, %4, %5};\n}" ::"r"(shared_address(place)),
      "r"(rank), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
      : "memory");
}

// Stores two rows, 8 apart, of 8 neighbouring outputs in every block of the cluster. Each of 4
// neighbouring threads has a pair per row; thread t sends row t % 2 to the blocks t / 2, t / 2 + 2,
// ... `place` is the address of the first row's first output; the second row's is `distance`
// elements on.
template <int cluster, class Element>
FUSELAB_INLINE void store_everywhere(Element* place, int distance, const uint32_t (&pairs)[2]) {
  const int t = threadIdx.x % 4;
  if constexpr (cluster == 1 || !has_clusters) {
    reinterpret_cast<uint32_t*>(place)[t] = pairs[0];
    reinterpret_cast<uint32_t*>(place + distance)[t] = pairs[1];
  } else {
    uint4 rows[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows[half].x = __shfl_sync(~0u, pairs[half], 0, 4);
      rows[half].y = __shfl_sync(~0u, pairs[half], 1, 4);
      rows[half].z = __shfl_sync(~0u, pairs[half], 2, 4);
      rows[half].w = __shfl_sync(~0u, pairs[half], 3, 4);
    }
    const uint4 own = t % 2 ? rows[1] : rows[0];
    const Element* const to = place + (t % 2 ? distance : 0);
#pragma unroll
    for (int first = 0; first < cluster; first += 2) send(to, first + t / 2, own);
  }
}

// input (rows, depth of the first layer) with its strides in elements; output (rows, columns of the
// last), contiguous. Grid: ceil(rows / (16 * row_tiles)) * cluster blocks. Dynamic shared memory:
// 16 * row_tiles rows of both buffers. With 16 rows two blocks fit a multiprocessor, on which the
// launcher counts.
template <class Hidden, class Last, class Element, class Input, class Output, int row_tiles,
          int column_tiles, int cluster>
__global__ void FUSELAB_CLUSTER(cluster) __launch_bounds__(threads, row_tiles == 1 ? 2 : 1)
    forward(const Input* __restrict__ input, Output* __restrict__ output, int64_t rows,
            int64_t input_row, int64_t input_column, const __grid_constant__ Network network) {
  constexpr int tile_rows = 16 * row_tiles;
  constexpr int slots = Weights<Element, column_tiles>::slots;
  // A few sums would wait for each other, so every other step then has sums of its own.
  constexpr int chains = row_tiles * column_tiles >= 4 ? 1 : 2;
  extern __shared__ uint4 memory[];
  Element* const activations = reinterpret_cast<Element*>(memory);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int64_t first_row = int64_t(blockIdx.x / cluster) * tile_rows;
  const int rank = rank_in<cluster>();
  const int worker = threadIdx.x / 32 * cluster + rank;
  constexpr int workers = warps * cluster;

  Weights<Element, column_tiles> ahead(network, worker, workers);
  uint4 words[slots][column_tiles];
#pragma unroll
  for (int slot = 0; slot < slots; ++slot) {
    if (ahead.whole) {
      ahead.template read<true>(words[slot], slot);
    } else {
      ahead.template read<false>(words[slot], slot);
    }
  }
  prefetch<Element>(network);

  {
    const int depth = network.layer[0].depth, row_stride = network.row_strides[0];
    const bool whole = reinterpret_cast<uintptr_t>(input) % 16 == 0 && input_column == 1 &&
                       input_row * sizeof(Input) % 16 == 0 && depth % 8 == 0;
    const int eights = covered(depth) / 8;
    for (int place = threadIdx.x; place < tile_rows * eights; place += threads) {
      const int row = place / eights, k = place % eights * 8;
      const int count = first_row + row < rows ? depth - k : 0;
      const Input* from = input + (first_row + row) * input_row + k * input_column;
      *reinterpret_cast<uint4*>(activations + row * row_stride + k) =
          whole ? eight<Element, true>(from, input_column, count)
                : eight<Element, false>(from, input_column, count);
    }
  }
  sync_blocks<cluster>();

  for (int index = 0; index < network.layers; ++index) {
    const Layer& layer = network.layer[index];
    const int depth = layer.depth, columns = layer.columns;
    const bool is_last = index + 1 == network.layers;
    const int read_stride = network.row_strides[index % 2];
    const int written_stride = network.row_strides[(index + 1) % 2];
    Element* const second = activations + tile_rows * network.row_strides[0];
    const Element* const from = (index % 2 ? second : activations) + g * read_stride + 8 * t;
    Element* const to = (index % 2 ? activations : second) + g * written_stride;
    const Element* const bias = static_cast<const Element*>(layer.bias);
    const int units = units_of<column_tiles>(network, index);
    for (int unit = worker; unit < units; unit += workers) {
      const int unit_column = unit * 8 * column_tiles;
      float added[column_tiles][2];
      float sum[chains][row_tiles][column_tiles][4] = {};
#pragma unroll
      for (int tile = 0; tile < column_tiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int column = unit_column + tile * 8 + 2 * t + i;
          added[tile][i] = bias && column < columns ? widened<float>(__ldg(bias + column)) : 0.0f;
        }
      }
      __syncwarp();  // not all lanes stored, but products need the whole warp
      for (int base = 0; base < depth; base += 32 * slots) {
        ahead.advance();
        if (ahead.whole) {  // two loops, so that nothing branches between products
          multiply<true>(sum, words, ahead, from + base, read_stride, depth - base);
        } else {
          multiply<false>(sum, words, ahead, from + base, read_stride, depth - base);
        }
      }
#pragma unroll
      for (int part = 0; part < row_tiles; ++part) {
#pragma unroll
        for (int tile = 0; tile < column_tiles; ++tile) {
          const int tile_column = unit_column + tile * 8;
          float total[4];  // of rows g and g + 8, columns 2t and 2t + 1
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            total[i] = sum[0][part][tile][i] + added[tile][i % 2];
            if (chains == 2) total[i] += sum[chains - 1][part][tile][i];
          }
          if (is_last) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int64_t row = first_row + part * 16 + g + i / 2 * 8;
              const int column = tile_column + 2 * t + i % 2;
              if (row < rows && column < columns) {
                round_to(output[row * columns + column], Last::forward(total[i]));
              }
            }
          } else {
            Pack<Element, 4> rounded;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const bool inside = tile_column + 2 * t + i % 2 < columns;
              assign(rounded.element[i], inside ? Hidden::forward(total[i]) : 0.0f);
            }
            const uint32_t* const words = reinterpret_cast<const uint32_t*>(rounded.element);
            const uint32_t pairs[2] = {words[0], words[1]};
            store_everywhere<cluster>(to + part * 16 * written_stride + tile_column,
                                      8 * written_stride, pairs);
          }
        }
      }
    }
    if (!is_last) sync_blocks<cluster>();
  }
}

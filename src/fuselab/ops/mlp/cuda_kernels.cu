// A whole MLP in one launch, 16-bit weights, on NVIDIA GPUs from sm_80 on.
//
// A cluster of blocks takes 16 * row_tiles rows of the input through all layers; without clusters
// (cluster = 1) a block does. The activations of its rows stay in shared memory, in two buffers of
// which a layer reads one and writes the other. Of a layer's outputs, units of 8 * column_tiles
// columns go around the warps of all blocks of the cluster, and each writes its own into the shared
// memory of every block. A weight is read once per cluster, an element of input by each of its
// blocks, straight from global memory: at 64 bytes per clock an SM takes 5.7 us for the 0.64 MB of
// DLRM's prediction layers (1.75 GHz), a block of a cluster of 8 an eighth of that.
//
// Products are mma.m16n8k16 with float32 sums. A thread's 16 bytes of a weight's row are 8
// neighbours in depth, k to k + 7; the tensor core takes any order of depths that both operands
// share, so the first 4 of all four threads of a row are one step of 16 and the last 4 the next:
// neither operand needs ldmatrix. Weights are on their way `slots` steps of 32 in depth ahead, past
// the end of a unit and of a layer: they depend on nothing.
#include "../activations/cuda_vectors.h"
#include "../activations/functions.h"
#include "../activations/hopper.h"
#include "../dot_interaction/warp_instructions.h"

constexpr int warps = 8;
constexpr int threads = 32 * warps;
constexpr int most_layers = 16;
constexpr int loads = 8;  // of 16 bytes that a thread has on their way

#if __CUDA_ARCH__ >= 900
#define FUSELAB_CLUSTER(cluster) __cluster_dims__(cluster, 1, 1)
constexpr bool has_clusters = true;
#else  // the launcher asks for none here
#define FUSELAB_CLUSTER(cluster)
constexpr bool has_clusters = false;
#endif

// weight (columns, depth), of which a row begins `stride` elements behind the one before; bias
// (columns) or null.
struct Layer {
  const void* weight;
  const void* bias;
  int64_t stride;
  int depth, columns;
};
// row_strides: of the buffers that even and odd layers read, in elements: depths of all layers fit,
// rounded up to 32. An odd multiple of 32, so that neighbouring rows lie in the other half of the
// banks.
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

// Eight neighbours of a row, `step` apart in memory, as 16-bit Elements; zeros where `count`, what
// is left of the row, ends. whole: step is 1, the address and count are multiples of eight.
template <class Element, class From>
FUSELAB_INLINE uint4 eight(const From* first, int64_t step, int count, bool whole) {
  Pack<Element, 8> pack;
#pragma unroll
  for (int i = 0; i < 8; ++i) pack.element[i] = Element(0.0f);
  if (whole) {
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

template <int column_tiles>
FUSELAB_INLINE int units_of(const Network& network, int index) {
  constexpr int width = 8 * column_tiles;
  const int columns = network.layer[index].columns;
  // The next layer reads steps of 32, of which the columns past the end are written as zeros.
  const int covered = index + 1 < network.layers ? (columns + 31) / 32 * 32 : columns;
  return (covered + width - 1) / width;
}

// What a thread reads of the weights, in the order in which its warp multiplies them.
template <class Element, int column_tiles>
struct Weights {
  static constexpr int slots = loads / column_tiles;
  const Network& network;
  const int worker, workers;
  int index, units, unit, base;  // layer, its units, unit, and depth of the first slot
  const Element* weight = nullptr;
  int64_t stride = 0;
  int depth, columns;
  bool whole = false;

  FUSELAB_INLINE Weights(const Network& network, int worker, int workers)
      : network(network), worker(worker), workers(workers) {
    open(0);
  }
  // The first layer from `first` on that has a unit for this warp; past the last nothing is read.
  FUSELAB_INLINE void open(int first) {
    index = first;
    unit = worker;
    base = 0;
    while (index < network.layers && unit >= units_of<column_tiles>(network, index)) ++index;
    if (index == network.layers) {
      units = depth = columns = 0;
      return;
    }
    const Layer& layer = network.layer[index];
    units = units_of<column_tiles>(network, index);
    weight = static_cast<const Element*>(layer.weight);
    stride = layer.stride;
    depth = layer.depth;
    columns = layer.columns;
    whole = reinterpret_cast<uintptr_t>(weight) % 16 == 0 && stride % 8 == 0 && depth % 8 == 0;
  }
  FUSELAB_INLINE void advance() {
    base += 32 * slots;
    if (base < depth) return;
    base = 0;
    unit += workers;
    if (unit >= units && index < network.layers) open(index + 1);
  }
  FUSELAB_INLINE void read(uint4 (&words)[column_tiles], int slot) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int at = base + 32 * slot + 8 * t;
#pragma unroll
    for (int tile = 0; tile < column_tiles; ++tile) {
      const int column = (unit * column_tiles + tile) * 8 + g;
      const int count = column < columns ? depth - at : 0;
      words[tile] = eight<Element>(weight + column * stride + at, 1, count, whole);
    }
  }
};

template <int cluster>
FUSELAB_INLINE int rank_in() {
  if constexpr (cluster == 1 || !has_clusters) {
    return 0;
  } else {
    return int(cluster_rank());
  }
}

// Shows all blocks' writes to shared memory to all blocks.
template <int cluster>
FUSELAB_INLINE void sync_blocks() {
  if constexpr (cluster == 1 || !has_clusters) {
    __syncthreads();
  } else {
    cluster_sync();
  }
}

// Two neighbouring elements, at the same place in every block of the cluster.
template <int cluster>
FUSELAB_INLINE void store_everywhere(void* place, uint32_t pair) {
  if constexpr (cluster == 1 || !has_clusters) {
    *static_cast<uint32_t*>(place) = pair;
  } else {
    const uint32_t here = shared_address(place);
#pragma unroll
    for (int rank = 0; rank < cluster; ++rank) {
      asm volatile(
          "{\n.reg .b32 there;\n"
          "mapa.shared::cluster.u32 there, %0, %1;\n"
          "st.shared::cluster.u32 [there], %2;\n}" ::"r"(here),
          "r"(rank), "r"(pair)
          : "memory");
    }
  }
}

// input (rows, depth of the first layer) with its strides in elements; output (rows, columns of the
// last), contiguous. Grid: ceil(rows / (16 * row_tiles)) * cluster blocks. Dynamic shared memory:
// 16 * row_tiles rows of both buffers.
template <class Hidden, class Last, class Element, class Input, class Output, int row_tiles,
          int column_tiles, int cluster>
__global__ void FUSELAB_CLUSTER(cluster) __launch_bounds__(threads, 1)
    forward(const Input* __restrict__ input, Output* __restrict__ output, int64_t rows,
            int64_t input_row, int64_t input_column, const __grid_constant__ Network network) {
  constexpr int tile_rows = 16 * row_tiles;
  constexpr int slots = Weights<Element, column_tiles>::slots;
  // Few sums would wait for each other: then every other step has its own.
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
  for (int slot = 0; slot < slots; ++slot) ahead.read(words[slot], slot);

  {
    const int depth = network.layer[0].depth, row_stride = network.row_strides[0];
    const bool whole = reinterpret_cast<uintptr_t>(input) % 16 == 0 && input_column == 1 &&
                       input_row * sizeof(Input) % 16 == 0 && depth % 8 == 0;
    const int eights = (depth + 31) / 32 * 4;
    for (int place = threadIdx.x; place < tile_rows * eights; place += threads) {
      const int row = place / eights, k = place % eights * 8;
      const int count = first_row + row < rows ? depth - k : 0;
      const Input* from = input + (first_row + row) * input_row + k * input_column;
      *reinterpret_cast<uint4*>(activations + row * row_stride + k) =
          eight<Element>(from, input_column, count, whole);
    }
  }
  sync_blocks<cluster>();

  for (int index = 0; index < network.layers; ++index) {
    const Layer& layer = network.layer[index];
    const int depth = layer.depth, columns = layer.columns;
    const bool is_last = index + 1 == network.layers;
    const int read_stride = network.row_strides[index % 2];
    const int written_stride = network.row_strides[(index + 1) % 2];
    Element* const odd = activations + tile_rows * network.row_strides[0];
    const Element* const from = (index % 2 ? odd : activations) + g * read_stride + 8 * t;
    Element* const to = (index % 2 ? activations : odd) + g * written_stride;
    const Element* const bias = static_cast<const Element*>(layer.bias);
    const int units = units_of<column_tiles>(network, index);
    for (int unit = worker; unit < units; unit += workers) {
      const int first_column = unit * 8 * column_tiles + 2 * t;
      float added[column_tiles][2];
      float sum[chains][row_tiles][column_tiles][4] = {};
#pragma unroll
      for (int tile = 0; tile < column_tiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int column = first_column + tile * 8 + i;
          added[tile][i] = bias && column < columns ? widened<float>(__ldg(bias + column)) : 0.0f;
        }
      }
      __syncwarp();  // behind stores that not all lanes made: products want the warp together
      for (int base = 0; base < depth; base += 32 * slots) {
        ahead.advance();
#pragma unroll
        for (int slot = 0; slot < slots; ++slot) {
          const int k = base + 32 * slot;
          if (k < depth) {
#pragma unroll
            for (int part = 0; part < row_tiles; ++part) {
              const Element* const at = from + part * 16 * read_stride + k;
              const uint4 upper = *reinterpret_cast<const uint4*>(at);
              const uint4 lower = *reinterpret_cast<const uint4*>(at + 8 * read_stride);
              const unsigned even[4] = {upper.x, lower.x, upper.y, lower.y};
              const unsigned odd[4] = {upper.z, lower.z, upper.w, lower.w};
#pragma unroll
              for (int tile = 0; tile < column_tiles; ++tile) {
                const uint4 word = words[slot][tile];
                multiply_add(Element{}, sum[0][part][tile], even, word.x, word.y);
                multiply_add(Element{}, sum[chains - 1][part][tile], odd, word.z, word.w);
              }
            }
          }
          ahead.read(words[slot], slot);
        }
      }
#pragma unroll
      for (int part = 0; part < row_tiles; ++part) {
#pragma unroll
        for (int tile = 0; tile < column_tiles; ++tile) {
          const int column = first_column + tile * 8;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float total[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              total[i] = sum[0][part][tile][2 * half + i] + added[tile][i];
              if (chains == 2) total[i] += sum[chains - 1][part][tile][2 * half + i];
            }
            const int row = part * 16 + half * 8;  // and g
            if (is_last) {
              if (first_row + row + g >= rows) continue;
              Output* const place = output + (first_row + row + g) * columns + column;
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                if (column + i < columns) round_to(place[i], Last::forward(total[i]));
              }
            } else {
              Pack<Element, 2> pair;
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                const float value = Hidden::forward(total[i]);
                assign(pair.element[i], column + i < columns ? value : 0.0f);
              }
              store_everywhere<cluster>(to + row * written_stride + column,
                                        *reinterpret_cast<const uint32_t*>(pair.element));
            }
          }
        }
      }
    }
    if (!is_last) sync_blocks<cluster>();
  }
}

// The outer interaction's linear layer and its gradients in 16-bit floats on Hopper's warpgroup
// matrix instructions (sm_90a only). The sums, the order of the pairs and the pieces of the folded
// weight are those of triton_kernels.py, whose `fold` runs before these kernels and whose finishing
// kernels run after them. K is a multiple of 16 here: a square of 16 x 16 pairs is whole, and its
// rows are i.
//
// In all three, one of three warp groups fills a ring of slots in shared memory by the copy engine,
// each 64 of the sum's depth; the other two multiply, in float32 accumulators. Products z_i z_j are
// never stored: each is rounded to 16 bits in the register from which the matrix unit takes it.
// That is 1 instruction for 2 products, 4 for 128 cycles of the unit.
//
// forward           a block owns 128 samples x 256 columns and a share of a piece's squares. The
//                   z_j of a square stay in registers, the z_i are held by lanes and exchanged.
// weight_gradient   a block walks tiles of a square of pairs x 128 columns, sums over all samples,
//                   and writes both mirror images from shared memory, 32 and 16 bytes in a row.
// input_gradient    a block owns 128 samples and a share of a piece's squares: grad V is a tile of
//                   128 x 256, whose rows are multiplied with z_j for z_i and with z_i for z_j. A
//                   thread of a quad has the sums of its 4 elements of 16 for both, so that each
//                   element of `partial` is added to by one thread, in one order.
//
// 2048 x 432 -> 512 is 203 GFLOP in each; a slot is 1024 cycles of the matrix unit and 20 to 48 KB
// out of L2 (4096^3 of linear_activation takes 48 at 740 TFLOP/s).

#include "../_shared/hopper.h"

constexpr int side = 16, square = side * side;
constexpr int tile_rows = 128;  // samples, if a block owns samples
constexpr int depth = 64;       // of a slot
constexpr int multipliers = 2;
constexpr int threads = 128 * (1 + multipliers);

// Returns the number of places on and below the diagonal of a square of `size`.
FUSELAB_INLINE int triangle(int size) { return size * (size + 1) / 2; }

// number = triangle(upper) + lower, lower <= upper.
FUSELAB_INLINE void locate(int number, int& upper, int& lower) {
  upper = int((sqrtf(8.0f * float(number) + 1.0f) - 1.0f) * 0.5f);
  // The root is off by 1 at most for all numbers that float32 can count (2^24).
  if (triangle(upper) > number) --upper;
  if (triangle(upper + 1) <= number) ++upper;
  lower = number - triangle(upper);
}

FUSELAB_INLINE void next_square(int& upper, int& lower) {
  if (++lower > upper) {
    ++upper;
    lower = 0;
  }
}

// Returns the first square of a share, of gridDim.y shares. 32 bits are enough: 32768 elements have
// 2^21 squares, and there are no more shares than multiprocessors.
FUSELAB_INLINE int share_begin(int squares, int share) { return squares * share / int(gridDim.y); }

// Two 16-bit floats in a word, and their products, rounded once.
template <class Element>
struct PairOf;
template <>
struct PairOf<__half> {
  using type = __half2;
};
template <>
struct PairOf<__nv_bfloat16> {
  using type = __nv_bfloat162;
};
template <class Element>
FUSELAB_INLINE uint32_t multiplied(uint32_t a, uint32_t b) {
  using Pair = typename PairOf<Element>::type;
  const Pair product = __hmul2(*reinterpret_cast<Pair*>(&a), *reinterpret_cast<Pair*>(&b));
  return *reinterpret_cast<const uint32_t*>(&product);
}
FUSELAB_INLINE float2 both(uint32_t word, __half) {
  return __half22float2(*reinterpret_cast<__half2*>(&word));
}
FUSELAB_INLINE float2 both(uint32_t word, __nv_bfloat16) {
  return __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&word));
}
FUSELAB_INLINE uint32_t rounded(float low, float high, __half) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
FUSELAB_INLINE uint32_t rounded(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
FUSELAB_INLINE uint32_t word_at(const void* pointer) {
  return __ldg(static_cast<const uint32_t*>(pointer));
}

// Computes sum (64 x columns) += a (64 x 16) b (16 x columns). Word 2 u + v of a, in registers, is
// row g + 8 v, elements 2 t + 8 u and the next, of the warp's 16 rows; accumulator 4 j + 2 h + e is
// row g + 8 h, column 8 j + 2 t + e; (g, t) = (lane / 4, lane % 4).
#define OUTER_PRODUCTS(function, columns, across, type, element, names, b_name, a_names, ...)     \
  FUSELAB_INLINE void function(float (&sum)[columns / 2], const uint32_t* a, uint64_t b,          \
                               element) {                                                         \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " {" names \
                 "}, {" a_names "}, " b_name ", 1, 1, 1, " #across ";"                            \
                 : __VA_ARGS__                                                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                           \
  }
#define OUTER_SQUARES(type, element)                                                              \
  FUSELAB_INLINE void multiply_across(float (&sum)[128], uint64_t a, uint64_t b, int adds,        \
                                      element) {                                                  \
    asm volatile(                                                                                 \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"                                             \
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " {" FUSELAB_NAMES_128       \
        "}, %128, %129, p, 1, 1, 0, 1;\n}"                                                        \
        : FUSELAB_SUMS_32(0), FUSELAB_SUMS_32(32), FUSELAB_SUMS_32(64), FUSELAB_SUMS_32(96)       \
        : "l"(a), "l"(b), "r"(adds));                                                             \
  }
#define OUTER_MULTIPLY_ALL(type, element)                                                         \
  OUTER_PRODUCTS(multiply_products, 256, 0, type, element, FUSELAB_NAMES_128, "%132",             \
                 "%128, %129, %130, %131", FUSELAB_SUMS_32(0), FUSELAB_SUMS_32(32),               \
                 FUSELAB_SUMS_32(64), FUSELAB_SUMS_32(96))                                        \
  OUTER_PRODUCTS(multiply_products_across, 128, 1, type, element, FUSELAB_NAMES_64, "%68",        \
                 "%64, %65, %66, %67", FUSELAB_SUMS_32(0), FUSELAB_SUMS_32(32))                   \
  OUTER_SQUARES(type, element)
OUTER_MULTIPLY_ALL("f16", __half)
OUTER_MULTIPLY_ALL("bf16", __nv_bfloat16)

// A ring of slots and its barriers, from the first multiple of 1024 bytes of a block's shared
// memory. _shared_bytes of wgmma_launch.py computes the same.
template <int stages, int stage_bytes>
struct Ring {
  uint32_t begin;
  FUSELAB_INLINE Ring(const uint8_t* unaligned) {
    begin = (shared_address(unaligned) + 1023) / 1024 * 1024;
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < stages; ++stage) {
        barrier_init(full(stage), 1);
        barrier_init(empty(stage), multipliers * 4);
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
  }
  FUSELAB_INLINE uint32_t at(int stage) const { return begin + stage * stage_bytes; }
  FUSELAB_INLINE uint32_t full(int stage) const {
    return begin + stages * stage_bytes + stage * 16;
  }
  FUSELAB_INLINE uint32_t empty(int stage) const { return full(stage) + 8; }
  // Waits until the slot may be filled, and announces the bytes that will fill it.
  FUSELAB_INLINE void claim(const Slot<stages>& slot) const {
    wait(empty(slot.at), slot.parity ^ 1);
    expect_bytes(full(slot.at), stage_bytes);
  }
};

FUSELAB_INLINE void become_feeder() { asm volatile("setmaxnreg.dec.sync.aligned.u32 40;"); }
// 40 * 128 + 232 * 256 registers are the 168 * 384 with which the block starts.
FUSELAB_INLINE void become_multiplier() { asm volatile("setmaxnreg.inc.sync.aligned.u32 232;"); }

constexpr int forward_stages = 6, forward_stage_bytes = 256 * depth * 2;

template <class Element>
__global__ void __launch_bounds__(threads, 1)
    forward(const __grid_constant__ TensorMap folded_map, const Element* __restrict__ z,
            float* __restrict__ partial, int rows, int width, int columns, int first_square,
            int squares, int adds) {
  extern __shared__ uint8_t unaligned[];
  const Ring<forward_stages, forward_stage_bytes> ring(unaligned);
  Slot<forward_stages> slot;
  const int row_tiles = (rows - 1) / tile_rows + 1;
  // Neighbouring blocks share their columns of the folded weight.
  const int64_t tile_row = int64_t(blockIdx.x % row_tiles) * tile_rows;
  const int column = blockIdx.x / row_tiles * 256;
  const int first = share_begin(squares, blockIdx.y), last = share_begin(squares, blockIdx.y + 1);
  const int group = threadIdx.x / 128;
  if (group == 0) {
    become_feeder();
    if (threadIdx.x == 0) {
      for (int step = first * (square / depth); step < last * (square / depth); ++step) {
        ring.claim(slot);
        copy_in(ring.at(slot.at), folded_map, step * depth, column, ring.full(slot.at));
        slot.next();
      }
    }
    return;
  }
  become_multiplier();
  const int thread = threadIdx.x % 128, lane = thread % 32, g = lane / 4, t = lane % 4;
  const int64_t own_row = tile_row + (group - 1) * 64 + thread / 32 * 16 + g;  // and own_row + 8
  // Rows past the last are computed from the last row, and not stored.
  const Element* const low = z + min(own_row, int64_t(rows - 1)) * width;
  const Element* const high = z + min(own_row + 8, int64_t(rows - 1)) * width;
  float* const share = partial + (blockIdx.y * int64_t(rows) + own_row) * columns + column + 2 * t;
  float sum[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) sum[i] = 0.0f;
  if (first >= last) return;  // else ptxas (13.0) keeps to 168 registers, and waits each time
  // z_j as the words of an operand's rows. Of z_i, lane t has 4 t to 4 t + 3, in two words per row.
  uint32_t right[4], left[4], next_right[4], next_left[4];
  const auto load = [&](int upper, int lower) {
    const int j = upper * side + 2 * t, i = lower * side + 4 * t;
    next_right[0] = word_at(low + j);
    next_right[1] = word_at(high + j);
    next_right[2] = word_at(low + j + 8);
    next_right[3] = word_at(high + j + 8);
    next_left[0] = word_at(low + i);
    next_left[1] = word_at(low + i + 2);
    next_left[2] = word_at(high + i);
    next_left[3] = word_at(high + i + 2);
  };
  int upper, lower;
  locate(first_square + first, upper, lower);
  load(upper, lower);
  int previous = -1;
  for (int at = first; at < last; ++at) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      right[i] = next_right[i];
      left[i] = next_left[i];
    }
    next_square(upper, lower);
    if (at + 1 < last) load(upper, lower);
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      wait(ring.full(slot.at), slot.parity);
      const uint64_t b = descriptor(ring.at(slot.at));
      uint32_t products[2][8];  // of two i, and of the next two while the first are multiplied
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        uint32_t(&a)[8] = products[pair];
        const int holder = (lane & ~3) | quarter;
        const uint32_t of_low = __shfl_sync(0xffffffff, left[pair], holder);
        const uint32_t of_high = __shfl_sync(0xffffffff, left[2 + pair], holder);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const uint32_t own_low = __byte_perm(of_low, 0, k == 0 ? 0x1010 : 0x3232);
          const uint32_t own_high = __byte_perm(of_high, 0, k == 0 ? 0x1010 : 0x3232);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            a[4 * k + i] = multiplied<Element>(i % 2 == 0 ? own_low : own_high, right[i]);
          }
        }
        hold(sum);
        multiply_fence();
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          multiply_products(sum, a + 4 * k, b + 2 * (2 * pair + k), Element(0.0f));
        }
        multiply_commit();
        hold(sum);
        // These products continue while those before are known to be done.
        multiply_wait<1>();
        if (pair == 0) {
          if (lane == 0 && previous >= 0) arrive<1>(ring.empty(previous), 0);
          previous = slot.at;
        }
      }
      slot.next();
    }
  }
  multiply_wait<0>();
  hold(sum);
#pragma unroll
  for (int j = 0; j < 32; ++j) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (own_row + 8 * h < rows && column + 8 * j < columns) {
        float2* const to = reinterpret_cast<float2*>(share + h * 8 * int64_t(columns) + 8 * j);
        const float2 before = adds ? *to : make_float2(0.0f, 0.0f);
        *to = make_float2(before.x + sum[4 * j + 2 * h], before.y + sum[4 * j + 2 * h + 1]);
      }
    }
  }
}

constexpr int weight_columns = 128, weight_stages = 8;
constexpr int grad_bytes = weight_columns / 64 * box_bytes;     // 64 samples of 128 columns
constexpr int elements_bytes = side * depth * 2;                // 16 elements of 64 samples
constexpr int weight_stage_bytes = grad_bytes + 2 * elements_bytes;
constexpr int tile_bytes = weight_columns * square / 2 * 2;     // of one warp group: half a square
static_assert(weight_stages * 16 <= 1024, "the barriers lie before the tiles");

template <class Element>
__global__ void __launch_bounds__(threads, 1)
    weight_gradient(const __grid_constant__ TensorMap grad_map,
                    const __grid_constant__ TensorMap transposed_map,
                    Element* __restrict__ grad_weight, int rows, int width, int columns) {
  extern __shared__ uint8_t unaligned[];
  const Ring<weight_stages, weight_stage_bytes> ring(unaligned);
  Slot<weight_stages> slot;
  const int column_tiles = (columns - 1) / weight_columns + 1;
  const int tiles = column_tiles * triangle(width / side);
  const int steps = (rows - 1) / depth + 1;
  const int group = threadIdx.x / 128;
  if (group == 0) {
    become_feeder();
    if (threadIdx.x == 0) {
      for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        int upper, lower;
        locate(tile / column_tiles, upper, lower);
        const int column = tile % column_tiles * weight_columns;
        for (int step = 0; step < steps; ++step, slot.next()) {
          ring.claim(slot);
          const uint32_t to = ring.at(slot.at), full = ring.full(slot.at);
          copy_in(to, grad_map, column, step * depth, full);
          copy_in(to + box_bytes, grad_map, column + 64, step * depth, full);
          copy_in(to + grad_bytes, transposed_map, step * depth, lower * side, full);
          copy_in(to + grad_bytes + elements_bytes, transposed_map, step * depth, upper * side,
                  full);
        }
      }
    }
    return;
  }
  become_multiplier();
  const int half = group - 1;  // which 8 of the square's i
  const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
  const int g = lane / 4, t = lane % 4;
  // 16-byte word w of row r of a box is stored at w ^ (r % 8).
  const uint32_t right_row = (lane / 8 % 2 * 8 + lane % 8) * 128;
  uint32_t left_row[2], left_swizzle[2];
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const int i = half * 8 + m * 4 + warp;
    left_row[m] = i * 128 + t * 4;
    left_swizzle[m] = i % 8;
  }
  const uint32_t staged = ring.full(0) + 1024 + half * tile_bytes;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    float sum[2][64];  // 4 of the i and their 16 j, each
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int i = 0; i < 64; ++i) sum[m][i] = 0.0f;
    }
    int previous = -1;
    for (int step = 0; step < steps; ++step, slot.next()) {
      wait(ring.full(slot.at), slot.parity);
      const uint32_t from = ring.at(slot.at);
      const uint64_t b = across_descriptor(from);
      const uint32_t lefts = from + grad_bytes, rights = lefts + elements_bytes + right_row;
      uint32_t products[2][8];
#pragma unroll
      for (int k = 0; k < depth / 16; ++k) {
        uint32_t(&a)[8] = products[k % 2];
        uint32_t right[4];
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(right[0]), "=r"(right[1]), "=r"(right[2]), "=r"(right[3])
                     : "r"(rights + ((2 * k + lane / 16) ^ lane % 8) * 16)
                     : "memory");
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          uint32_t left[2];
#pragma unroll
          for (int u = 0; u < 2; ++u) {
            asm volatile("ld.shared.b32 %0, [%1];"
                         : "=r"(left[u])
                         : "r"(lefts + left_row[m] + ((2 * k + u) ^ left_swizzle[m]) * 16)
                         : "memory");
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) a[4 * m + i] = multiplied<Element>(left[i / 2], right[i]);
        }
        hold(sum[0]);
        hold(sum[1]);
        multiply_fence();
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          multiply_products_across(sum[m], a + 4 * m, b + 128 * k, Element(0.0f));
        }
        multiply_commit();
        hold(sum[0]);
        hold(sum[1]);
        multiply_wait<1>();
        if (k == 0) {
          if (lane == 0 && previous >= 0) arrive<1>(ring.empty(previous), 0);
          previous = slot.at;
        }
      }
    }
    multiply_wait<0>();
    hold(sum[0]);
    hold(sum[1]);
    if (lane == 0) arrive<1>(ring.empty(previous), 0);

    // The tile as [column][i][j]: 16-byte word 2 i + j / 8 of a column's 16 is stored at that index
    // xor column % 8 xor i / 4, so that neither columns nor i's have bank conflicts.
    int upper, lower;
    locate(tile / column_tiles, upper, lower);
    const int column = tile % column_tiles * weight_columns;
    group_sync(half);  // the tile before has been read
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < weight_columns; n += 16) {
        uint32_t words[4];  // columns n to n + 7, j below 8 and above; the next 8 columns
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* const pair = sum[m] + n / 2 + i * 2;
          words[i] = rounded(pair[0], pair[1], Element(0.0f));
        }
        const int own_column = n + lane / 16 * 8 + lane % 8;
        const int word = (m * 4 + warp) * 2 + lane / 8 % 2;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         staged + own_column * square + (word ^ lane % 8 ^ m) * 16),
                     "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                     : "memory");
      }
    }
    group_sync(half);
    const int64_t area = int64_t(width) * width;
    Element* const to = grad_weight + column * area;
    const int i = lower * side + half * 8, j = upper * side;
#pragma unroll 4
    for (int item = thread; item < weight_columns * 16; item += 128) {
      const int own_column = item / 16, word = item % 16;
      uint32_t value[4];
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(value[0]), "=r"(value[1]), "=r"(value[2]), "=r"(value[3])
                   : "r"(staged + own_column * square +
                         (word ^ own_column % 8 ^ word / 8) * 16)
                   : "memory");
      if (column + own_column < columns) {
        *reinterpret_cast<uint4*>(to + own_column * area + int64_t(i + word / 2) * width + j +
                                  word % 2 * 8) =
            make_uint4(value[0], value[1], value[2], value[3]);
      }
    }
    if (upper == lower) continue;
#pragma unroll 4
    for (int n = warp * 32; n < warp * 32 + 32; n += 2) {
      // Matrices of 8 i x 8 j: column n, j below 8 and above; column n + 1.
      const int own_column = n + lane / 16, row = lane % 8, word = row * 2 + lane / 8 % 2;
      uint32_t words[4];
      asm volatile(
          "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
          : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
          : "r"(staged + own_column * square + (word ^ own_column % 8 ^ row / 4) * 16)
          : "memory");
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        if (column + n + part / 2 < columns) {
          *reinterpret_cast<uint32_t*>(to + (n + part / 2) * area +
                                       int64_t(j + part % 2 * 8 + g) * width + i + 2 * t) =
              words[part];
        }
      }
    }
  }
}

constexpr int input_stages = 4;
constexpr int upstream_bytes = tile_rows * depth * 2;
constexpr int input_stage_bytes = upstream_bytes + square / 64 * box_bytes;

// Adds the 16 sums of each of a quad's four threads: thread t gets those of the elements 2 t, 2 t +
// 1, 2 t + 8 and 2 t + 9.
FUSELAB_INLINE void add_up_quad(const float (&value)[side], int t, float (&total)[4]) {
  float some[8];  // sums of the two threads with this one's t / 2: [8 a][2 b][e]
  const bool is_upper = t / 2, is_odd = t % 2;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int at = i / 4 * 8 + i % 4;
    const float kept = is_upper ? value[at + 4] : value[at];
    const float sent = is_upper ? value[at] : value[at + 4];
    some[i] = kept + __shfl_xor_sync(0xffffffff, sent, 2);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int at = i / 2 * 4 + i % 2;
    const float kept = is_odd ? some[at + 2] : some[at];
    const float sent = is_odd ? some[at] : some[at + 2];
    total[i] = kept + __shfl_xor_sync(0xffffffff, sent, 1);
  }
}

// Multiplies one of a thread's two rows of a square's gradient with z_j and adds over all j
// (of_left), and with z_i and adds over all i (of_right). In a square on the diagonal only the
// pairs i <= j count: the others' weights are zeros, but a NaN in the upstream gradient or an
// infinite element would make them NaN.
template <bool is_diagonal, class Element>
FUSELAB_INLINE void pull_back(const float (&sum)[128], int h, const uint32_t (&left)[8],
                              const uint32_t (&right)[2], int t, float (&of_left)[4],
                              float (&of_right)[4]) {
  const float2 low = both(right[0], Element(0.0f)), high = both(right[1], Element(0.0f));
  const float others[4] = {low.x, low.y, high.x, high.y};
  float value[side];
#pragma unroll
  for (int i = 0; i < side; ++i) {
    const float2 pair = both(left[i / 2], Element(0.0f));
    const float own = i % 2 == 0 ? pair.x : pair.y;
    value[i] = 0.0f;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float of_pair = sum[4 * (2 * i + e / 2) + 2 * h + e % 2];
      const bool counts = !is_diagonal || i <= 2 * t + e / 2 * 8 + e % 2;
      value[i] += counts ? of_pair * others[e] : 0.0f;
      of_right[e] += counts ? of_pair * own : 0.0f;
    }
  }
  add_up_quad(value, t, of_left);
}

template <class Element>
__global__ void __launch_bounds__(threads, 1)
    input_gradient(const __grid_constant__ TensorMap grad_map,
                   const __grid_constant__ TensorMap folded_map, const Element* __restrict__ z,
                   float* __restrict__ partial, int rows, int width, int columns,
                   int first_square, int squares) {
  extern __shared__ uint8_t unaligned[];
  const Ring<input_stages, input_stage_bytes> ring(unaligned);
  Slot<input_stages> slot;
  const int64_t tile_row = int64_t(blockIdx.x) * tile_rows;
  const int first = share_begin(squares, blockIdx.y), last = share_begin(squares, blockIdx.y + 1);
  const int steps = (columns - 1) / depth + 1;
  const int group = threadIdx.x / 128;
  if (group == 0) {
    become_feeder();
    if (threadIdx.x == 0) {
      for (int at = first; at < last; ++at) {
        for (int step = 0; step < steps; ++step, slot.next()) {
          ring.claim(slot);
          const uint32_t to = ring.at(slot.at), full = ring.full(slot.at);
          copy_in(to, grad_map, step * depth, int(tile_row), full);
#pragma unroll
          for (int box = 0; box < square / 64; ++box) {
            copy_in(to + upstream_bytes + box * box_bytes, folded_map, at * square + box * 64,
                    step * depth, full);
          }
        }
      }
    }
    return;
  }
  become_multiplier();
  const int thread = threadIdx.x % 128, lane = thread % 32, g = lane / 4, t = lane % 4;
  const int64_t own_row = tile_row + (group - 1) * 64 + thread / 32 * 16 + g;  // and own_row + 8
  const Element* row_of[2];
  float* share_of[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    // Rows past the last are computed from the last row, and not stored.
    row_of[h] = z + min(own_row + 8 * h, int64_t(rows - 1)) * width;
    share_of[h] = partial + (blockIdx.y * int64_t(rows) + own_row + 8 * h) * width + 2 * t;
  }
  // Elements 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of 16: sums for z_j over all i of this share.
  float of_right[2][4] = {};
  const auto place = [&](int block, int h, int u) {
    return reinterpret_cast<float2*>(share_of[h] + block * side + u * 8);
  };
  const auto read = [&](int block, float2 (&before)[2][2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (own_row + 8 * h < rows) {
#pragma unroll
        for (int u = 0; u < 2; ++u) before[h][u] = *place(block, h, u);
      }
    }
  };
  const auto add = [&](int block, const float2 (&before)[2][2], const float (&value)[2][4]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (own_row + 8 * h < rows) {
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          *place(block, h, u) = make_float2(before[h][u].x + value[h][2 * u],
                                            before[h][u].y + value[h][2 * u + 1]);
        }
      }
    }
  };
  int upper, lower;
  locate(first_square + first, upper, lower);
  for (int at = first; at < last; ++at) {
    uint32_t left[2][8], right[2][2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int i = 0; i < 8; ++i) left[h][i] = word_at(row_of[h] + lower * side + 2 * i);
#pragma unroll
      for (int u = 0; u < 2; ++u) right[h][u] = word_at(row_of[h] + upper * side + 2 * t + 8 * u);
    }
    float2 before[2][2] = {};
    read(lower, before);
    float sum[128];
    int previous = -1;
    for (int step = 0; step < steps; ++step, slot.next()) {
      wait(ring.full(slot.at), slot.parity);
      const uint32_t from = ring.at(slot.at);
      const uint64_t a = descriptor(from + (group - 1) * (upstream_bytes / 2));
      const uint64_t b = across_descriptor(from + upstream_bytes);
      hold(sum);
      multiply_fence();
#pragma unroll
      for (int k = 0; k < depth / 16; ++k) {
        multiply_across(sum, a + 2 * k, b + 128 * k, step + k != 0, Element(0.0f));
      }
      multiply_commit();
      hold(sum);
      multiply_wait<1>();
      if (lane == 0 && previous >= 0) arrive<1>(ring.empty(previous), 0);
      previous = slot.at;
    }
    multiply_wait<0>();
    hold(sum);
    if (lane == 0) arrive<1>(ring.empty(previous), 0);

    const bool is_diagonal = upper == lower;
    float of_left[2][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (is_diagonal) {
        pull_back<true, Element>(sum, h, left[h], right[h], t, of_left[h], of_right[h]);
      } else {
        pull_back<false, Element>(sum, h, left[h], right[h], t, of_left[h], of_right[h]);
      }
    }
    add(lower, before, of_left);
    if (is_diagonal || at + 1 == last) {
      read(upper, before);
      add(upper, before, of_right);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int e = 0; e < 4; ++e) of_right[h][e] = 0.0f;
      }
    }
    next_square(upper, lower);
  }
}

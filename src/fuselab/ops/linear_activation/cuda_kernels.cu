// act(input Wᵀ + b) for a depth K up to 32, on NVIDIA GPUs, where writing the output is the limit.
//
// Nearly all of the traffic is the output (65536 x 13 -> 512 in bfloat16: 67 of 69 MB). So the
// weights of a warp's columns stay in its registers, and the warp walks rows: it reads their K
// elements, multiplies, and stores 16 bytes per thread. 16-bit inputs use the tensor cores
// (mma.m16n8k16, float32 accumulators). float32 uses FMAs, which are exact whatever allow_tf32
// says: 13 FMAs per 4 bytes stored take 13 us on an H200, the bytes 31 us.
//
// Sizes and strides count elements; offsets are 64-bit, formed once per row.

#include "../_shared/cuda_vectors.h"
#include "../_shared/rounded_activations.h"

constexpr int block_warps = 4;
constexpr int threads = 32 * block_warps;

template <class Element>
FUSELAB_INLINE Element element_or_zero(const Element* pointer, bool inside) {
  return inside ? __ldg(pointer) : Element(0.0f);
}

template <class Element>
FUSELAB_INLINE uint32_t paired(Element low, Element high) {
  Element pair[2] = {low, high};
  return *reinterpret_cast<uint32_t*>(pair);
}

// Stores 16 bytes in one instruction. For plain C++ the compiler splits the pack and stores half of
// it 4 bytes at a time (NVRTC 13.0, sm_80 and sm_90; seen in SASS).
template <class Element, int width>
FUSELAB_INLINE void store_whole(Element* pointer, const Pack<Element, width>& pack) {
  static_assert(sizeof(pack.element) == 16);
  const uint4 words = *reinterpret_cast<const uint4*>(pack.element);
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(pointer), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
               : "memory");
}

FUSELAB_INLINE void multiply(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                             const float (&start)[4], __half) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(start[0]),
        "f"(start[1]), "f"(start[2]), "f"(start[3]));
}
FUSELAB_INLINE void multiply(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                             const float (&start)[4], __nv_bfloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(start[0]),
        "f"(start[1]), "f"(start[2]), "f"(start[3]));
}

// Two neighbours of a row, with bias and activation, rounded. relu is part of the rounding
// instruction, with the same result.
template <class Activation, class Element>
struct Rounded {
  static FUSELAB_INLINE uint32_t pair(float low, float high) {
    Element result[2];
    assign(result[0], activated<Activation, Element>(low));
    assign(result[1], activated<Activation, Element>(high));
    return paired(result[0], result[1]);
  }
};
template <>
struct Rounded<Relu, __nv_bfloat16> {
  static FUSELAB_INLINE uint32_t pair(float low, float high) {
    uint32_t word;
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
  }
};
template <>
struct Rounded<Relu, __half> {
  static FUSELAB_INLINE uint32_t pair(float low, float high) {
    uint32_t word;
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
  }
};

// Waits for the thread's own asynchronous copies; a barrier must follow before others read them.
FUSELAB_INLINE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

constexpr int half_warps = 8, half_threads = 32 * half_warps;
constexpr int tall = 16;  // rows that a warp takes at a time

// Starts copies, by a block, of `rows` rows of a matrix, `most` or fewer, as `depth` elements each.
// dense: the matrix has them so, aligned to 16 bytes, and all but the last few are copied 16 bytes
// at a time.
template <int padded_depth, int most, bool dense, class Element>
FUSELAB_INLINE void fetch_rows(Element* to, const Element* from, int rows, int depth,
                               int64_t row_stride, int64_t column_stride) {
  if constexpr (dense) {
    const int elements = rows * depth, whole = elements / 8 * 8;
    const Element* source = from + threadIdx.x * 8;
    auto target = static_cast<uint32_t>(__cvta_generic_to_shared(to + threadIdx.x * 8));
    asm("" : "+l"(source), "+r"(target));  // so that every copy adds a constant to these
#pragma unroll
    for (int i = 0; i < most * padded_depth; i += half_threads * 8) {
      if (i + int(threadIdx.x) * 8 < whole) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target + i * 2),
                     "l"(source + i)
                     : "memory");
      }
    }
    const int last = whole + threadIdx.x;
    if (last < elements) to[last] = __ldg(from + last);
  } else {
    const int k = threadIdx.x % padded_depth;
    if (k >= depth) return;
    from += k * column_stride;
#pragma unroll 8
    for (int row = threadIdx.x / padded_depth; row < rows; row += half_threads / padded_depth) {
      to[row * depth + k] = __ldg(from + row * row_stride);
    }
  }
}

// Returns two neighbours from shared memory; `keep` masks those that belong to the row. The others
// become zero, because the memory there may contain an infinity.
template <class Element>
FUSELAB_INLINE uint32_t pair_of(const Element* pointer, uint32_t keep) {
  const auto bits = reinterpret_cast<const uint16_t*>(pointer);
  return (bits[0] | uint32_t(bits[1]) << 16) & keep;
}

// 16-bit elements. A block owns `wide` groups of 64 columns, one for each of its warps, and
// consecutive rows: `share` times 8, and 8 more in the first `extra` blocks. Weights and the input
// of a `slab` of tiles of 16 rows are copied to shared memory at once, so that there is one wait
// before the first store. With one block per multiprocessor, the code before that store is issued
// half as often as with two.
//
// Weights are the tensor core's operand A (mma.m16n8k16, 16 columns), and rows its operand B, 8
// rows. In four tiles, rows g and g + 8 are columns 8 g + 2 tile and the next. So thread (g, t),
// that is (lane / 4, lane % 4), gets eight neighbours of rows 2 t and 2 t + 1, one store each.
// packed: columns are a multiple of 8. Rows and columns beyond the edges are multiplied too, but
// not stored.
template <class Activation, class Element, int steps, bool dense, bool packed>
__global__ void __launch_bounds__(half_threads, 2)
    forward_shallow_half(const Element* __restrict__ input, const Element* __restrict__ weight,
                         const Element* __restrict__ bias, Element* __restrict__ output,
                         int64_t rows, int64_t columns, int64_t depth_argument, int64_t input_row,
                         int64_t input_column, int64_t weight_row, int64_t weight_column,
                         int64_t bias_stride, int wide, int64_t share, int extra) {
  constexpr int padded_depth = 16 * steps, slab_rows = 16 / steps * tall;
  constexpr int block_columns = half_warps * 64;  // 48 KB in all to a depth of 32
  __shared__ alignas(16) Element weights[block_columns * padded_depth];
  __shared__ alignas(16) Element inputs[2][slab_rows * padded_depth];
  const int depth = int(depth_argument);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int64_t first_column = int64_t(blockIdx.x) * wide * 64;
  const int inside = int(min(columns - first_column, int64_t(wide * 64)));
  const int block = int(blockIdx.y);
  const int64_t first_row = (block * share + min(block, extra)) * 8;
  const int own = int(min(rows - first_row, (share + (block < extra)) * 8));

  fetch_rows<padded_depth, block_columns, dense>(weights, weight + first_column * weight_row,
                                                 inside, depth, weight_row, weight_column);
  const auto fetch_slab = [&](int row, Element* to) {
    fetch_rows<padded_depth, slab_rows, dense>(to, input + (first_row + row) * input_row,
                                               min(own - row, slab_rows), depth, input_row,
                                               input_column);
  };
  fetch_slab(0, inputs[0]);
  // If there are fewer groups than warps, 8, 4, 2 or 1 warps share a group and split its rows.
  const int spare = (wide <= 4) + (wide <= 2) + (wide <= 1), places = 1 << spare;
  const int group = warp >> spare, place = warp % places;
  const int column = group * 64 + g * 8, left = inside - column;
  float added[4][4];  // the bias in the layout of the sums: of two columns, for two rows
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const Element* const from = bias + (first_column + column + i) * bias_stride;
    const float one = widened<float>(element_or_zero(from, bias && i < left));
    added[i / 2][i % 2 * 2] = added[i / 2][i % 2 * 2 + 1] = one;
  }
  uint32_t keep[2 * steps];
#pragma unroll
  for (int i = 0; i < 2 * steps; ++i) {
    const int k = i * 8 + 2 * t;
    keep[i] = (k < depth ? 0xffffu : 0u) | (k + 1 < depth ? 0xffff0000u : 0u);
  }
  wait_for_copies();
  __syncthreads();
  uint32_t w[4][steps][4];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const Element* const from = weights + (column + j) * depth + 2 * t;
#pragma unroll
    for (int i = 0; i < 2 * steps; ++i) {
      w[j / 2][i / 2][i % 2 * 2 + j % 2] = pair_of(from + i * 8, keep[i]);
    }
  }

  const int last = group < wide ? own : 0;
  int row = place * tall;
  Element* line = output + (first_row + row + 2 * t) * columns + first_column + column;
  for (int slab = 0, buffer = 0;; buffer ^= 1) {
    const Element* x_row = inputs[buffer] + (place * tall + g) * depth + 2 * t;
    slab += slab_rows;
    if (slab < own) fetch_slab(slab, inputs[buffer ^ 1]);
    for (; row < min(slab, last); row += places * tall) {
      const int here = left > 0 ? last - row - 2 * t : 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t x[steps][2];
#pragma unroll
        for (int i = 0; i < 2 * steps; ++i) {
          x[i / 2][i % 2] = pair_of(x_row + half * 8 * depth + i * 8, keep[i]);
        }
        Pack<Element, 8> result[2];  // of rows 2 t and 2 t + 1
#pragma unroll
        for (int part = 0; part < 4; ++part) {
          float sum[4];
          multiply(sum, w[part][0], x[0], added[part], Element(0.0f));
          if constexpr (steps == 2) multiply(sum, w[part][1], x[1], sum, Element(0.0f));
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint32_t pair = Rounded<Activation, Element>::pair(sum[i], sum[2 + i]);
            reinterpret_cast<uint32_t*>(result[i].element)[part] = pair;
          }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          Element* const to = line + (half * 8 + i) * columns;
          if (half * 8 + i >= here) continue;
          if constexpr (packed) {
            store_whole(to, result[i]);
          } else {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
              if (j < left) to[j] = result[i].element[j];
            }
          }
        }
      }
      x_row += places * tall * depth;
      line += int64_t(places * tall) * columns;
    }
    if (slab >= own) break;
    wait_for_copies();
    __syncthreads();
  }
}

// float32. A thread owns 4 neighbouring columns (a warp 128) and their `padded_depth` weights each.
// It walks two rows at a time, whose elements the whole warp reads at one address. Warps of a block
// take neighbouring columns of the same rows, so that all reads but the first warp's hit L1.
// packed: columns are a multiple of 4, and the output is aligned.
template <class Activation, int padded_depth, bool packed>
__global__ void __launch_bounds__(threads)
    forward_shallow_float(const float* __restrict__ input, const float* __restrict__ weight,
                          const float* __restrict__ bias, float* __restrict__ output,
                          int64_t rows, int64_t columns, int64_t depth_argument, int64_t input_row,
                          int64_t input_column, int64_t weight_row, int64_t weight_column,
                          int64_t bias_stride) {
  const int depth = int(depth_argument);
  const int64_t across = (columns + 127) / 128;
  const int64_t warp = int64_t(blockIdx.x) * block_warps + threadIdx.x / 32;
  const int64_t worker = warp / across, workers = int64_t(gridDim.x) * block_warps / across;
  const int64_t column = warp % across * 128 + threadIdx.x % 32 * 4;
  if (worker >= workers || column >= columns) return;
  float w[4][padded_depth], added[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool inside = column + i < columns;
    added[i] = element_or_zero(bias + (column + i) * bias_stride, bias && inside);
#pragma unroll
    for (int k = 0; k < padded_depth; ++k) {
      w[i][k] = element_or_zero(weight + (column + i) * weight_row + k * weight_column,
                                inside && k < depth);
    }
  }
  for (int64_t row = worker * 2; row < rows; row += workers * 2) {
    float sum[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool inside = row + half < rows;
      const float* from = input + (row + half) * input_row;
      float x[padded_depth];
#pragma unroll
      for (int k = 0; k < padded_depth; ++k) {
        x[k] = element_or_zero(from + k * input_column, inside && k < depth);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum[half][i] = 0.0f;
#pragma unroll
        for (int k = 0; k < padded_depth; ++k) {
          sum[half][i] = __fmaf_rn(x[k], w[i][k], sum[half][i]);
        }
        sum[half][i] += added[i];
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + half >= rows) break;
      Pack<float, 4> result;
#pragma unroll
      for (int i = 0; i < 4; ++i) result.element[i] = Activation::forward(sum[half][i]);
      float* to = output + (row + half) * columns + column;
      if constexpr (packed) {
        store_whole(to, result);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (column + i < columns) to[i] = result.element[i];
        }
      }
    }
  }
}

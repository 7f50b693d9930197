// act(input Wᵀ + b) for a depth K up to 32, on NVIDIA GPUs: a stream of output.
//
// The floor is memory, and nearly all of it is the output (65536 x 13 -> 512 in bfloat16: 67 of 69
// MB). So the weights of a warp's columns stay in its registers, and the warp walks rows: it reads
// their K elements (once per 128 columns, the other warps' reads hit L1), multiplies, and stores 16
// bytes per thread. The next rows' input is on its way while these are computed. 16-bit inputs go
// through the tensor cores (mma.m16n8k16, float32 accumulators), float32 through FMAs, exact
// whatever allow_tf32 says: 13 FMAs per 4 bytes stored are 13 us of an H200's time where the bytes
// take 31.
//
// Sizes and strides count elements; offsets are 64-bit, formed once per row.

#include "../activations/cuda_vectors.h"
#include "../activations/functions.h"

constexpr int block_warps = 4;
constexpr int threads = 32 * block_warps;

// The rows and columns a warp owns: warps of a block take neighbouring columns of the same rows.
struct Place {
  int64_t worker, workers, column;
  FUSELAB_INLINE Place(int64_t columns, int warp_columns) {
    const int64_t across = (columns + warp_columns - 1) / warp_columns;
    const int64_t warp = int64_t(blockIdx.x) * block_warps + threadIdx.x / 32;
    worker = warp / across;
    workers = int64_t(gridDim.x) * block_warps / across;
    column = warp % across * warp_columns;
  }
};

template <class Element>
FUSELAB_INLINE Element element_or_zero(const Element* pointer, bool inside) {
  return inside ? __ldg(pointer) : Element(0.0f);
}

template <class Element>
FUSELAB_INLINE uint32_t paired(Element low, Element high) {
  Element pair[2] = {low, high};
  return *reinterpret_cast<uint32_t*>(pair);
}

// 16 bytes in one instruction. Written in C++ the compiler takes the pack apart and stores half of
// them 4 bytes at a time (NVRTC 13.0, sm_80 and sm_90; seen in SASS).
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

// The operand A of 16 rows from `row`: in the fragment of a 16 x 16 step, thread (g, t) = (lane / 4,
// lane % 4) holds rows g and g + 8, depths 2t, 2t + 1 and 8 more.
template <class Element, int steps>
FUSELAB_INLINE void load_rows(uint32_t (&a)[steps][4], const Element* input, int64_t row,
                              int64_t rows, int depth, int64_t input_row, int64_t input_column) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int step = 0; step < steps; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t at = row + g + i % 2 * 8;
      const int k = step * 16 + 2 * t + i / 2 * 8;
      const Element* from = input + at * input_row + k * input_column;
      a[step][i] = paired(element_or_zero(from, at < rows && k < depth),
                          element_or_zero(from + input_column, at < rows && k + 1 < depth));
    }
  }
}

// 16-bit elements. A warp owns `groups` groups of 32 columns and walks 16 rows at a time. Within a
// group the four n-tiles of the tensor core take columns 8 n' + 2 tile + {0, 1}, so that the eight
// accumulators of a thread and row are neighbours: one 16-byte store. packed: columns are a multiple
// of 8, and the output is aligned.
template <class Activation, class Element, int steps, int groups, bool packed>
__global__ void __launch_bounds__(threads)
    forward_shallow_half(const Element* __restrict__ input, const Element* __restrict__ weight,
                         const Element* __restrict__ bias, Element* __restrict__ output,
                         int64_t rows, int64_t columns, int64_t depth_argument, int64_t input_row,
                         int64_t input_column, int64_t weight_row, int64_t weight_column,
                         int64_t bias_stride) {
  const int depth = int(depth_argument);
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const Place place(columns, groups * 32);
  if (place.worker >= place.workers) return;
  uint32_t w[groups][4][steps][2];
  uint32_t added[groups][4];  // the bias of this thread's columns, in pairs
#pragma unroll
  for (int group = 0; group < groups; ++group) {
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
      const int64_t column = place.column + group * 32 + g / 2 * 8 + tile * 2 + g % 2;
#pragma unroll
      for (int step = 0; step < steps; ++step) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int k = step * 16 + 2 * t + i * 8;
          const Element* from = weight + column * weight_row + k * weight_column;
          w[group][tile][step][i] =
              paired(element_or_zero(from, column < columns && k < depth),
                     element_or_zero(from + weight_column, column < columns && k + 1 < depth));
        }
      }
      const int64_t first = place.column + group * 32 + t * 8 + tile * 2;
      const Element* from = bias + first * bias_stride;
      added[group][tile] =
          paired(element_or_zero(from, bias && first < columns),
                 element_or_zero(from + bias_stride, bias && first + 1 < columns));
    }
  }
  uint32_t a[steps][4], following[steps][4];
  int64_t row = place.worker * 16;
  load_rows<Element, steps>(a, input, row, rows, depth, input_row, input_column);
  for (; row < rows; row += place.workers * 16) {
    load_rows<Element, steps>(following, input, row + place.workers * 16, rows, depth, input_row,
                              input_column);
#pragma unroll
    for (int group = 0; group < groups; ++group) {
      Pack<Element, 8> result[2];  // of rows g and g + 8
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) {
        const Element* pair = reinterpret_cast<const Element*>(&added[group][tile]);
        const float low = widened<float>(pair[0]), high = widened<float>(pair[1]);
        float sum[4] = {low, high, low, high};
#pragma unroll
        for (int step = 0; step < steps; ++step) {
          multiply(sum, a[step], w[group][tile][step], sum, Element(0.0f));
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          assign(result[i / 2].element[tile * 2 + i % 2], Activation::forward(sum[i]));
        }
      }
      const int64_t column = place.column + group * 32 + t * 8;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t at = row + g + half * 8;
        if (at >= rows) continue;
        if constexpr (packed) {
          if (column < columns) store_whole(output + at * columns + column, result[half]);
        } else {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            if (column + i < columns) output[at * columns + column + i] = result[half].element[i];
          }
        }
      }
    }
#pragma unroll
    for (int step = 0; step < steps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[step][i] = following[step][i];
    }
  }
}

// The same, transposed: weights are the tensor core's operand A, of 16 columns, and rows its B, of
// 8. Four tiles whose rows g and g + 8 are columns 8 g + 2 tile and the next give thread (g, t)
// eight neighbours of rows 2 t and 2 t + 1: a store of a warp is four whole lines of 128 bytes. A
// block's warps share `groups` groups of 64 columns, whose weights come through shared memory: read
// straight into fragments, every load of 2 bytes would touch 8 lines.
template <class Activation, class Element, int steps, int groups, bool packed>
__global__ void __launch_bounds__(threads)
    forward_transposed(const Element* __restrict__ input, const Element* __restrict__ weight,
                       const Element* __restrict__ bias, Element* __restrict__ output,
                       int64_t rows, int64_t columns, int64_t depth_argument, int64_t input_row,
                       int64_t input_column, int64_t weight_row, int64_t weight_column,
                       int64_t bias_stride) {
  constexpr int block_columns = 64 * groups, padded_depth = 16 * steps;
  constexpr int pitch = padded_depth + 8;  // the words of a fragment then lie in 32 banks
  constexpr int tall = 16;                 // rows that a warp takes at a time
  __shared__ alignas(16) Element staged[block_columns * pitch];
  __shared__ alignas(16) Element staged_bias[block_columns];
  const int depth = int(depth_argument);
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const uint32_t across = uint32_t((columns + block_columns - 1) / block_columns);
  const int64_t first_column = int64_t(blockIdx.x % across) * block_columns;
  const int inside = int(min(columns - first_column, int64_t(block_columns)));
  int64_t row = (int64_t(blockIdx.x / across) * block_warps + threadIdx.x / 32) * tall;
  const int64_t stride = int64_t(gridDim.x / across) * block_warps * tall;

  // Of rows row + g and 8 further the elements 2 t, the next, and those 8 on.
  const Element* from = input + (row + g) * input_row + 2 * t * input_column;
  const auto load = [&](uint32_t(&x)[2][steps][2], int64_t left) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int reach = half * 8 + g < left ? depth - 2 * t : 0;
#pragma unroll
      for (int i = 0; i < 2 * steps; ++i) {
        const Element* pair = from + half * 8 * input_row + i * 8 * input_column;
        x[half][i / 2][i % 2] = paired(element_or_zero(pair, i * 8 < reach),
                                       element_or_zero(pair + input_column, i * 8 + 1 < reach));
      }
    }
    from += stride * input_row;
  };
  uint32_t x[2][steps][2], following[2][steps][2];
  load(x, rows - row);
  const int thread = threadIdx.x;
  const Element bias_or_zero = element_or_zero(bias + (first_column + thread) * bias_stride,
                                               bias && thread < inside);
  constexpr int at_a_time = threads / padded_depth;
  const int k = thread % padded_depth, first = thread / padded_depth;
  const Element* weights = weight + (first_column + first) * weight_row + k * weight_column;
  // Column 8 g + 2 tile + h of a group lies at 16 tile + 8 h + g, as fragments ask for it.
  Element* const to = staged + (first / 2 * 16 + first % 2 * 8) * pitch + k;
  const int end = k < depth ? inside - first : 0;
#pragma unroll
  for (int i = 0; i < block_columns; i += at_a_time, weights += at_a_time * weight_row) {
    to[(i / 64 * 64 + i % 8 / 2 * 16 + i % 64 / 8) * pitch] = element_or_zero(weights, i < end);
  }
  if (thread < block_columns) staged_bias[thread] = bias_or_zero;
  __syncthreads();
  const Element* const fragments = staged + g * pitch + 2 * t;
  uint32_t w[groups][4][steps][4];
  float added[groups][4][4];  // as the sums lie: each bias of two columns, for two rows
#pragma unroll
  for (int group = 0; group < groups; ++group) {
    const auto own = *reinterpret_cast<const Pack<Element, 8>*>(staged_bias + group * 64 + g * 8);
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
#pragma unroll
      for (int i = 0; i < 4 * steps; ++i) {
        const int at = (group * 64 + tile * 16 + i % 2 * 8) * pitch + i / 2 * 8;
        w[group][tile][i / 4][i % 4] = *reinterpret_cast<const uint32_t*>(fragments + at);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        added[group][tile][i] = widened<float>(own.element[tile * 2 + i / 2]);
      }
    }
  }
  Element* corner = output + (row + 2 * t) * columns + first_column + g * 8;
  for (; row < rows; row += stride, corner += stride * columns) {
    const int64_t left = rows - row;
    const int here = int(min(left, int64_t(tall)));
    load(following, left - stride);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int group = 0; group < groups; ++group) {
        Pack<Element, 8> result[2];  // of rows 2 t and 2 t + 1
#pragma unroll
        for (int tile = 0; tile < 4; ++tile) {
          float sum[4];
          multiply(sum, w[group][tile][0], x[half][0], added[group][tile], Element(0.0f));
          if constexpr (steps == 2) {
            multiply(sum, w[group][tile][1], x[half][1], sum, Element(0.0f));
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            assign(result[i % 2].element[tile * 2 + i / 2], Activation::forward(sum[i]));
          }
        }
        const int end = inside - group * 64 - g * 8;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int down = half * 8 + i;
          if (down + 2 * t >= here || end <= 0) continue;
          Element* const to = corner + down * columns + group * 64;
          if constexpr (packed) {
            store_whole(to, result[i]);
          } else {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
              if (j < end) to[j] = result[i].element[j];
            }
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4 * steps; ++i) {
      x[i % 2][i / 4][i / 2 % 2] = following[i % 2][i / 4][i / 2 % 2];
    }
  }
}

// float32. A thread owns 4 neighbouring columns (a warp 128) and their `padded_depth` weights each,
// and walks two rows at a time, whose elements the whole warp reads at one address. packed: columns
// are a multiple of 4, and the output is aligned.
template <class Activation, int padded_depth, bool packed>
__global__ void __launch_bounds__(threads)
    forward_shallow_float(const float* __restrict__ input, const float* __restrict__ weight,
                          const float* __restrict__ bias, float* __restrict__ output,
                          int64_t rows, int64_t columns, int64_t depth_argument, int64_t input_row,
                          int64_t input_column, int64_t weight_row, int64_t weight_column,
                          int64_t bias_stride) {
  const int depth = int(depth_argument);
  const Place place(columns, 128);
  const int64_t column = place.column + threadIdx.x % 32 * 4;
  if (place.worker >= place.workers || column >= columns) return;
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
  for (int64_t row = place.worker * 2; row < rows; row += place.workers * 2) {
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

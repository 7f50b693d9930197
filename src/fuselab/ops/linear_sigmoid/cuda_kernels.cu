// One logit per row, z = input w + b, and its sigmoid or its binary cross entropy, on NVIDIA GPUs.
//
// Memory is the limit: the input is read once, and the backward writes as much again. A warp owns
// one row at a time. A lane has `chunks` packs of `width` weights in registers, loads the row's
// packs at the same places (16 bytes each if width allows), and the warp adds by shuffles.
// `in_flight` rows are loaded before the first is used: 64 bytes per lane at a depth of 256 in
// bfloat16. Arithmetic is in float, sums over rows continue in double; their order depends on the
// grid only.
//
// Rows are walked grid-wide: warp i of n takes groups of in_flight rows i, i + n, ... Sizes and strides
// count elements; an input has stride 1 along its depth where width > 1.

#include "../_shared/cuda_vectors.h"
#include "../_shared/activations.h"

constexpr int block_warps = 8;
constexpr int threads = 32 * block_warps;
constexpr int in_flight = 4;

// The blocks that a multiprocessor's registers should allow: `most` if a lane has few elements of a
// row. Without that bound ptxas saves registers by using each load at once, so that each load waits
// for the one before.
template <int most, int elements>
constexpr int resident_blocks = elements <= 8 ? most : 1;

// The result for a logit: the probability, a loss per row, or a block's sum of losses.
enum class Kind { sigmoid, losses, loss };

// Returns log(1 + x) for x in [0, 1] to full relative precision: 2 artanh(x / (2 + x)), by its
// series to s^17.
FUSELAB_INLINE float log_of_one_plus(float x) {
  const float s = quotient(x, 2.0f + x), q = s * s;
  const float p = horner(q, 1.0 / 3, 1.0 / 5, 1.0 / 7, 1.0 / 9, 1.0 / 11, 1.0 / 13, 1.0 / 15,
                         1.0 / 17);
  return 2.0f * (s + s * (q * p));
}

// -(t log sigmoid(z) + (1 - t) log(1 - sigmoid(z))), with infinities where eager has them.
FUSELAB_INLINE float loss_of(float z, float target) {
  // The order matters: z + (-z) is exact, and log1p, small for a large |z|, keeps its digits.
  const float rest = product(1.0f - target, z) - (z > 0.0f ? 0.0f : z);
  return rest + log_of_one_plus(exponential(-absolute(z)));
}

// Returns sigmoid(z) - t. Near 1 it is computed from 1 - sigmoid(z) to keep its digits, for 1 - t
// is exact from 0.5 to 2. It is selected, not multiplied: an infinite target times a gate that
// underflowed would be NaN.
FUSELAB_INLINE float loss_gradient(float z, float target) {
  const Logistic<float> at = logistic(z);
  return target > 0.5f ? (1.0f - target) - at.complement : at.gate - target;
}

// A lane's part of a row: packs lane, lane + 32, ... of `width` elements, zeros past the row's end.
template <class Element, int width, int chunks>
struct Part {
  Pack<Element, width> pack[chunks];

  // Zeros first, then a load over them: with a select after the load, several loads shared a
  // register and waited for each other. Packs bypass the read-only cache, because ptxas moves such
  // loads past a __syncwarp().
  FUSELAB_INLINE void load_from(const Element* row, int64_t stride, int depth, bool inside) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const int column = (chunk * 32 + lane) * width;
#pragma unroll
      for (int i = 0; i < width; ++i) pack[chunk].element[i] = Element(0.0f);
      if (inside && column < depth) {
        if constexpr (width > 1) {
          static_assert(sizeof(pack[chunk]) == 16);
          *reinterpret_cast<uint4*>(pack[chunk].element) =
              __ldcg(reinterpret_cast<const uint4*>(row + column));
        } else {
          pack[chunk].element[0] = __ldg(row + column * stride);
        }
      }
    }
  }
  FUSELAB_INLINE float at(int chunk, int i) const {
    return widened<float>(pack[chunk].element[i]);
  }
  // Returns this lane's share of a row's logit.
  FUSELAB_INLINE float times(const Part& weight) const {
    float sum = 0.0f;
#pragma unroll
    for (int chunk = 0; chunk < chunks; ++chunk) {
#pragma unroll
      for (int i = 0; i < width; ++i) sum += at(chunk, i) * weight.at(chunk, i);
    }
    return sum;
  }
};

// Returns the logit of row k in lane k.
template <class Row>
FUSELAB_INLINE float logit_of_lane(const Row (&x)[in_flight], const Row& weight, float added) {
  float sum[in_flight], z = 0.0f;
#pragma unroll
  for (int k = 0; k < in_flight; ++k) sum[k] = x[k].times(weight);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
#pragma unroll
    for (int k = 0; k < in_flight; ++k) sum[k] += __shfl_xor_sync(~0u, sum[k], offset);
  }
#pragma unroll
  for (int k = 0; k < in_flight; ++k) {
    if (threadIdx.x % 32 == k) z = sum[k] + added;
  }
  return z;
}

// Adds, in ceil(columns / blockDim.x) blocks and in a fixed order, the sums (blocks, columns) of
// another kernel's blocks. The last column's total goes to `last`, the others' to `others`; either
// is null if not needed.
template <class Result>
__global__ void __launch_bounds__(1024)
    add_up(const double* __restrict__ sums, Result* __restrict__ others, Result* __restrict__ last,
           int64_t blocks, int64_t columns) {
  __shared__ double total[1024];
  const int64_t column = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  Result* const result = column < columns - 1 ? others : column < columns ? last : nullptr;
  double partial[4] = {};
  for (int64_t first = threadIdx.y; result && first < blocks; first += 4 * blockDim.y) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t block = first + i * blockDim.y;
      if (block < blocks) partial[i] += sums[block * columns + column];
    }
  }
  total[thread] = (partial[0] + partial[1]) + (partial[2] + partial[3]);
  for (int half = blockDim.y / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y < half) total[thread] += total[thread + half * blockDim.x];
  }
  if (result && threadIdx.y == 0) assign(result[result == last ? 0 : column], total[thread]);
}

// Returns, in thread 0, the sum of `value` over the first in_flight lanes of every warp.
FUSELAB_INLINE double sum_over_block(double value) {
  __shared__ double of_warp[block_warps];
#pragma unroll
  for (int offset = in_flight / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(~0u, value, offset);
  }
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  double total = 0.0;
  for (int warp = 0; warp < block_warps; ++warp) total += of_warp[warp];
  return total;
}

// output: a probability or loss per row; if kind is loss, sums[block] of losses times factor.
template <Kind kind, class Element, class Target, class Output, int width, int chunks>
__global__ void __launch_bounds__(threads, resident_blocks<4, chunks * width>)
    forward(const Element* __restrict__ input, const Element* __restrict__ weight,
            const Element* __restrict__ bias, const Target* __restrict__ target,
            Output* __restrict__ output, int64_t rows, int64_t depth_argument, int64_t input_row,
            int64_t input_column, int64_t weight_column, int64_t target_row, double factor) {
  const int depth = int(depth_argument);
  const int lane = threadIdx.x % 32;
  const int64_t warps = int64_t(gridDim.x) * block_warps;
  const float added = bias ? widened<float>(*bias) : 0.0f;
  Part<Element, width, chunks> w;
  w.load_from(weight, weight_column, depth, true);
  double total = 0.0;
  for (int64_t first = (int64_t(blockIdx.x) * block_warps + threadIdx.x / 32) * in_flight;
       first < rows; first += warps * in_flight) {
    const int64_t row = first + lane;  // lane k has the values of row k
    const bool inside = lane < in_flight && row < rows;
    Target wanted;
    if constexpr (kind != Kind::sigmoid) wanted = target[min(row, rows - 1) * target_row];
    Part<Element, width, chunks> x[in_flight];
#pragma unroll
    for (int k = 0; k < in_flight; ++k) {
      x[k].load_from(input + min(first + k, rows - 1) * input_row, input_column, depth, true);
    }
    __syncwarp();  // all loads are issued before the first is used
    const float z = logit_of_lane(x, w, added);
    if (inside) {
      if constexpr (kind == Kind::sigmoid) {
        assign(output[row], logistic(z).gate);
      } else {
        const float loss = loss_of(z, widened<float>(wanted));
        if constexpr (kind == Kind::losses) assign(output[row], loss);
        total += static_cast<double>(loss);
      }
    }
  }
  if constexpr (kind == Kind::loss) {
    total = sum_over_block(total);
    if (threadIdx.x == 0) assign(output[blockIdx.x], total * factor);
  }
}

// Computes the gradient of input (null if not needed), and every block's sums for those of weight
// and bias: weight_sums[block][column] and bias_sums[block], in rows of depth + 1. saved is the
// output of sigmoid or the target of a loss, whose logit is computed again from the row that the
// warp has loaded. factor is 1 over the number by which the loss's mean is divided.
template <Kind kind, class Element, class Saved, class Grad, int width, int chunks>
__global__ void __launch_bounds__(threads, resident_blocks<3, chunks * width>)
    backward(const Grad* __restrict__ grad, const Saved* __restrict__ saved,
             const Element* __restrict__ input, const Element* __restrict__ weight,
             const Element* __restrict__ bias, Element* __restrict__ grad_input,
             double* __restrict__ weight_sums, double* __restrict__ bias_sums, int64_t rows,
             int64_t depth_argument, int64_t grad_row, int64_t saved_row, int64_t input_row,
             int64_t input_column, int64_t weight_column, float factor) {
  const int depth = int(depth_argument);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t warps = int64_t(gridDim.x) * block_warps;
  const float added = bias ? widened<float>(*bias) : 0.0f;
  Part<Element, width, chunks> w;
  w.load_from(weight, weight_column, depth, true);
  float of_weight[chunks][width] = {};
  double of_bias = 0.0;
  for (int64_t first = (int64_t(blockIdx.x) * block_warps + warp) * in_flight; first < rows;
       first += warps * in_flight) {
    const int64_t row = first + lane;  // lane k has the values of row k
    const bool inside = lane < in_flight && row < rows;
    Grad of_output = Grad(0.0f);
    Saved kept = Saved(0.0f);
    if (inside) {
      of_output = __ldg(grad + row * grad_row);
      kept = __ldg(saved + row * saved_row);
    }
    Part<Element, width, chunks> x[in_flight];
#pragma unroll
    for (int k = 0; k < in_flight; ++k) {
      x[k].load_from(input + (first + k) * input_row, input_column, depth, first + k < rows);
    }
    __syncwarp();  // all loads are issued before the first is used
    const float value = widened<float>(kept);
    float of_row;
    if constexpr (kind == Kind::sigmoid) {
      of_row = value * (1.0f - value);
    } else {
      of_row = loss_gradient(logit_of_lane(x, w, added), value);
    }
    // Masked by a select: an infinite bias would make a row past the edge NaN.
    of_row = inside ? widened<float>(of_output) * factor * of_row : 0.0f;
    of_bias += static_cast<double>(of_row);
#pragma unroll
    for (int k = 0; k < in_flight; ++k) {
      const float of_logit = __shfl_sync(~0u, of_row, k);
#pragma unroll
      for (int chunk = 0; chunk < chunks; ++chunk) {
        const int column = (chunk * 32 + lane) * width;
        Pack<Element, width> result;
#pragma unroll
        for (int i = 0; i < width; ++i) {
          of_weight[chunk][i] += of_logit * x[k].at(chunk, i);
          assign(result.element[i], of_logit * w.at(chunk, i));
        }
        if (grad_input && first + k < rows && column < depth) {
          store<(width > 1)>(grad_input + (first + k) * depth + column, result);
        }
      }
    }
  }
  if (bias_sums) {
    of_bias = sum_over_block(of_bias);
    if (threadIdx.x == 0) bias_sums[blockIdx.x * int64_t(depth + 1)] = of_bias;
  }
  if (!weight_sums) return;
  __shared__ float shared[block_warps][32 * width];
#pragma unroll
  for (int chunk = 0; chunk < chunks; ++chunk) {
    __syncthreads();  // the chunk before has been read
#pragma unroll
    for (int i = 0; i < width; ++i) shared[warp][i * 32 + lane] = of_weight[chunk][i];
    __syncthreads();
    for (int at = threadIdx.x; at < 32 * width; at += threads) {
      const int column = chunk * 32 * width + at % 32 * width + at / 32;
      double total = 0.0;
      for (int from = 0; from < block_warps; ++from) total += static_cast<double>(shared[from][at]);
      if (column < depth) weight_sums[blockIdx.x * int64_t(depth + 1) + column] = total;
    }
  }
}

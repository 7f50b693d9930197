// One logit per row, z = input w + b, and what comes of it: sigmoid or binary cross entropy, on NVIDIA
// GPUs.
//
// The floor is memory: the input is read once, the gradient's pass writes as much again. A warp owns a
// row at a time: a lane holds `chunks` packs of `width` weights in registers, loads the row's packs at
// the same places (16 bytes each where width says so), and the warp adds up by shuffles. `in_flight`
// rows are loaded before the first is used: 64 bytes per lane at a depth of 256 in bfloat16.
// Arithmetic is in float, sums over rows go on in double; their order depends on the grid alone.
//
// Rows are walked grid-wide: warp i of n takes groups of in_flight rows i, i + n, ... Sizes and strides
// count elements; an input has stride 1 along its depth where width > 1.

#include "../activations/cuda_vectors.h"
#include "../activations/functions.h"

constexpr int block_warps = 8;
constexpr int threads = 32 * block_warps;
constexpr int in_flight = 4;

// What is made of a logit: the probability, a loss per row, or a block's sum of losses.
enum class Kind { sigmoid, losses, loss };

// log(1 + x) for x in [0, 1], relatively exact: 2 artanh(x / (2 + x)), its series to s^17.
FUSELAB_INLINE float log_of_one_plus(float x) {
  const float s = quotient(x, 2.0f + x), q = s * s;
  const float p = horner(q, 1.0 / 3, 1.0 / 5, 1.0 / 7, 1.0 / 9, 1.0 / 11, 1.0 / 13, 1.0 / 15,
                         1.0 / 17);
  return 2.0f * (s + s * (q * p));
}

// -(t log sigmoid(z) + (1 - t) log(1 - sigmoid(z))), with infinities where eager has them.
FUSELAB_INLINE float loss_of(float z, float target) {
  // In this order: z + (-z) is exact, and log1p, small where |z| is large, keeps its digits.
  const float rest = product(1.0f - target, z) - (z > 0.0f ? 0.0f : z);
  return rest + log_of_one_plus(exponential(-absolute(z)));
}

// sigmoid(z) - t, which near 1 keeps its digits by way of 1 - sigmoid(z).
FUSELAB_INLINE float loss_gradient(float z, float target) {
  const Logistic<float> at = logistic(z);
  return (1.0f - target) * at.gate - target * at.complement;
}

// A lane's part of one row, or of the weights: packs lane, lane + 32, ... of `width` elements.
template <int width, int chunks>
struct Part {
  float value[chunks][width];

  template <class Element>
  FUSELAB_INLINE void load_from(const Element* row, int64_t stride, int depth, bool inside) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const int column = (chunk * 32 + lane) * width;
      Pack<Element, width> pack;
      const bool there = inside && column < depth;
      if (there) {
        if constexpr (width > 1) {
          pack = load<true, width>(row + column);
        } else {
          pack.element[0] = __ldg(row + column * stride);
        }
      }
#pragma unroll
      for (int i = 0; i < width; ++i) {
        value[chunk][i] = there ? widened<float>(pack.element[i]) : 0.0f;
      }
    }
  }

  FUSELAB_INLINE float dot(const Part& other) const {
    float sum = 0.0f;
#pragma unroll
    for (int chunk = 0; chunk < chunks; ++chunk) {
#pragma unroll
      for (int i = 0; i < width; ++i) sum += value[chunk][i] * other.value[chunk][i];
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    return sum;
  }
};

// The sum of every warp's `value` (of lane 0), in thread 0.
FUSELAB_INLINE double sum_over_warps(double value) {
  __shared__ double of_warp[block_warps];
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  double total = 0.0;
  for (int warp = 0; warp < block_warps; ++warp) total += of_warp[warp];
  return total;
}

// output: a probability or loss per row; where kind is loss, sums[block] of losses times factor.
template <Kind kind, class Element, class Target, class Output, int width, int chunks>
__global__ void __launch_bounds__(threads)
    forward(const Element* __restrict__ input, const Element* __restrict__ weight,
            const Element* __restrict__ bias, const Target* __restrict__ target,
            Output* __restrict__ output, int64_t rows, int64_t depth_argument, int64_t input_row,
            int64_t input_column, int64_t weight_column, int64_t target_row, double factor) {
  const int depth = int(depth_argument);
  const int lane = threadIdx.x % 32;
  const int64_t warps = int64_t(gridDim.x) * block_warps;
  const float added = bias ? widened<float>(*bias) : 0.0f;
  Part<width, chunks> w;
  w.load_from(weight, weight_column, depth, true);
  double total = 0.0;
  for (int64_t first = (int64_t(blockIdx.x) * block_warps + threadIdx.x / 32) * in_flight;
       first < rows; first += warps * in_flight) {
    Part<width, chunks> x[in_flight];
#pragma unroll
    for (int k = 0; k < in_flight; ++k) {
      x[k].load_from(input + (first + k) * input_row, input_column, depth, first + k < rows);
    }
    float z = 0.0f;  // lane k has the logit of row k
#pragma unroll
    for (int k = 0; k < in_flight; ++k) {
      const float sum = x[k].dot(w) + added;
      if (lane == k) z = sum;
    }
    const int64_t row = first + lane;
    if (lane < in_flight && row < rows) {
      if constexpr (kind == Kind::sigmoid) {
        assign(output[row], logistic(z).gate);
      } else {
        const float loss = loss_of(z, widened<float>(target[row * target_row]));
        if constexpr (kind == Kind::losses) assign(output[row], loss);
        total += static_cast<double>(loss);
      }
    }
  }
  if constexpr (kind == Kind::loss) {
#pragma unroll
    for (int offset = in_flight / 2; offset > 0; offset /= 2) {
      total += __shfl_xor_sync(~0u, total, offset);
    }
    total = sum_over_warps(total);
    if (threadIdx.x == 0) assign(output[blockIdx.x], total * factor);
  }
}

// Gradients of input (null where not needed), and every block's sums for those of weight and bias:
// weight_sums[block][column], bias_sums[block]. saved is the output of sigmoid, the target of a loss,
// whose logit is formed again from the row that the warp has loaded. factor is what the loss's mean
// divides by.
template <Kind kind, class Element, class Saved, class Grad, int width, int chunks>
__global__ void __launch_bounds__(threads)
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
  Part<width, chunks> w, of_weight;
  w.load_from(weight, weight_column, depth, true);
#pragma unroll
  for (int chunk = 0; chunk < chunks; ++chunk) {
#pragma unroll
    for (int i = 0; i < width; ++i) of_weight.value[chunk][i] = 0.0f;
  }
  double of_bias = 0.0;
  for (int64_t first = (int64_t(blockIdx.x) * block_warps + warp) * in_flight; first < rows;
       first += warps * in_flight) {
    Part<width, chunks> x[in_flight];
    float upstream[in_flight], kept[in_flight];
#pragma unroll
    for (int k = 0; k < in_flight; ++k) {
      const bool inside = first + k < rows;
      x[k].load_from(input + (first + k) * input_row, input_column, depth, inside);
      upstream[k] = inside ? widened<float>(grad[(first + k) * grad_row]) * factor : 0.0f;
      kept[k] = inside ? widened<float>(saved[(first + k) * saved_row]) : 0.0f;
    }
#pragma unroll
    for (int k = 0; k < in_flight; ++k) {
      if (first + k >= rows) break;
      float of_logit;
      if constexpr (kind == Kind::sigmoid) {
        of_logit = upstream[k] * (kept[k] * (1.0f - kept[k]));
      } else {
        of_logit = upstream[k] * loss_gradient(x[k].dot(w) + added, kept[k]);
      }
      of_bias += static_cast<double>(of_logit);
#pragma unroll
      for (int chunk = 0; chunk < chunks; ++chunk) {
        const int column = (chunk * 32 + lane) * width;
        Pack<Element, width> result;
#pragma unroll
        for (int i = 0; i < width; ++i) {
          of_weight.value[chunk][i] += of_logit * x[k].value[chunk][i];
          assign(result.element[i], of_logit * w.value[chunk][i]);
        }
        if (grad_input && column < depth) {
          store<(width > 1)>(grad_input + (first + k) * depth + column, result);
        }
      }
    }
  }
  if (bias_sums) {
    of_bias = sum_over_warps(of_bias);
    if (threadIdx.x == 0) bias_sums[blockIdx.x] = of_bias;
  }
  if (!weight_sums) return;
  __shared__ float shared[block_warps][32 * width];
#pragma unroll
  for (int chunk = 0; chunk < chunks; ++chunk) {
    __syncthreads();  // of the chunk before
#pragma unroll
    for (int i = 0; i < width; ++i) shared[warp][i * 32 + lane] = of_weight.value[chunk][i];
    __syncthreads();
    for (int at = threadIdx.x; at < 32 * width; at += threads) {
      const int column = chunk * 32 * width + at % 32 * width + at / 32;
      double total = 0.0;
      for (int from = 0; from < block_warps; ++from) total += static_cast<double>(shared[from][at]);
      if (column < depth) weight_sums[int64_t(blockIdx.x) * depth + column] = total;
    }
  }
}

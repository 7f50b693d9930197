// One logit per row, z = input w + b, and its sigmoid or its binary cross entropy, on the CPU.
//
// The input is read once, in vectors, by rows; the backward computes a loss's logit again while the
// row is in L1. Rows are split into `parts` of a fixed size, whatever the number of threads, so
// that sums are reproducible to the bit. Arithmetic is in float, sums over rows continue in double.
// Rows and weights have stride 1 along their depth.

#include <omp.h>

#include <algorithm>

#include "../../runtime/include/cpu_vectors.h"
#include "../_shared/activations.h"

enum class Kind { sigmoid, losses, loss };

constexpr int64_t parallel_from = 1 << 16;  // elements of the input

// Returns log(1 + x) for x in [0, 1] to full relative precision: 2 artanh(x / (2 + x)), by its
// series to s^17.
FUSELAB_INLINE Floats log_of_one_plus(Floats x) {
  const Floats s = x / (x + 2.0f), q = s * s;
  const Floats p = horner(q, 1.0 / 3, 1.0 / 5, 1.0 / 7, 1.0 / 9, 1.0 / 11, 1.0 / 13, 1.0 / 15,
                          1.0 / 17);
  return 2.0f * (s + s * (q * p));
}

// -(t log sigmoid(z) + (1 - t) log(1 - sigmoid(z))), with infinities where eager has them.
FUSELAB_INLINE Floats loss_of(Floats z, Floats target) {
  const Floats zero = constant<Floats>(0.0);
  // The order matters: z + (-z) is exact, and log1p, small for a large |z|, keeps its digits.
  const Floats rest = (1.0f - target) * z - choose(z > zero, zero, z);
  return rest + log_of_one_plus(exponential<Floats>(zero - absolute(z)));
}

// Returns sigmoid(z) - t. For t above a half it is computed from 1 - sigmoid(z), so that the
// difference of two numbers near 1 keeps its digits. An infinite or NaN target gives eager's
// result.
FUSELAB_INLINE Floats loss_gradient(Floats z, Floats target) {
  const Logistic<Floats> at = logistic<Floats>(z);
  return choose(target > constant<Floats>(0.5), (1.0f - target) - at.complement, at.gate - target);
}

template <class Element>
FUSELAB_INLINE float dot(const Element* row, const Element* weight, int64_t depth) {
  constexpr int64_t step = lanes<Floats>;
  Floats sum[4] = {};
  int64_t i = 0;
  for (; i + 4 * step <= depth; i += 4 * step) {
    for (int64_t k = 0; k < 4; ++k) {
      sum[k] += load<Floats>(row + i + step * k) * load<Floats>(weight + i + step * k);
    }
  }
  for_each_vector<Floats>(depth - i, [&](int64_t at, auto part) {
    sum[0] += load<Floats>(row + i + at, part) * load<Floats>(weight + i + at, part);
  });
  return sum_of((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

constexpr int64_t group = lanes<Floats>;  // rows whose logits fill a vector

// The first `count` values of a strided vector, 0 in the lanes past them.
template <class Element>
FUSELAB_INLINE Floats gathered(const Element* from, int64_t stride, int64_t count) {
  Element lane[group] = {};
  for (int64_t i = 0; i < count; ++i) lane[i] = from[i * stride];
  return load<Floats>(lane);
}

template <class Element>
FUSELAB_INLINE float value_of(const Element* pointer) {
  return pointer ? gathered(pointer, 1, 1)[0] : 0.0f;
}

// The logits of up to `group` rows.
template <class Element>
FUSELAB_INLINE Floats logits(const Element* rows, int64_t row_stride, const Element* weight,
                             float added, int64_t depth, int64_t count) {
  Floats z = {};
  for (int64_t i = 0; i < count; ++i) z[i] = dot(rows + i * row_stride, weight, depth) + added;
  return z;
}

// output: a probability or loss per row. If kind is loss, it is the sum of all losses over divisor,
// with partial sums in sums[part], which may be null for one part.
template <Kind kind, class Element, class Target, class Output>
void forward(const Element* input, const Element* weight, const Element* bias, const Target* target,
             Output* output, double* sums, int64_t rows, int64_t depth, int64_t rows_per_part,
             int64_t input_row, int64_t target_row, double divisor) {
  const float added = value_of(bias);
  const int64_t parts = (rows + rows_per_part - 1) / rows_per_part;
#pragma omp parallel for if (rows * depth >= parallel_from)
  for (int64_t part = 0; part < parts; ++part) {
    double total = 0.0;
    const int64_t end = std::min(rows, (part + 1) * rows_per_part);
    for (int64_t row = part * rows_per_part; row < end; row += group) {
      const int64_t count = std::min(group, end - row);
      const Floats z = logits(input + row * input_row, input_row, weight, added, depth, count);
      Floats result;
      if constexpr (kind == Kind::sigmoid) {
        result = logistic<Floats>(z).gate;
      } else {
        result = loss_of(z, gathered(target + row * target_row, target_row, count));
      }
      if constexpr (kind == Kind::loss) {
        for (int64_t i = 0; i < count; ++i) total += result[i];
      } else {
        store<false>(output + row, result, First{count});
      }
    }
    if constexpr (kind == Kind::loss) {
      if (sums) {
        sums[part] = total;
      } else {
        store<false>(output, constant<Floats>(total / divisor), First{1});
      }
    }
  }
  if (kind == Kind::loss && sums) {
    double total = 0.0;
    for (int64_t part = 0; part < parts; ++part) total += sums[part];
    store<false>(output, constant<Floats>(total / divisor), First{1});
  }
}

// Computes the gradients of input, weight and bias, null if not needed. saved is the output of
// sigmoid or the target of a loss. weight_sums has, per part, a float for every column and up to 15
// more.
template <Kind kind, class Element, class Saved, class Grad>
void backward(const Grad* grad, const Saved* saved, const Element* input, const Element* weight,
              const Element* bias, Element* grad_input, Element* grad_weight, Element* grad_bias,
              float* weight_sums, double* bias_sums, int64_t rows, int64_t depth,
              int64_t rows_per_part, int64_t grad_row, int64_t saved_row, int64_t input_row,
              float factor) {
  const float added = value_of(bias);
  const int64_t parts = (rows + rows_per_part - 1) / rows_per_part;
  const int64_t padded = (depth + 15) / 16 * 16;  // as the launcher allocates it
#pragma omp parallel for if (rows * depth >= parallel_from)
  for (int64_t part = 0; part < parts; ++part) {
    double of_bias = 0.0;
    float* of_weight = weight_sums + part * padded;
    std::fill_n(of_weight, padded, 0.0f);
    const int64_t end = std::min(rows, (part + 1) * rows_per_part);
    for (int64_t first = part * rows_per_part; first < end; first += group) {
      const int64_t count = std::min(group, end - first);
      const Element* from = input + first * input_row;
      const Floats upstream = gathered(grad + first * grad_row, grad_row, count) * factor;
      const Floats kept = gathered(saved + first * saved_row, saved_row, count);
      Floats of_logit;
      if constexpr (kind == Kind::sigmoid) {
        of_logit = upstream * (kept * (1.0f - kept));
      } else {
        const Floats z = logits(from, input_row, weight, added, depth, count);
        of_logit = upstream * loss_gradient(z, kept);
      }
      for (int64_t i = 0; i < count; ++i) of_bias += of_logit[i];
      // Columns are the outer loop, so that a sum is read and written once per group of rows.
      for_each_vector<Floats>(depth, [&](int64_t at, auto lanes) {
        Floats sum = load<Floats>(of_weight + at);
        const Floats w = load<Floats>(weight + at, lanes);
        for (int64_t i = 0; i < count; ++i) {
          const float gradient = of_logit[i];
          sum += gradient * load<Floats>(from + i * input_row + at, lanes);
          if (grad_input) {
            store<false>(grad_input + (first + i) * depth + at, gradient * w, lanes);
          }
        }
        store<false>(of_weight + at, sum);
      });
    }
    bias_sums[part] = of_bias;
  }
  if (grad_weight) {
    for_each_vector<Floats>(depth, [&](int64_t at, auto lanes) {
      double total[group] = {};
      for (int64_t part = 0; part < parts; ++part) {
        accumulate(total, load<Floats>(weight_sums + part * padded + at));
      }
      Floats result;
      for (int64_t lane = 0; lane < group; ++lane) result[lane] = static_cast<float>(total[lane]);
      store<false>(grad_weight + at, result, lanes);
    });
  }
  if (grad_bias) {
    double total = 0.0;
    for (int64_t part = 0; part < parts; ++part) total += bias_sums[part];
    store<false>(grad_bias, constant<Floats>(total), First{1});
  }
}

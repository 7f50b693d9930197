// row_statistics in C++ for CPUs, ejected from the PyTorch code in reference.py.

#include "cpu_sweep.h"

namespace kernels {

// Computes mean, centred, is_positive, count. A thread owns rows (length) and sweeps twice over
// their columns (width).
template <Lane lane, class Real, class X, class Weight, class Mean, class Centred, class IsPositive,
          class Count_2>
void row_statistics(const X* x_data, const Weight* weight_data, Mean* mean_data,
                    Centred* centred_data, IsPositive* is_positive_data, Count_2* count_data,
                    Loops<6> loops) {
  const int64_t columns = loops.columns;
  using V = Vector<Real>;
  const auto [x_array, weight_array, mean_array, centred_array, is_positive_array, count_array] =
      arrays(x_data, weight_data, mean_data, centred_data, is_positive_data, count_data);
  sweep<Real, lane>(loops, [&](const auto& rows) {
    const auto [mean_2, sum_1] = rows.reduce([=](auto at) {
      const auto x = at(x_array);
      return std::tuple{Sum{x}, Count{math::mask<V>(x > Real(0))}};
    });
    rows.once([=](auto at) {
      const auto mean = at(mean_2) / Real(columns);
      at.store(mean_array, mean);
      at.store(count_array, math::integers<V>(at(sum_1)));
    });
    const auto mean = rows.value([=](auto at) { return at(mean_2) / Real(columns); });
    rows.each([=](auto at) {
      const auto x = at(x_array);
      const auto weight = at(weight_array);
      const auto centred = (x - at(mean)) * weight;
      at.store(centred_array, centred);
      at.store(is_positive_array, centred > Real(0));
    });
  });
}

// Computes grad_x, grad_weight. Sums grad_weight over the rows. A thread owns rows (length) and
// sweeps twice over their columns (width).
template <Lane lane, class Real, class GradCentred, class Weight, class X, class Mean, class GradX,
          class GradWeight>
void row_statistics_backward(const GradCentred* grad_centred_data, const Weight* weight_data,
                             const X* x_data, const Mean* mean_data, GradX* grad_x_data,
                             GradWeight* grad_weight_data, Loops<6> loops) {
  const int64_t columns = loops.columns;
  const auto [grad_centred_array, weight_array, x_array, mean_array, grad_x_array,
              grad_weight_array] =
      arrays(grad_centred_data, weight_data, x_data, mean_data, grad_x_data, grad_weight_data);
  sweep_and_sum<Real, lane>(loops, std::tuple{grad_weight_array},
                            [&](const auto& rows, auto grad_weight_sum) {
    const auto sum_3 = rows.reduce([=](auto at) {
      const auto grad_centred = at(grad_centred_array);
      const auto weight = at(weight_array);
      const auto mul_12 = math::rounded(grad_centred * weight);
      return Sum{-mul_12};
    });
    const auto div = rows.value([=](auto at) { return at(sum_3) / Real(columns); });
    const auto mean = rows.load(mean_array);
    rows.each([=](auto at) {
      const auto grad_centred = at(grad_centred_array);
      const auto weight = at(weight_array);
      const auto mul_12 = math::rounded(grad_centred * weight);
      const auto x = at(x_array);
      at.store(grad_x_array, mul_12 + at(div));
      at.add(grad_weight_sum, grad_centred * (x - at(mean)));
    });
  });
}

}

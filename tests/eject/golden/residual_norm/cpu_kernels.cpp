// residual_norm in C++ for CPUs, ejected from the PyTorch code in reference.py.

#include "cpu_sweep.h"

namespace kernels {

// Computes output. A thread owns rows (batch, length) and sweeps 3 times over their columns
// (width).
template <Lane lane, class Real, class X, class Residual, class Weight, class Bias, class Output>
void residual_norm(const X* x_data, const Residual* residual_data, const Weight* weight_data,
                   const Bias* bias_data, Output* output_data, Loops<5> loops) {
  const int64_t columns = loops.columns;
  const auto [x_array, residual_array, weight_array, bias_array, output_array] =
      arrays(x_data, residual_data, weight_data, bias_data, output_data);
  sweep<Real, lane>(loops, [&](const auto& rows) {
    const auto normed_total = rows.reduce([=](auto at) {
      const auto x = at(x_array);
      const auto residual = at(residual_array);
      const auto hidden = x + residual;
      return Sum{hidden};
    });
    const auto normed_mean = rows.value([=](auto at) { return at(normed_total) / Real(columns); });
    const auto normed_squares = rows.reduce([=](auto at) {
      const auto x = at(x_array);
      const auto residual = at(residual_array);
      const auto hidden = x + residual;
      const auto normed = hidden - at(normed_mean);
      return Sum{normed * normed};
    });
    const auto normed_3 = rows.value([=](auto at) {
      const auto normed_2 = (at(normed_squares) / Real(columns)) + Real(1e-05);
      return math::rsqrt(normed_2);
    });
    rows.each([=](auto at) {
      const auto x = at(x_array);
      const auto residual = at(residual_array);
      const auto hidden = x + residual;
      const auto normed = hidden - at(normed_mean);
      const auto normed_4 = normed * at(normed_3);
      const auto weight = at(weight_array);
      const auto normed_5 = math::rounded(normed_4 * weight);
      const auto bias = at(bias_array);
      const auto normed_6 = normed_5 + bias;
      at.store(output_array, ((normed_6 * Real(0.5)) * (math::erf(normed_6 *
          Real(0.7071067811865476)) + Real(1))) * Real(2));
    });
  });
}

// Computes grad_x, grad_residual, grad_weight, grad_bias. Sums grad_weight, grad_bias over the
// rows. A thread owns rows (batch, length) and sweeps 4 times over their columns (width).
template <Lane lane, class Real, class X, class Residual, class GradOutput, class Weight,
          class Bias, class GradX, class GradResidual, class GradWeight, class GradBias>
void residual_norm_backward(const X* x_data, const Residual* residual_data,
                            const GradOutput* grad_output_data, const Weight* weight_data,
                            const Bias* bias_data, GradX* grad_x_data,
                            GradResidual* grad_residual_data, GradWeight* grad_weight_data,
                            GradBias* grad_bias_data, Loops<9> loops) {
  const int64_t columns = loops.columns;
  const auto [x_array, residual_array, grad_output_array, weight_array, bias_array, grad_x_array,
              grad_residual_array, grad_weight_array, grad_bias_array] =
      arrays(x_data, residual_data, grad_output_data, weight_data, bias_data, grad_x_data,
             grad_residual_data, grad_weight_data, grad_bias_data);
  sweep_and_sum<Real, lane>(loops, std::tuple{grad_weight_array, grad_bias_array},
                            [&](const auto& rows, auto grad_weight_sum, auto grad_bias_sum) {
    const auto mul_33_kept = rows.room();
    const auto normed_total = rows.reduce([=](auto at) {
      const auto x = at(x_array);
      const auto residual = at(residual_array);
      const auto hidden = x + residual;
      return Sum{hidden};
    });
    const auto normed_mean = rows.value([=](auto at) { return at(normed_total) / Real(columns); });
    const auto normed_squares = rows.reduce([=](auto at) {
      const auto x = at(x_array);
      const auto residual = at(residual_array);
      const auto hidden = x + residual;
      const auto normed = hidden - at(normed_mean);
      return Sum{normed * normed};
    });
    const auto normed_3 = rows.value([=](auto at) {
      const auto normed_2 = (at(normed_squares) / Real(columns)) + Real(1e-05);
      return math::rsqrt(normed_2);
    });
    const auto [sum_1, sum_2] = rows.reduce([=](auto at) {
      const auto grad_output = at(grad_output_array);
      const auto x = at(x_array);
      const auto residual = at(residual_array);
      const auto hidden = x + residual;
      const auto normed = hidden - at(normed_mean);
      const auto normed_4 = normed * at(normed_3);
      const auto weight = at(weight_array);
      const auto normed_5 = math::rounded(normed_4 * weight);
      const auto bias = at(bias_array);
      const auto normed_6 = normed_5 + bias;
      const auto mul_33 = at.keep(mul_33_kept, (grad_output * Real(2)) *
          (math::rounded((math::erf(normed_6 * Real(0.7071067811865476)) + Real(1)) * Real(0.5)) +
          math::rounded(normed_6 * (math::exp((normed_6 * normed_6) * Real(-0.5)) *
          Real(0.3989422804014327)))));
      const auto mul_35 = mul_33 * weight;
      return std::tuple{Sum{mul_35}, Sum{mul_35 * normed_4}};
    });
    const auto div = rows.value([=](auto at) { return at(normed_3) / Real(columns); });
    rows.each([=](auto at) {
      const auto mul_33 = at(mul_33_kept);
      const auto weight = at(weight_array);
      const auto mul_35 = mul_33 * weight;
      const auto x = at(x_array);
      const auto residual = at(residual_array);
      const auto hidden = x + residual;
      const auto normed = hidden - at(normed_mean);
      const auto normed_4 = normed * at(normed_3);
      const auto grad_x = at(div) * ((math::rounded(mul_35 * Real(columns)) - at(sum_1)) -
          math::rounded(normed_4 * at(sum_2)));
      at.store(grad_x_array, grad_x);
      at.store(grad_residual_array, grad_x);
      at.add(grad_weight_sum, mul_33 * normed_4);
      at.add(grad_bias_sum, mul_33);
    });
  });
}

}

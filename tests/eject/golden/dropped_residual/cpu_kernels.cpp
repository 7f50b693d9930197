// dropped_residual in C++ for CPUs, ejected from the PyTorch code in reference.py.

#include "cpu_dropout.h"
#include "cpu_sweep.h"

namespace kernels {

// Computes dropout_kept, output. A thread owns rows (batch, length) and sweeps 3 times over their
// columns (width).
template <Lane lane, class Real, class Seed, class X, class Residual, class Weight, class Bias,
          class DropoutKept, class Output>
void dropped_residual(const Seed* seed_data, const X* x_data, const Residual* residual_data,
                      const Weight* weight_data, const Bias* bias_data,
                      DropoutKept* dropout_kept_data, Output* output_data, Loops<8> loops) {
  const int64_t columns = loops.columns;
  using V = Vector<Real>;
  const auto [seed_array, batch_length_width_position_array, x_array, residual_array, weight_array,
              bias_array, dropout_kept_array, output_array] =
      arrays(seed_data, position, x_data, residual_data, weight_data, bias_data, dropout_kept_data,
             output_data);
  sweep<Real, lane>(loops, [&](const auto& rows) {
    const auto hidden_kept = rows.room();
    const auto seed = rows.load(seed_array);
    const auto layer_norm_total = rows.reduce_by_stretch([=](auto at) {
      const auto x = at(x_array);
      const auto batch_length_width_position = at(batch_length_width_position_array);
      const auto dropout = math::kept<V>(at(seed), batch_length_width_position, 0u, 429496729u);
      const auto residual = at(residual_array);
      const auto hidden = at.keep(hidden_kept, math::rounded((x * math::real_of_mask<V>(dropout)) *
          Real(1.1111111111111112)) + residual);
      return Sum{hidden};
    });
    const auto layer_norm_mean = rows.value([=](auto at) {
      return at(layer_norm_total) / Real(columns);
    });
    const auto layer_norm_squares = rows.reduce([=](auto at) {
      const auto hidden = at(hidden_kept);
      const auto layer_norm = hidden - at(layer_norm_mean);
      return Sum{layer_norm * layer_norm};
    });
    const auto layer_norm_2 = rows.value([=](auto at) {
      return math::rsqrt((at(layer_norm_squares) / Real(columns)) + Real(1e-05));
    });
    rows.each_by_stretch([=](auto at) {
      const auto batch_length_width_position = at(batch_length_width_position_array);
      const auto dropout = math::kept<V>(at(seed), batch_length_width_position, 0u, 429496729u);
      const auto hidden = at(hidden_kept);
      const auto layer_norm = hidden - at(layer_norm_mean);
      const auto weight = at(weight_array);
      const auto bias = at(bias_array);
      at.store(dropout_kept_array, dropout);
      at.store(output_array, math::rounded((layer_norm * at(layer_norm_2)) * weight) + bias);
    });
  });
}

// Computes grad_residual, grad_x, grad_weight, grad_bias. Sums grad_weight, grad_bias over the
// rows. A thread owns rows (batch, length) and sweeps 4 times over their columns (width).
template <Lane lane, class Real, class X, class DropoutKept, class Residual, class GradOutput,
          class Weight, class GradResidual, class GradX, class GradWeight, class GradBias>
void dropped_residual_backward(const X* x_data, const DropoutKept* dropout_kept_data,
                               const Residual* residual_data, const GradOutput* grad_output_data,
                               const Weight* weight_data, GradResidual* grad_residual_data,
                               GradX* grad_x_data, GradWeight* grad_weight_data,
                               GradBias* grad_bias_data, Loops<9> loops) {
  const int64_t columns = loops.columns;
  using V = Vector<Real>;
  const auto [x_array, dropout_kept_array, residual_array, grad_output_array, weight_array,
              grad_residual_array, grad_x_array, grad_weight_array, grad_bias_array] =
      arrays(x_data, dropout_kept_data, residual_data, grad_output_data, weight_data,
             grad_residual_data, grad_x_data, grad_weight_data, grad_bias_data);
  sweep_and_sum<Real, lane>(loops, std::tuple{grad_weight_array, grad_bias_array},
                            [&](const auto& rows, auto grad_weight_sum, auto grad_bias_sum) {
    const auto [layer_norm_total, sum_1] = rows.reduce([=](auto at) {
      const auto x = at(x_array);
      const auto dropout_kept = at(dropout_kept_array);
      const auto dropout = math::real_of_mask<V>(dropout_kept);
      const auto residual = at(residual_array);
      const auto hidden = math::rounded((x * dropout) * Real(1.1111111111111112)) + residual;
      const auto grad_output = at(grad_output_array);
      const auto weight = at(weight_array);
      const auto mul_30 = grad_output * weight;
      return std::tuple{Sum{hidden}, Sum{mul_30}};
    });
    const auto layer_norm_mean = rows.value([=](auto at) {
      return at(layer_norm_total) / Real(columns);
    });
    const auto layer_norm_squares = rows.reduce([=](auto at) {
      const auto x = at(x_array);
      const auto dropout_kept = at(dropout_kept_array);
      const auto dropout = math::real_of_mask<V>(dropout_kept);
      const auto residual = at(residual_array);
      const auto hidden = math::rounded((x * dropout) * Real(1.1111111111111112)) + residual;
      const auto sub_23 = hidden - at(layer_norm_mean);
      return Sum{sub_23 * sub_23};
    });
    const auto layer_norm = rows.value([=](auto at) {
      return math::rsqrt((at(layer_norm_squares) / Real(columns)) + Real(1e-05));
    });
    const auto sum_2 = rows.reduce([=](auto at) {
      const auto grad_output = at(grad_output_array);
      const auto weight = at(weight_array);
      const auto mul_30 = grad_output * weight;
      const auto x = at(x_array);
      const auto dropout_kept = at(dropout_kept_array);
      const auto dropout = math::real_of_mask<V>(dropout_kept);
      const auto residual = at(residual_array);
      const auto hidden = math::rounded((x * dropout) * Real(1.1111111111111112)) + residual;
      const auto sub_23 = hidden - at(layer_norm_mean);
      const auto mul_29 = sub_23 * at(layer_norm);
      return Sum{mul_30 * mul_29};
    });
    const auto div = rows.value([=](auto at) { return at(layer_norm) / Real(columns); });
    rows.each([=](auto at) {
      const auto grad_output = at(grad_output_array);
      const auto weight = at(weight_array);
      const auto mul_30 = grad_output * weight;
      const auto x = at(x_array);
      const auto dropout_kept = at(dropout_kept_array);
      const auto dropout = math::real_of_mask<V>(dropout_kept);
      const auto residual = at(residual_array);
      const auto hidden = math::rounded((x * dropout) * Real(1.1111111111111112)) + residual;
      const auto sub_23 = hidden - at(layer_norm_mean);
      const auto mul_29 = sub_23 * at(layer_norm);
      const auto mul_34 = at(div) * ((math::rounded(mul_30 * Real(columns)) - at(sum_1)) -
          math::rounded(mul_29 * at(sum_2)));
      at.store(grad_residual_array, mul_34);
      at.store(grad_x_array, (mul_34 * Real(1.1111111111111112)) * dropout);
      at.add(grad_weight_sum, grad_output * mul_29);
      at.add(grad_bias_sum, grad_output);
    });
  });
}

}

// dropped_residual in CUDA C++, ejected from the PyTorch code in reference.py.
//
// Real is the type of the arithmetic. Tile says how threads share out rows and columns: the
// launcher chooses it for each call, and cuda_sweep.h describes the choices. A row that fits is
// kept in registers, so that each element is read once. The class of an operand is the type of its
// elements and how a thread reads a pack of them: Packed<float>, Strided<float> or Same<float>.

#include "cuda_sweep.h"
#include "cuda_dropout.h"

// Computes dropout_kept, output. Rows: batch, length; columns: width. Rows that do not fit in
// registers are read 3 times.
template <class Tile, class Real, class Seed, class X, class Residual, class Weight, class Bias,
          class DropoutKept, class Output>
__global__ void __launch_bounds__(Tile::threads) dropped_residual_kernel(
    const typename Seed::type* __restrict__ seed_pointer,
    const typename X::type* __restrict__ x_pointer,
    const typename Residual::type* __restrict__ residual_pointer,
    const typename Weight::type* __restrict__ weight_pointer,
    const typename Bias::type* __restrict__ bias_pointer,
    typename DropoutKept::type* __restrict__ dropout_kept_pointer,
    typename Output::type* __restrict__ output_pointer,
    const __grid_constant__ Loops<8> loops) {
  const Tile tile(loops.sizes);
  const int64_t columns = loops.sizes.columns;
  const Kept<X, Tile> x_tile(tile, x_pointer, loops.strides[2]);
  const Kept<Residual, Tile> residual_tile(tile, residual_pointer, loops.strides[3]);
  const Loaded<Weight, Tile> weight_tile(tile, weight_pointer, loops.strides[4]);
  const Loaded<Bias, Tile> bias_tile(tile, bias_pointer, loops.strides[5]);
  int64_t seed[Tile::rows];
#pragma unroll
  for (int r = 0; r < Tile::rows; ++r) {
    seed[r] = int64_t(seed_pointer[tile.row_offset(loops.strides[0], r)]);
  }
  Reduction<0, Sum, Real, Tile> layer_norm_total;
#pragma unroll Tile::unrolled
  for (int k = 0; k < tile.packs(); ++k) {
    const auto pack = tile.pack(k);
    const auto x_pack = x_tile.at(pack);
    const auto batch_length_width_position_pack = positions_at(loops.strides[1], pack);
    const auto residual_pack = residual_tile.at(pack);
#pragma unroll
    for (int i = 0; i < Tile::width; ++i) {
      const int r = Tile::row_of(i);
      const Real x = widened<Real>(x_pack.element[i]);
      const int64_t batch_length_width_position = batch_length_width_position_pack.element[i];
      const bool dropout = philox::kept(seed[r], batch_length_width_position, 0u, 429496729u);
      const Real residual = widened<Real>(residual_pack.element[i]);
      const Real hidden = ((x * Real(dropout)) * Real(1.1111111111111112)) + residual;
      if (pack.has(i)) layer_norm_total.add(i, hidden);
    }
  }
  reduce(tile, layer_norm_total);
  Real div_of_row[Tile::rows];
#pragma unroll
  for (int r = 0; r < Tile::rows; ++r) {
    div_of_row[r] = layer_norm_total[r] / columns;
  }
  Reduction<1, Sum, Real, Tile> layer_norm_squares;
#pragma unroll Tile::unrolled
  for (int k = 0; k < tile.packs(); ++k) {
    const auto pack = tile.pack(k);
    const auto x_pack = x_tile.at(pack);
    const auto batch_length_width_position_pack = positions_at(loops.strides[1], pack);
    const auto residual_pack = residual_tile.at(pack);
#pragma unroll
    for (int i = 0; i < Tile::width; ++i) {
      const int r = Tile::row_of(i);
      const Real x = widened<Real>(x_pack.element[i]);
      const int64_t batch_length_width_position = batch_length_width_position_pack.element[i];
      const bool dropout = philox::kept(seed[r], batch_length_width_position, 0u, 429496729u);
      const Real residual = widened<Real>(residual_pack.element[i]);
      const Real hidden = ((x * Real(dropout)) * Real(1.1111111111111112)) + residual;
      const Real layer_norm = hidden - div_of_row[r];
      if (pack.has(i)) layer_norm_squares.add(i, layer_norm * layer_norm);
    }
  }
  reduce(tile, layer_norm_squares);
  Real rsqrt_of_row[Tile::rows];
#pragma unroll
  for (int r = 0; r < Tile::rows; ++r) {
    rsqrt_of_row[r] = rsqrt((layer_norm_squares[r] / columns) + Real(1e-05));
  }
#pragma unroll Tile::unrolled
  for (int k = 0; k < tile.packs(); ++k) {
    const auto pack = tile.pack(k);
    const auto batch_length_width_position_pack = positions_at(loops.strides[1], pack);
    const auto x_pack = x_tile.at(pack);
    const auto residual_pack = residual_tile.at(pack);
    const auto weight_pack = weight_tile.at(pack);
    const auto bias_pack = bias_tile.at(pack);
    Pack<typename DropoutKept::type, Tile::width> dropout_kept_pack;
    Pack<typename Output::type, Tile::width> output_pack;
#pragma unroll
    for (int i = 0; i < Tile::width; ++i) {
      const int r = Tile::row_of(i);
      const int64_t batch_length_width_position = batch_length_width_position_pack.element[i];
      const bool dropout = philox::kept(seed[r], batch_length_width_position, 0u, 429496729u);
      const Real x = widened<Real>(x_pack.element[i]);
      const Real residual = widened<Real>(residual_pack.element[i]);
      const Real hidden = ((x * Real(dropout)) * Real(1.1111111111111112)) + residual;
      const Real layer_norm = hidden - div_of_row[r];
      const Real weight = widened<Real>(weight_pack.element[i]);
      const Real bias = widened<Real>(bias_pack.element[i]);
      assign(dropout_kept_pack.element[i], dropout);
      const Real output = ((layer_norm * rsqrt_of_row[r]) * weight) + bias;
      assign(output_pack.element[i], output);
    }
    store_at<DropoutKept>(dropout_kept_pointer, loops.strides[6], pack, dropout_kept_pack);
    store_at<Output>(output_pointer, loops.strides[7], pack, output_pack);
  }
}

// Computes layer_norm_mean, layer_norm, grad_residual, grad_x. Rows: batch, length; columns: width.
// Rows that do not fit in registers are read 4 times.
template <class Tile, class Real, class X, class DropoutKept, class Residual, class GradOutput,
          class Weight, class LayerNormMean, class LayerNorm, class GradResidual, class GradX>
__global__ void __launch_bounds__(Tile::threads) dropped_residual_backward_kernel(
    const typename X::type* __restrict__ x_pointer,
    const typename DropoutKept::type* __restrict__ dropout_kept_pointer,
    const typename Residual::type* __restrict__ residual_pointer,
    const typename GradOutput::type* __restrict__ grad_output_pointer,
    const typename Weight::type* __restrict__ weight_pointer,
    typename LayerNormMean::type* __restrict__ layer_norm_mean_pointer,
    typename LayerNorm::type* __restrict__ layer_norm_pointer,
    typename GradResidual::type* __restrict__ grad_residual_pointer,
    typename GradX::type* __restrict__ grad_x_pointer,
    const __grid_constant__ Loops<9> loops) {
  const Tile tile(loops.sizes);
  const int64_t columns = loops.sizes.columns;
  const Kept<X, Tile> x_tile(tile, x_pointer, loops.strides[0]);
  const Kept<DropoutKept, Tile> dropout_kept_tile(tile, dropout_kept_pointer, loops.strides[1]);
  const Kept<Residual, Tile> residual_tile(tile, residual_pointer, loops.strides[2]);
  const Kept<GradOutput, Tile> grad_output_tile(tile, grad_output_pointer, loops.strides[3]);
  const Loaded<Weight, Tile> weight_tile(tile, weight_pointer, loops.strides[4]);
  Reduction<0, Sum, Real, Tile> layer_norm_total;
  Reduction<2, Sum, Real, Tile> sum_1;
#pragma unroll Tile::unrolled
  for (int k = 0; k < tile.packs(); ++k) {
    const auto pack = tile.pack(k);
    const auto x_pack = x_tile.at(pack);
    const auto dropout_kept_pack = dropout_kept_tile.at(pack);
    const auto residual_pack = residual_tile.at(pack);
    const auto grad_output_pack = grad_output_tile.at(pack);
    const auto weight_pack = weight_tile.at(pack);
#pragma unroll
    for (int i = 0; i < Tile::width; ++i) {
      const Real x = widened<Real>(x_pack.element[i]);
      const bool dropout_kept = dropout_kept_pack.element[i] != 0;
      const Real dropout = Real(dropout_kept);
      const Real residual = widened<Real>(residual_pack.element[i]);
      const Real hidden = ((x * dropout) * Real(1.1111111111111112)) + residual;
      const Real grad_output = widened<Real>(grad_output_pack.element[i]);
      const Real weight = widened<Real>(weight_pack.element[i]);
      const Real mul_30 = grad_output * weight;
      if (pack.has(i)) {
        layer_norm_total.add(i, hidden);
        sum_1.add(i, mul_30);
      }
    }
  }
  reduce(tile, layer_norm_total, sum_1);
  Real layer_norm_mean_2[Tile::rows];
#pragma unroll
  for (int r = 0; r < Tile::rows; ++r) {
    layer_norm_mean_2[r] = layer_norm_total[r] / columns;
  }
  Reduction<1, Sum, Real, Tile> layer_norm_squares;
#pragma unroll Tile::unrolled
  for (int k = 0; k < tile.packs(); ++k) {
    const auto pack = tile.pack(k);
    const auto x_pack = x_tile.at(pack);
    const auto dropout_kept_pack = dropout_kept_tile.at(pack);
    const auto residual_pack = residual_tile.at(pack);
#pragma unroll
    for (int i = 0; i < Tile::width; ++i) {
      const int r = Tile::row_of(i);
      const Real x = widened<Real>(x_pack.element[i]);
      const bool dropout_kept = dropout_kept_pack.element[i] != 0;
      const Real dropout = Real(dropout_kept);
      const Real residual = widened<Real>(residual_pack.element[i]);
      const Real hidden = ((x * dropout) * Real(1.1111111111111112)) + residual;
      const Real sub_23 = hidden - layer_norm_mean_2[r];
      if (pack.has(i)) layer_norm_squares.add(i, sub_23 * sub_23);
    }
  }
  reduce(tile, layer_norm_squares);
  Real layer_norm_2[Tile::rows];
#pragma unroll
  for (int r = 0; r < Tile::rows; ++r) {
    layer_norm_2[r] = rsqrt((layer_norm_squares[r] / columns) + Real(1e-05));
  }
  Reduction<3, Sum, Real, Tile> sum_2;
#pragma unroll Tile::unrolled
  for (int k = 0; k < tile.packs(); ++k) {
    const auto pack = tile.pack(k);
    const auto grad_output_pack = grad_output_tile.at(pack);
    const auto weight_pack = weight_tile.at(pack);
    const auto x_pack = x_tile.at(pack);
    const auto dropout_kept_pack = dropout_kept_tile.at(pack);
    const auto residual_pack = residual_tile.at(pack);
#pragma unroll
    for (int i = 0; i < Tile::width; ++i) {
      const int r = Tile::row_of(i);
      const Real grad_output = widened<Real>(grad_output_pack.element[i]);
      const Real weight = widened<Real>(weight_pack.element[i]);
      const Real mul_30 = grad_output * weight;
      const Real x = widened<Real>(x_pack.element[i]);
      const bool dropout_kept = dropout_kept_pack.element[i] != 0;
      const Real dropout = Real(dropout_kept);
      const Real residual = widened<Real>(residual_pack.element[i]);
      const Real hidden = ((x * dropout) * Real(1.1111111111111112)) + residual;
      const Real sub_23 = hidden - layer_norm_mean_2[r];
      const Real mul_29 = sub_23 * layer_norm_2[r];
      if (pack.has(i)) sum_2.add(i, mul_30 * mul_29);
    }
  }
  reduce(tile, sum_2);
  Real div_of_row[Tile::rows];
#pragma unroll
  for (int r = 0; r < Tile::rows; ++r) {
    div_of_row[r] = layer_norm_2[r] / columns;
    if (tile.owns_row(r)) assign(layer_norm_mean_pointer[tile.row_offset(loops.strides[5], r)],
        layer_norm_mean_2[r]);
    if (tile.owns_row(r)) assign(layer_norm_pointer[tile.row_offset(loops.strides[6], r)],
        layer_norm_2[r]);
  }
#pragma unroll Tile::unrolled
  for (int k = 0; k < tile.packs(); ++k) {
    const auto pack = tile.pack(k);
    const auto grad_output_pack = grad_output_tile.at(pack);
    const auto weight_pack = weight_tile.at(pack);
    const auto x_pack = x_tile.at(pack);
    const auto dropout_kept_pack = dropout_kept_tile.at(pack);
    const auto residual_pack = residual_tile.at(pack);
    Pack<typename GradResidual::type, Tile::width> grad_residual_pack;
    Pack<typename GradX::type, Tile::width> grad_x_pack;
#pragma unroll
    for (int i = 0; i < Tile::width; ++i) {
      const int r = Tile::row_of(i);
      const Real grad_output = widened<Real>(grad_output_pack.element[i]);
      const Real weight = widened<Real>(weight_pack.element[i]);
      const Real mul_30 = grad_output * weight;
      const Real x = widened<Real>(x_pack.element[i]);
      const bool dropout_kept = dropout_kept_pack.element[i] != 0;
      const Real dropout = Real(dropout_kept);
      const Real residual = widened<Real>(residual_pack.element[i]);
      const Real hidden = ((x * dropout) * Real(1.1111111111111112)) + residual;
      const Real sub_23 = hidden - layer_norm_mean_2[r];
      const Real mul_29 = sub_23 * layer_norm_2[r];
      const Real mul_34 = div_of_row[r] * (((mul_30 * columns) - sum_1[r]) - (mul_29 * sum_2[r]));
      assign(grad_residual_pack.element[i], mul_34);
      const Real grad_x = (mul_34 * Real(1.1111111111111112)) * dropout;
      assign(grad_x_pack.element[i], grad_x);
    }
    store_at<GradResidual>(grad_residual_pointer, loops.strides[7], pack, grad_residual_pack);
    store_at<GradX>(grad_x_pointer, loops.strides[8], pack, grad_x_pack);
  }
}

// Computes grad_weight, grad_bias. Rows: width; columns: batch, length. Every element is read once.
// Few rows are split over several blocks.
template <class Tile, class Real, class GradOutput, class X, class DropoutKept, class Residual,
          class LayerNormMean, class LayerNorm, class GradWeight, class GradBias>
__global__ void __launch_bounds__(Tile::threads) dropped_residual_backward_grad_weight_kernel(
    const typename GradOutput::type* __restrict__ grad_output_pointer,
    const typename X::type* __restrict__ x_pointer,
    const typename DropoutKept::type* __restrict__ dropout_kept_pointer,
    const typename Residual::type* __restrict__ residual_pointer,
    const typename LayerNormMean::type* __restrict__ layer_norm_mean_pointer,
    const typename LayerNorm::type* __restrict__ layer_norm_pointer,
    typename GradWeight::type* __restrict__ grad_weight_pointer,
    typename GradBias::type* __restrict__ grad_bias_pointer,
    int64_t* partials,
    int parts,
    const __grid_constant__ Loops<8> loops) {
  const Tile tile(loops.sizes);
  const Kept<GradOutput, Tile> grad_output_tile(tile, grad_output_pointer, loops.strides[0]);
  const Kept<X, Tile> x_tile(tile, x_pointer, loops.strides[1]);
  const Kept<DropoutKept, Tile> dropout_kept_tile(tile, dropout_kept_pointer, loops.strides[2]);
  const Kept<Residual, Tile> residual_tile(tile, residual_pointer, loops.strides[3]);
  const Loaded<LayerNormMean, Tile> layer_norm_mean_tile(tile, layer_norm_mean_pointer, loops.strides[4]);
  const Loaded<LayerNorm, Tile> layer_norm_tile(tile, layer_norm_pointer, loops.strides[5]);
  Reduction<0, Sum, Real, Tile> sum_3;
  Reduction<1, Sum, Real, Tile> sum_4;
#pragma unroll Tile::unrolled
  for (int k = 0; k < tile.packs(); ++k) {
    const auto pack = tile.pack(k);
    const auto grad_output_pack = grad_output_tile.at(pack);
    const auto x_pack = x_tile.at(pack);
    const auto dropout_kept_pack = dropout_kept_tile.at(pack);
    const auto residual_pack = residual_tile.at(pack);
    const auto layer_norm_mean_pack = layer_norm_mean_tile.at(pack);
    const auto layer_norm_pack = layer_norm_tile.at(pack);
#pragma unroll
    for (int i = 0; i < Tile::width; ++i) {
      const Real grad_output = widened<Real>(grad_output_pack.element[i]);
      const Real x = widened<Real>(x_pack.element[i]);
      const bool dropout_kept = dropout_kept_pack.element[i] != 0;
      const Real residual = widened<Real>(residual_pack.element[i]);
      const Real hidden = ((x * Real(dropout_kept)) * Real(1.1111111111111112)) + residual;
      const Real layer_norm_mean = widened<Real>(layer_norm_mean_pack.element[i]);
      const Real layer_norm = widened<Real>(layer_norm_pack.element[i]);
      if (pack.has(i)) {
        sum_3.add(i, grad_output * ((hidden - layer_norm_mean) * layer_norm));
        sum_4.add(i, grad_output);
      }
    }
  }
  if (!reduce_parts(tile, partials, parts, sum_3, sum_4)) return;
#pragma unroll
  for (int r = 0; r < Tile::rows; ++r) {
    if (tile.owns_row(r)) assign(grad_weight_pointer[tile.row_offset(loops.strides[6], r)],
        sum_3[r]);
    if (tile.owns_row(r)) assign(grad_bias_pointer[tile.row_offset(loops.strides[7], r)], sum_4[r]);
  }
}

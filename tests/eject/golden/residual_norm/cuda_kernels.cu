// residual_norm in CUDA C++, ejected from the PyTorch code in reference.py.
//
// Real is the type of the arithmetic. Tile says how threads share out rows and columns: the
// launcher chooses it for each call, and cuda_sweep.h describes the choices. A row that fits is
// kept in registers, so that each element is read once. The class of an operand is the type of its
// elements and how a thread reads a pack of them: Packed<float>, Strided<float> or Same<float>.

#include "cuda_sweep.h"

// Computes output. Rows: batch, length; columns: width. Rows that do not fit in registers are read
// 3 times.
template <class Tile, class Real, class X, class Residual, class Weight, class Bias, class Output>
__global__ void __launch_bounds__(Tile::threads) residual_norm_kernel(
    const typename X::type* __restrict__ x_pointer,
    const typename Residual::type* __restrict__ residual_pointer,
    const typename Weight::type* __restrict__ weight_pointer,
    const typename Bias::type* __restrict__ bias_pointer,
    typename Output::type* __restrict__ output_pointer,
    const __grid_constant__ Loops<5> loops) {
  const Tile tile(loops.sizes);
  const int64_t columns = loops.sizes.columns;
  const Kept<X, Tile> x_tile(tile, x_pointer, loops.strides[0]);
  const Kept<Residual, Tile> residual_tile(tile, residual_pointer, loops.strides[1]);
  const Loaded<Weight, Tile> weight_tile(tile, weight_pointer, loops.strides[2]);
  const Loaded<Bias, Tile> bias_tile(tile, bias_pointer, loops.strides[3]);
  Reduction<0, Sum, Real, Tile> normed_total;
#pragma unroll Tile::unrolled
  for (int k = 0; k < tile.packs(); ++k) {
    const auto pack = tile.pack(k);
    const auto x_pack = x_tile.at(pack);
    const auto residual_pack = residual_tile.at(pack);
#pragma unroll
    for (int i = 0; i < Tile::width; ++i) {
      const Real x = widened<Real>(x_pack.element[i]);
      const Real residual = widened<Real>(residual_pack.element[i]);
      const Real hidden = x + residual;
      if (pack.has(i)) normed_total.add(i, hidden);
    }
  }
  reduce(tile, normed_total);
  Real div_of_row[Tile::rows];
#pragma unroll
  for (int r = 0; r < Tile::rows; ++r) {
    div_of_row[r] = normed_total[r] / columns;
  }
  Reduction<1, Sum, Real, Tile> normed_squares;
#pragma unroll Tile::unrolled
  for (int k = 0; k < tile.packs(); ++k) {
    const auto pack = tile.pack(k);
    const auto x_pack = x_tile.at(pack);
    const auto residual_pack = residual_tile.at(pack);
#pragma unroll
    for (int i = 0; i < Tile::width; ++i) {
      const int r = Tile::row_of(i);
      const Real x = widened<Real>(x_pack.element[i]);
      const Real residual = widened<Real>(residual_pack.element[i]);
      const Real hidden = x + residual;
      const Real normed = hidden - div_of_row[r];
      if (pack.has(i)) normed_squares.add(i, normed * normed);
    }
  }
  reduce(tile, normed_squares);
  Real normed_2[Tile::rows];
  Real normed_3[Tile::rows];
#pragma unroll
  for (int r = 0; r < Tile::rows; ++r) {
    normed_2[r] = (normed_squares[r] / columns) + Real(1e-05);
    normed_3[r] = rsqrt(normed_2[r]);
  }
#pragma unroll Tile::unrolled
  for (int k = 0; k < tile.packs(); ++k) {
    const auto pack = tile.pack(k);
    const auto x_pack = x_tile.at(pack);
    const auto residual_pack = residual_tile.at(pack);
    const auto weight_pack = weight_tile.at(pack);
    const auto bias_pack = bias_tile.at(pack);
    Pack<typename Output::type, Tile::width> output_pack;
#pragma unroll
    for (int i = 0; i < Tile::width; ++i) {
      const int r = Tile::row_of(i);
      const Real x = widened<Real>(x_pack.element[i]);
      const Real residual = widened<Real>(residual_pack.element[i]);
      const Real hidden = x + residual;
      const Real normed = hidden - div_of_row[r];
      const Real normed_4 = normed * normed_3[r];
      const Real weight = widened<Real>(weight_pack.element[i]);
      const Real normed_5 = normed_4 * weight;
      const Real bias = widened<Real>(bias_pack.element[i]);
      const Real normed_6 = normed_5 + bias;
      const Real output = ((normed_6 * Real(0.5)) * (erf(normed_6 * Real(0.7071067811865476)) + 1))
          * 2;
      assign(output_pack.element[i], output);
    }
    store_at<Output>(output_pointer, loops.strides[4], pack, output_pack);
  }
}

// Computes normed_mean, normed, grad_x, grad_residual. Rows: batch, length; columns: width. Rows
// that do not fit in registers are read 4 times.
template <class Tile, class Real, class X, class Residual, class GradOutput, class Weight, class
          Bias, class NormedMean, class Normed, class GradX, class GradResidual>
__global__ void __launch_bounds__(Tile::threads) residual_norm_backward_kernel(
    const typename X::type* __restrict__ x_pointer,
    const typename Residual::type* __restrict__ residual_pointer,
    const typename GradOutput::type* __restrict__ grad_output_pointer,
    const typename Weight::type* __restrict__ weight_pointer,
    const typename Bias::type* __restrict__ bias_pointer,
    typename NormedMean::type* __restrict__ normed_mean_pointer,
    typename Normed::type* __restrict__ normed_pointer,
    typename GradX::type* __restrict__ grad_x_pointer,
    typename GradResidual::type* __restrict__ grad_residual_pointer,
    const __grid_constant__ Loops<9> loops) {
  const Tile tile(loops.sizes);
  const int64_t columns = loops.sizes.columns;
  const Kept<X, Tile> x_tile(tile, x_pointer, loops.strides[0]);
  const Kept<Residual, Tile> residual_tile(tile, residual_pointer, loops.strides[1]);
  const Kept<GradOutput, Tile> grad_output_tile(tile, grad_output_pointer, loops.strides[2]);
  const Loaded<Weight, Tile> weight_tile(tile, weight_pointer, loops.strides[3]);
  const Loaded<Bias, Tile> bias_tile(tile, bias_pointer, loops.strides[4]);
  Reduction<0, Sum, Real, Tile> normed_total;
#pragma unroll Tile::unrolled
  for (int k = 0; k < tile.packs(); ++k) {
    const auto pack = tile.pack(k);
    const auto x_pack = x_tile.at(pack);
    const auto residual_pack = residual_tile.at(pack);
#pragma unroll
    for (int i = 0; i < Tile::width; ++i) {
      const Real x = widened<Real>(x_pack.element[i]);
      const Real residual = widened<Real>(residual_pack.element[i]);
      const Real hidden = x + residual;
      if (pack.has(i)) normed_total.add(i, hidden);
    }
  }
  reduce(tile, normed_total);
  Real normed_mean_2[Tile::rows];
#pragma unroll
  for (int r = 0; r < Tile::rows; ++r) {
    normed_mean_2[r] = normed_total[r] / columns;
  }
  Reduction<1, Sum, Real, Tile> normed_squares;
#pragma unroll Tile::unrolled
  for (int k = 0; k < tile.packs(); ++k) {
    const auto pack = tile.pack(k);
    const auto x_pack = x_tile.at(pack);
    const auto residual_pack = residual_tile.at(pack);
#pragma unroll
    for (int i = 0; i < Tile::width; ++i) {
      const int r = Tile::row_of(i);
      const Real x = widened<Real>(x_pack.element[i]);
      const Real residual = widened<Real>(residual_pack.element[i]);
      const Real hidden = x + residual;
      const Real normed_2 = hidden - normed_mean_2[r];
      if (pack.has(i)) normed_squares.add(i, normed_2 * normed_2);
    }
  }
  reduce(tile, normed_squares);
  Real normed_3[Tile::rows];
  Real normed[Tile::rows];
#pragma unroll
  for (int r = 0; r < Tile::rows; ++r) {
    normed_3[r] = (normed_squares[r] / columns) + Real(1e-05);
    normed[r] = rsqrt(normed_3[r]);
  }
  Reduction<2, Sum, Real, Tile> sum_1;
  Reduction<3, Sum, Real, Tile> sum_2;
#pragma unroll Tile::unrolled
  for (int k = 0; k < tile.packs(); ++k) {
    const auto pack = tile.pack(k);
    const auto grad_output_pack = grad_output_tile.at(pack);
    const auto x_pack = x_tile.at(pack);
    const auto residual_pack = residual_tile.at(pack);
    const auto weight_pack = weight_tile.at(pack);
    const auto bias_pack = bias_tile.at(pack);
#pragma unroll
    for (int i = 0; i < Tile::width; ++i) {
      const int r = Tile::row_of(i);
      const Real grad_output = widened<Real>(grad_output_pack.element[i]);
      const Real x = widened<Real>(x_pack.element[i]);
      const Real residual = widened<Real>(residual_pack.element[i]);
      const Real hidden = x + residual;
      const Real normed_2 = hidden - normed_mean_2[r];
      const Real normed_4 = normed_2 * normed[r];
      const Real weight = widened<Real>(weight_pack.element[i]);
      const Real normed_5 = normed_4 * weight;
      const Real bias = widened<Real>(bias_pack.element[i]);
      const Real normed_6 = normed_5 + bias;
      const Real mul_35 = ((grad_output * 2) * (((erf(normed_6 * Real(0.7071067811865476)) + 1) *
          Real(0.5)) + (normed_6 * (exp((normed_6 * normed_6) * Real(-0.5)) *
          Real(0.3989422804014327))))) * weight;
      if (pack.has(i)) {
        sum_1.add(i, mul_35);
        sum_2.add(i, mul_35 * normed_4);
      }
    }
  }
  reduce(tile, sum_1, sum_2);
  Real div_of_row[Tile::rows];
#pragma unroll
  for (int r = 0; r < Tile::rows; ++r) {
    div_of_row[r] = normed[r] / columns;
    if (tile.owns_row(r)) assign(normed_mean_pointer[tile.row_offset(loops.strides[5], r)],
        normed_mean_2[r]);
    if (tile.owns_row(r)) assign(normed_pointer[tile.row_offset(loops.strides[6], r)], normed[r]);
  }
#pragma unroll Tile::unrolled
  for (int k = 0; k < tile.packs(); ++k) {
    const auto pack = tile.pack(k);
    const auto grad_output_pack = grad_output_tile.at(pack);
    const auto x_pack = x_tile.at(pack);
    const auto residual_pack = residual_tile.at(pack);
    const auto weight_pack = weight_tile.at(pack);
    const auto bias_pack = bias_tile.at(pack);
    Pack<typename GradX::type, Tile::width> grad_x_pack;
    Pack<typename GradResidual::type, Tile::width> grad_residual_pack;
#pragma unroll
    for (int i = 0; i < Tile::width; ++i) {
      const int r = Tile::row_of(i);
      const Real grad_output = widened<Real>(grad_output_pack.element[i]);
      const Real x = widened<Real>(x_pack.element[i]);
      const Real residual = widened<Real>(residual_pack.element[i]);
      const Real hidden = x + residual;
      const Real normed_2 = hidden - normed_mean_2[r];
      const Real normed_4 = normed_2 * normed[r];
      const Real weight = widened<Real>(weight_pack.element[i]);
      const Real normed_5 = normed_4 * weight;
      const Real bias = widened<Real>(bias_pack.element[i]);
      const Real normed_6 = normed_5 + bias;
      const Real mul_35 = ((grad_output * 2) * (((erf(normed_6 * Real(0.7071067811865476)) + 1) *
          Real(0.5)) + (normed_6 * (exp((normed_6 * normed_6) * Real(-0.5)) *
          Real(0.3989422804014327))))) * weight;
      const Real grad_x = div_of_row[r] * (((mul_35 * columns) - sum_1[r]) - (normed_4 * sum_2[r]));
      assign(grad_x_pack.element[i], grad_x);
      assign(grad_residual_pack.element[i], grad_x);
    }
    store_at<GradX>(grad_x_pointer, loops.strides[7], pack, grad_x_pack);
    store_at<GradResidual>(grad_residual_pointer, loops.strides[8], pack, grad_residual_pack);
  }
}

// Computes grad_weight, grad_bias. Rows: width; columns: batch, length. Every element is read once.
// Few rows are split over several blocks.
template <class Tile, class Real, class GradOutput, class X, class Residual, class NormedMean, class
          Normed, class Weight, class Bias, class GradWeight, class GradBias>
__global__ void __launch_bounds__(Tile::threads) residual_norm_backward_grad_weight_kernel(
    const typename GradOutput::type* __restrict__ grad_output_pointer,
    const typename X::type* __restrict__ x_pointer,
    const typename Residual::type* __restrict__ residual_pointer,
    const typename NormedMean::type* __restrict__ normed_mean_pointer,
    const typename Normed::type* __restrict__ normed_pointer,
    const typename Weight::type* __restrict__ weight_pointer,
    const typename Bias::type* __restrict__ bias_pointer,
    typename GradWeight::type* __restrict__ grad_weight_pointer,
    typename GradBias::type* __restrict__ grad_bias_pointer,
    int64_t* partials,
    int parts,
    const __grid_constant__ Loops<9> loops) {
  const Tile tile(loops.sizes);
  const Kept<GradOutput, Tile> grad_output_tile(tile, grad_output_pointer, loops.strides[0]);
  const Kept<X, Tile> x_tile(tile, x_pointer, loops.strides[1]);
  const Kept<Residual, Tile> residual_tile(tile, residual_pointer, loops.strides[2]);
  const Loaded<NormedMean, Tile> normed_mean_tile(tile, normed_mean_pointer, loops.strides[3]);
  const Loaded<Normed, Tile> normed_tile(tile, normed_pointer, loops.strides[4]);
  Real weight[Tile::rows];
  Real bias[Tile::rows];
#pragma unroll
  for (int r = 0; r < Tile::rows; ++r) {
    weight[r] = widened<Real>(weight_pointer[tile.row_offset(loops.strides[5], r)]);
    bias[r] = widened<Real>(bias_pointer[tile.row_offset(loops.strides[6], r)]);
  }
  Reduction<0, Sum, Real, Tile> sum_3;
  Reduction<1, Sum, Real, Tile> sum_4;
#pragma unroll Tile::unrolled
  for (int k = 0; k < tile.packs(); ++k) {
    const auto pack = tile.pack(k);
    const auto grad_output_pack = grad_output_tile.at(pack);
    const auto x_pack = x_tile.at(pack);
    const auto residual_pack = residual_tile.at(pack);
    const auto normed_mean_pack = normed_mean_tile.at(pack);
    const auto normed_pack = normed_tile.at(pack);
#pragma unroll
    for (int i = 0; i < Tile::width; ++i) {
      const int r = Tile::row_of(i);
      const Real grad_output = widened<Real>(grad_output_pack.element[i]);
      const Real x = widened<Real>(x_pack.element[i]);
      const Real residual = widened<Real>(residual_pack.element[i]);
      const Real hidden = x + residual;
      const Real normed_mean = widened<Real>(normed_mean_pack.element[i]);
      const Real normed_2 = hidden - normed_mean;
      const Real normed = widened<Real>(normed_pack.element[i]);
      const Real normed_3 = normed_2 * normed;
      const Real normed_4 = normed_3 * weight[r];
      const Real normed_5 = normed_4 + bias[r];
      const Real mul_33 = (grad_output * 2) * (((erf(normed_5 * Real(0.7071067811865476)) + 1) *
          Real(0.5)) + (normed_5 * (exp((normed_5 * normed_5) * Real(-0.5)) *
          Real(0.3989422804014327))));
      if (pack.has(i)) {
        sum_3.add(i, mul_33 * normed_3);
        sum_4.add(i, mul_33);
      }
    }
  }
  if (!reduce_parts(tile, partials, parts, sum_3, sum_4)) return;
#pragma unroll
  for (int r = 0; r < Tile::rows; ++r) {
    if (tile.owns_row(r)) assign(grad_weight_pointer[tile.row_offset(loops.strides[7], r)],
        sum_3[r]);
    if (tile.owns_row(r)) assign(grad_bias_pointer[tile.row_offset(loops.strides[8], r)], sum_4[r]);
  }
}

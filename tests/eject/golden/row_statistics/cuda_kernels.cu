// row_statistics in CUDA C++, ejected from the PyTorch code in reference.py.
//
// Real is the type of the arithmetic. Tile says how threads share out rows and columns: the
// launcher chooses it for each call, and cuda_sweep.h describes the choices. A row that fits is
// kept in registers, so that each element is read once. The class of an operand is the type of its
// elements and how a thread reads a pack of them: Packed<float>, Strided<float> or Same<float>.

#include "cuda_sweep.h"

// Computes mean, centred, is_positive, count. Rows: length; columns: width. Rows that do not fit in
// registers are read twice.
template <class Tile, class Real, class X, class Weight, class Mean, class Centred, class
          IsPositive, class Count>
__global__ void __launch_bounds__(Tile::threads) row_statistics_kernel(
    const typename X::type* __restrict__ x_pointer,
    const typename Weight::type* __restrict__ weight_pointer,
    typename Mean::type* __restrict__ mean_pointer,
    typename Centred::type* __restrict__ centred_pointer,
    typename IsPositive::type* __restrict__ is_positive_pointer,
    typename Count::type* __restrict__ count_pointer,
    const __grid_constant__ Loops<6> loops) {
  const Tile tile(loops.sizes);
  const int64_t columns = loops.sizes.columns;
  const Kept<X, Tile> x_tile(tile, x_pointer, loops.strides[0]);
  const Loaded<Weight, Tile> weight_tile(tile, weight_pointer, loops.strides[1]);
  Reduction<0, Sum, Real, Tile> mean_2;
  Reduction<1, Sum, int64_t, Tile> sum_1;
#pragma unroll Tile::unrolled
  for (int k = 0; k < tile.packs(); ++k) {
    const auto pack = tile.pack(k);
    const auto x_pack = x_tile.at(pack);
#pragma unroll
    for (int i = 0; i < Tile::width; ++i) {
      const Real x = widened<Real>(x_pack.element[i]);
      if (pack.has(i)) {
        mean_2.add(i, x);
        sum_1.add(i, int64_t(x > 0));
      }
    }
  }
  reduce(tile, mean_2, sum_1);
  Real mean[Tile::rows];
#pragma unroll
  for (int r = 0; r < Tile::rows; ++r) {
    mean[r] = mean_2[r] / columns;
    if (tile.owns_row(r)) assign(mean_pointer[tile.row_offset(loops.strides[2], r)], mean[r]);
    if (tile.owns_row(r)) assign(count_pointer[tile.row_offset(loops.strides[5], r)], sum_1[r]);
  }
#pragma unroll Tile::unrolled
  for (int k = 0; k < tile.packs(); ++k) {
    const auto pack = tile.pack(k);
    const auto x_pack = x_tile.at(pack);
    const auto weight_pack = weight_tile.at(pack);
    Pack<typename Centred::type, Tile::width> centred_pack;
    Pack<typename IsPositive::type, Tile::width> is_positive_pack;
#pragma unroll
    for (int i = 0; i < Tile::width; ++i) {
      const int r = Tile::row_of(i);
      const Real x = widened<Real>(x_pack.element[i]);
      const Real weight = widened<Real>(weight_pack.element[i]);
      const Real centred = (x - mean[r]) * weight;
      assign(centred_pack.element[i], centred);
      const bool is_positive = centred > 0;
      assign(is_positive_pack.element[i], is_positive);
    }
    store_at<Centred>(centred_pointer, loops.strides[3], pack, centred_pack);
    store_at<IsPositive>(is_positive_pointer, loops.strides[4], pack, is_positive_pack);
  }
}

// Computes grad_x. Rows: length; columns: width. Rows that do not fit in registers are read twice.
template <class Tile, class Real, class GradCentred, class Weight, class GradX>
__global__ void __launch_bounds__(Tile::threads) row_statistics_backward_kernel(
    const typename GradCentred::type* __restrict__ grad_centred_pointer,
    const typename Weight::type* __restrict__ weight_pointer,
    typename GradX::type* __restrict__ grad_x_pointer,
    const __grid_constant__ Loops<3> loops) {
  const Tile tile(loops.sizes);
  const int64_t columns = loops.sizes.columns;
  const Kept<GradCentred, Tile> grad_centred_tile(tile, grad_centred_pointer, loops.strides[0]);
  const Loaded<Weight, Tile> weight_tile(tile, weight_pointer, loops.strides[1]);
  Reduction<0, Sum, Real, Tile> sum_3;
#pragma unroll Tile::unrolled
  for (int k = 0; k < tile.packs(); ++k) {
    const auto pack = tile.pack(k);
    const auto grad_centred_pack = grad_centred_tile.at(pack);
    const auto weight_pack = weight_tile.at(pack);
#pragma unroll
    for (int i = 0; i < Tile::width; ++i) {
      const Real grad_centred = widened<Real>(grad_centred_pack.element[i]);
      const Real weight = widened<Real>(weight_pack.element[i]);
      const Real mul_12 = grad_centred * weight;
      if (pack.has(i)) sum_3.add(i, -mul_12);
    }
  }
  reduce(tile, sum_3);
  Real div_of_row[Tile::rows];
#pragma unroll
  for (int r = 0; r < Tile::rows; ++r) {
    div_of_row[r] = sum_3[r] / columns;
  }
#pragma unroll Tile::unrolled
  for (int k = 0; k < tile.packs(); ++k) {
    const auto pack = tile.pack(k);
    const auto grad_centred_pack = grad_centred_tile.at(pack);
    const auto weight_pack = weight_tile.at(pack);
    Pack<typename GradX::type, Tile::width> grad_x_pack;
#pragma unroll
    for (int i = 0; i < Tile::width; ++i) {
      const int r = Tile::row_of(i);
      const Real grad_centred = widened<Real>(grad_centred_pack.element[i]);
      const Real weight = widened<Real>(weight_pack.element[i]);
      const Real mul_12 = grad_centred * weight;
      const Real grad_x = mul_12 + div_of_row[r];
      assign(grad_x_pack.element[i], grad_x);
    }
    store_at<GradX>(grad_x_pointer, loops.strides[2], pack, grad_x_pack);
  }
}

// Computes grad_weight. Rows: width; columns: length. Every element is read once. Few rows are
// split over several blocks.
template <class Tile, class Real, class GradCentred, class X, class Mean, class GradWeight>
__global__ void __launch_bounds__(Tile::threads) row_statistics_backward_grad_weight_kernel(
    const typename GradCentred::type* __restrict__ grad_centred_pointer,
    const typename X::type* __restrict__ x_pointer,
    const typename Mean::type* __restrict__ mean_pointer,
    typename GradWeight::type* __restrict__ grad_weight_pointer,
    int64_t* partials,
    int parts,
    const __grid_constant__ Loops<4> loops) {
  const Tile tile(loops.sizes);
  const Kept<GradCentred, Tile> grad_centred_tile(tile, grad_centred_pointer, loops.strides[0]);
  const Kept<X, Tile> x_tile(tile, x_pointer, loops.strides[1]);
  const Loaded<Mean, Tile> mean_tile(tile, mean_pointer, loops.strides[2]);
  Reduction<0, Sum, Real, Tile> sum_2;
#pragma unroll Tile::unrolled
  for (int k = 0; k < tile.packs(); ++k) {
    const auto pack = tile.pack(k);
    const auto grad_centred_pack = grad_centred_tile.at(pack);
    const auto x_pack = x_tile.at(pack);
    const auto mean_pack = mean_tile.at(pack);
#pragma unroll
    for (int i = 0; i < Tile::width; ++i) {
      const Real grad_centred = widened<Real>(grad_centred_pack.element[i]);
      const Real x = widened<Real>(x_pack.element[i]);
      const Real mean = widened<Real>(mean_pack.element[i]);
      if (pack.has(i)) sum_2.add(i, grad_centred * (x - mean));
    }
  }
  if (!reduce_parts(tile, partials, parts, sum_2)) return;
#pragma unroll
  for (int r = 0; r < Tile::rows; ++r) {
    if (tile.owns_row(r)) assign(grad_weight_pointer[tile.row_offset(loops.strides[3], r)],
        sum_2[r]);
  }
}

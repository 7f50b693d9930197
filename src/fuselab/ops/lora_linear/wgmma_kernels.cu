// act(x Wᵀ + b + S Bᵀ), and dZ W + dS A, in 16-bit floats on Hopper's matrix unit (sm_90a only).
// They use linear_activation's tiles, with one more step in depth for S = scale x Aᵀ and B, or for
// dS and A, padded with zeros past the rank.

#include "../linear_activation/wgmma_kernels.cu"

template <class Activation, class Element, int tile_columns, int stages, int cluster, bool packed>
__global__ void __cluster_dims__(cluster, 1, 1) __launch_bounds__(threads, 1)
    adapt(const __grid_constant__ TensorMap input_map, const __grid_constant__ TensorMap weight_map,
          const __grid_constant__ TensorMap projection_map, const __grid_constant__ TensorMap up_map,
          const Element* __restrict__ bias, Element* __restrict__ output, int rows, int columns,
          int depth, int64_t bias_stride) {
  multiply_tiles<Activation, Element, tile_columns, stages, cluster, packed, true, false>(
      input_map, weight_map, projection_map, up_map, bias, output, rows, columns, depth, bias_stride);
}

// input_map is dZ's; weight_map is W's, read across, as A's is.
template <class Activation, class Element, int tile_columns, int stages, int cluster, bool packed>
__global__ void __cluster_dims__(cluster, 1, 1) __launch_bounds__(threads, 1)
    pull_through(const __grid_constant__ TensorMap input_map,
                 const __grid_constant__ TensorMap weight_map,
                 const __grid_constant__ TensorMap projection_map,
                 const __grid_constant__ TensorMap down_map, const Element* __restrict__ bias,
                 Element* __restrict__ output, int rows, int columns, int depth,
                 int64_t bias_stride) {
  multiply_tiles<Activation, Element, tile_columns, stages, cluster, packed, true, true>(
      input_map, weight_map, projection_map, down_map, bias, output, rows, columns, depth,
      bias_stride);
}

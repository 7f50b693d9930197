// Sums over the leading dimensions of a dense tensor on NVIDIA GPUs: the gradient of an operand
// that was broadcast along them.
//
// The tensor is a matrix (rows, columns), read once: memory is the limit. Threads of a block are
// (x, y), a power of two each. A thread owns `width` columns (16 bytes) and has `unroll` rows in
// flight, so that a tile is x * width columns of unroll * y rows. The blocks of rows sweep the rows
// together, one tile each at a time, and each writes its column sums, which column_sums adds. Both
// orders are fixed, and there are no atomics.

#include "../add_mul_activation/cuda_kernels.cu"

// Loads one element, or 16 bytes, marked as not worth keeping in the cache.
template <int width, class Element>
FUSELAB_INLINE Pack<Element, width> load_once(const Element* pointer) {
  if constexpr (width == 1) {
    return load<false, 1>(pointer);
  } else {
    Pack<Element, width> pack;
    *reinterpret_cast<uint4*>(pack.element) = __ldcs(reinterpret_cast<const uint4*>(pointer));
    return pack;
  }
}

// Row b of `sums` is the sum of block b of rows. A thread adds its rows in flight in pairs, in
// float, and those sums in double: that is one conversion per `unroll` elements, of which a
// multiprocessor makes 16 per cycle. With width > 1 the matrix is aligned and the columns are a
// multiple of width. Grid: tiles of columns, blocks of rows. Without the second launch bound ptxas
// keeps to 40 registers and waits for half of the loads before it issues the others.
template <class Grad, int width, int block_threads, int unroll>
__global__ void __launch_bounds__(block_threads, 1024 / block_threads)
    leading_sums(const Grad* __restrict__ grad, double* __restrict__ sums, int64_t rows,
                 int64_t columns) {
  using Real = Arithmetic<Grad>;
  const int64_t column = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * width;
  double total[width] = {};
  if (column < columns) {
    const int64_t tile_rows = unroll * blockDim.y;
    int64_t row = blockIdx.y * tile_rows;
    for (; row < rows; row += gridDim.y * tile_rows) {
      const int64_t mine = row + threadIdx.y;
      const int left = min(rows - mine, tile_rows);
      const Grad* from = grad + mine * columns + column;
      Pack<Grad, width> pack[unroll] = {};  // zeros, whatever the dtype
#pragma unroll
      for (int k = 0; k < unroll; ++k, from += blockDim.y * columns) {
        if (k * int(blockDim.y) < left) pack[k] = load_once<width>(from);
      }
#pragma unroll
      for (int i = 0; i < width; ++i) {
        Real sum[unroll];
#pragma unroll
        for (int k = 0; k < unroll; ++k) sum[k] = widened<Real>(pack[k].element[i]);
#pragma unroll
        for (int apart = 1; apart < unroll; apart *= 2) {
#pragma unroll
          for (int k = 0; k < unroll; k += 2 * apart) sum[k] += sum[k + apart];
        }
        total[i] += static_cast<double>(sum[0]);
      }
    }
  }
  sum_over_rows_of_threads<block_threads>(total);
  if (threadIdx.y == 0 && column < columns) {
#pragma unroll
    for (int i = 0; i < width; ++i) sums[blockIdx.y * columns + column + i] = total[i];
  }
}

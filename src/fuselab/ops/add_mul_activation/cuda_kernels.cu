// act(input + scale * update + bias) on NVIDIA GPUs, forward and backward; update or bias may be
// absent (bias_activation has no update).
//
// Memory is the limit: every operand is read once, every output written once. In the flat kernels a
// thread has one pack of `width` elements (16 bytes of the narrowest type) of every operand, and
// all loads precede the first use. That is 32 bytes per thread for two operands, 64 KB in flight
// per multiprocessor, where 4.8 TB/s over 132 of them at 0.7 us latency needs 25 KB. A second pack
// per thread is slower (H200, 65536 x 512 float32: forward 98.5 us against 97.5, backward 136.6
// against 131.0). Arithmetic is in float (double for a double output); product and sums are rounded
// one by one, as eager rounds them.
//
// Index is int32_t, or int64_t where an offset needs it. Sizes and strides count elements.

#include "../_shared/cuda_nest.h"
#include "../_shared/rounded_activations.h"

// Tells which terms there are besides the input.
template <bool update, bool bias>
struct Terms {
  static constexpr bool has_update = update, has_bias = bias;
};

// Tells which pointers are aligned for 16-byte access.
template <bool first_, bool second_, bool bias_, bool written_>
struct Access {
  static constexpr bool first = first_, second = second_, bias = bias_, written = written_;
};

template <class Terms, class Real, class Input, class Update, class Bias>
FUSELAB_INLINE Real preactivation(Input input, Update update, Bias bias, Real scale) {
  Real sum = widened<Real>(input);
  if constexpr (Terms::has_update) sum += product(scale, widened<Real>(update));
  if constexpr (Terms::has_bias) sum += widened<Real>(bias);
  return sum;
}

// Loads the bias of `width` consecutive elements, with one division per pack, from which the column
// counts up. If packs do not straddle rows, the launcher says so by Access::bias: the bias is
// aligned and its columns are a multiple of width.
template <class Access, int width, class Bias, class Index>
FUSELAB_INLINE Pack<Bias, width> load_bias(const Bias* bias, Index offset, Index columns,
                                           Index bias_stride) {
  Index column = offset % columns;
  if constexpr (Access::bias) {
    return load<true, width>(bias + column);
  } else {
    Pack<Bias, width> pack;
#pragma unroll
    for (int i = 0; i < width; ++i) {
      pack.element[i] = __ldg(bias + column * bias_stride);
      if (++column == columns) column = 0;
    }
    return pack;
  }
}

template <class Activation, class Terms, class Output, class Input, class Update, class Bias,
          class Scale, class Index, class Access, int width>
__global__ void __launch_bounds__(threads)
    forward(const Input* __restrict__ input, const Update* __restrict__ update,
            const Bias* __restrict__ bias, Output* __restrict__ output, Scale scale_argument,
            int64_t numel, int64_t columns, int64_t bias_stride) {
  using Real = Arithmetic<Output>;
  const Real scale = scale_of<Real>(scale_argument);
  const Index begin = (Index(blockIdx.x) * threads + threadIdx.x) * width;
  if (begin + width <= numel) {
    const auto x = load<Access::first, width>(input + begin);
    Pack<Update, width> u;
    Pack<Bias, width> b;
    if constexpr (Terms::has_update) u = load<Access::second, width>(update + begin);
    if constexpr (Terms::has_bias) {
      b = load_bias<Access, width>(bias, begin, Index(columns), Index(bias_stride));
    }
    Pack<Output, width> result;
#pragma unroll
    for (int i = 0; i < width; ++i) {
      const Real sum =
          preactivation<Terms, Real>(x.element[i], u.element[i], b.element[i], scale);
      assign(result.element[i], activated<Activation, Output>(sum));
    }
    store<Access::written>(output + begin, result);
    return;
  }
  for (Index offset = begin; offset < numel; ++offset) {
    const Real sum = preactivation<Terms, Real>(
        input[offset], Terms::has_update ? update[offset] : Update{},
        Terms::has_bias ? bias[offset % Index(columns) * Index(bias_stride)] : Bias{}, scale);
    assign(output[offset], activated<Activation, Output>(sum));
  }
}

// Any strides: consecutive threads take consecutive elements of the output.
template <class Activation, class Terms, class Output, class Input, class Update, class Bias,
          class Scale, class Index, int rank>
__global__ void __launch_bounds__(threads)
    forward_strided(const Input* __restrict__ input, const Update* __restrict__ update,
                    const Bias* __restrict__ bias, Output* __restrict__ output,
                    Scale scale_argument, int64_t numel, int64_t size_0, int64_t size_1,
                    int64_t size_2, int64_t size_3, int64_t size_4, int64_t input_0,
                    int64_t input_1, int64_t input_2, int64_t input_3, int64_t input_4,
                    int64_t update_0, int64_t update_1, int64_t update_2, int64_t update_3,
                    int64_t update_4, int64_t bias_0, int64_t bias_1, int64_t bias_2,
                    int64_t bias_3, int64_t bias_4) {
  using Real = Arithmetic<Output>;
  const Real scale = scale_of<Real>(scale_argument);
  const int64_t sizes[5] = {size_0, size_1, size_2, size_3, size_4};
  const int64_t input_strides[5] = {input_0, input_1, input_2, input_3, input_4};
  const int64_t update_strides[5] = {update_0, update_1, update_2, update_3, update_4};
  const int64_t bias_strides[5] = {bias_0, bias_1, bias_2, bias_3, bias_4};
  const Index begin = Index(blockIdx.x) * (threads * 4) + threadIdx.x;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const Index offset = begin + k * threads;
    if (offset >= numel) return;
    const Position<rank, Index> at(offset, sizes);
    const Real sum = preactivation<Terms, Real>(
        input[at.offset(input_strides)],
        Terms::has_update ? update[at.offset(update_strides)] : Update{},
        Terms::has_bias ? bias[at.offset(bias_strides)] : Bias{}, scale);
    assign(output[offset], activated<Activation, Output>(sum));
  }
}

// Returns the gradient of the pre-activation from the upstream gradient and the saved tensors: the
// output, or the operands from which the pre-activation is computed again.
template <class Activation, class Terms, class Real, class Grad, class First, class Update,
          class Bias>
FUSELAB_INLINE Real pulled_back(Grad grad, First first, Update update, Bias bias, Real scale) {
  if constexpr (Activation::derivative_of == Saved::nothing) {
    return widened<Real>(grad);
  } else if constexpr (Activation::derivative_of == Saved::output) {
    return pulled_through<Activation, Grad>(widened<Real>(grad), widened<Real>(first));
  } else {
    return pulled_through<Activation, Grad>(
        widened<Real>(grad), preactivation<Terms, Real>(first, update, bias, scale));
  }
}

// Tells which saved operands a backward kernel reads.
template <class Activation, class Terms>
struct Reads {
  static constexpr bool first = Activation::derivative_of != Saved::nothing;
  static constexpr bool operands = Activation::derivative_of == Saved::preactivation;
  static constexpr bool update = operands && Terms::has_update;
  static constexpr bool bias = operands && Terms::has_bias;
};

// Computes the gradients of input and update, null if not needed. Access::first is the alignment of
// grad and first, Access::second that of update.
template <class Activation, class Terms, class Output, class First, class Input, class Update,
          class Bias, class Scale, class Index, class Access, int width>
__global__ void __launch_bounds__(threads)
    backward(const Output* __restrict__ grad, const First* __restrict__ first,
             const Update* __restrict__ update, const Bias* __restrict__ bias,
             Input* __restrict__ grad_input, Update* __restrict__ grad_update,
             Scale scale_argument, int64_t numel, int64_t columns, int64_t bias_stride) {
  using Real = Arithmetic<Output>;
  using Reads = Reads<Activation, Terms>;
  const Real scale = scale_of<Real>(scale_argument);
  const Index begin = (Index(blockIdx.x) * threads + threadIdx.x) * width;
  if (begin + width <= numel) {
    const auto g = load<Access::first, width>(grad + begin);
    Pack<First, width> x;
    Pack<Update, width> u;
    Pack<Bias, width> b;
    if constexpr (Reads::first) x = load<Access::first, width>(first + begin);
    if constexpr (Reads::update) u = load<Access::second, width>(update + begin);
    if constexpr (Reads::bias) {
      b = load_bias<Access, width>(bias, begin, Index(columns), Index(bias_stride));
    }
    Pack<Input, width> of_input;
    Pack<Update, width> of_update;
#pragma unroll
    for (int i = 0; i < width; ++i) {
      const Real gradient = pulled_back<Activation, Terms, Real>(
          g.element[i], x.element[i], u.element[i], b.element[i], scale);
      assign(of_input.element[i], gradient);
      assign(of_update.element[i], gradient * scale);
    }
    if (grad_input) store<Access::written>(grad_input + begin, of_input);
    if (grad_update) store<Access::written>(grad_update + begin, of_update);
    return;
  }
  for (Index offset = begin; offset < numel; ++offset) {
    const Real gradient = pulled_back<Activation, Terms, Real>(
        grad[offset], Reads::first ? first[offset] : First{},
        Reads::update ? update[offset] : Update{},
        Reads::bias ? bias[offset % Index(columns) * Index(bias_stride)] : Bias{}, scale);
    if (grad_input) assign(grad_input[offset], gradient);
    if (grad_update) assign(grad_update[offset], gradient * scale);
  }
}

template <class Activation, class Terms, class Output, class First, class Input, class Update,
          class Bias, class Scale, class Index, int rank>
__global__ void __launch_bounds__(threads)
    backward_strided(const Output* __restrict__ grad, const First* __restrict__ first,
                     const Update* __restrict__ update, const Bias* __restrict__ bias,
                     Input* __restrict__ grad_input, Update* __restrict__ grad_update,
                     Scale scale_argument, int64_t numel, int64_t size_0, int64_t size_1,
                     int64_t size_2, int64_t size_3, int64_t size_4, int64_t grad_0,
                     int64_t grad_1, int64_t grad_2, int64_t grad_3, int64_t grad_4,
                     int64_t first_0, int64_t first_1, int64_t first_2, int64_t first_3,
                     int64_t first_4, int64_t update_0, int64_t update_1, int64_t update_2,
                     int64_t update_3, int64_t update_4, int64_t bias_0, int64_t bias_1,
                     int64_t bias_2, int64_t bias_3, int64_t bias_4) {
  using Real = Arithmetic<Output>;
  using Reads = Reads<Activation, Terms>;
  const Real scale = scale_of<Real>(scale_argument);
  const int64_t sizes[5] = {size_0, size_1, size_2, size_3, size_4};
  const int64_t grad_strides[5] = {grad_0, grad_1, grad_2, grad_3, grad_4};
  const int64_t first_strides[5] = {first_0, first_1, first_2, first_3, first_4};
  const int64_t update_strides[5] = {update_0, update_1, update_2, update_3, update_4};
  const int64_t bias_strides[5] = {bias_0, bias_1, bias_2, bias_3, bias_4};
  const Index begin = Index(blockIdx.x) * (threads * 4) + threadIdx.x;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const Index offset = begin + k * threads;
    if (offset >= numel) return;
    const Position<rank, Index> at(offset, sizes);
    const Real gradient = pulled_back<Activation, Terms, Real>(
        grad[at.offset(grad_strides)], Reads::first ? first[at.offset(first_strides)] : First{},
        Reads::update ? update[at.offset(update_strides)] : Update{},
        Reads::bias ? bias[at.offset(bias_strides)] : Bias{}, scale);
    if (grad_input) assign(grad_input[offset], gradient);
    if (grad_update) assign(grad_update[offset], gradient * scale);
  }
}

// Adds, per column, the values of the block's rows of threads; the first row of threads gets the
// sum. The order is fixed: in every step the upper half of the rows passes its sums to the lower
// half.
template <int block_threads, int width>
FUSELAB_INLINE void sum_over_rows_of_threads(double (&total)[width]) {
  constexpr int slots = block_threads / 2;
  __shared__ double shared[slots * width];
  for (int half = blockDim.y / 2; half > 0; half /= 2) {
    const int row = threadIdx.y < half ? threadIdx.y : threadIdx.y - half;
    const int slot = row * blockDim.x + threadIdx.x;
    if (threadIdx.y >= half && threadIdx.y < 2 * half) {
#pragma unroll
      for (int i = 0; i < width; ++i) shared[i * slots + slot] = total[i];
    }
    __syncthreads();
    if (threadIdx.y < half) {
#pragma unroll
      for (int i = 0; i < width; ++i) total[i] += shared[i * slots + slot];
    }
    __syncthreads();
  }
}

// Adds the values of lanes whose numbers differ by multiples of `apart`, a power of two, in all
// lanes.
FUSELAB_INLINE double sum_over_lanes_apart(double value, int apart) {
  for (int distance = 16; distance >= apart; distance /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  }
  return value;
}

// Computes the gradients of a matrix (rows, columns), with that of the bias. Threads are (x, y), a
// power of two each, block_threads in all; a thread has `unroll` rows in flight, so that a tile is
// x * width columns of unroll * y rows. The blocks of rows sweep the rows together, one tile each
// at a time. Block b writes its column sums to sums[b][column], or to the bias's gradient if it is
// the only block of rows. Sums are in double: that is one conversion and one addition per element,
// for which a GPU that waits for memory has time. With width > 1 all matrices are row-major and
// aligned, and the columns are a multiple of width. Grid: tiles of columns, blocks of rows.
template <class Activation, class Terms, class Output, class First, class Input, class Update,
          class Bias, class Sum, class Scale, class Index, int width, int block_threads, int unroll>
__global__ void __launch_bounds__(block_threads)
    backward_with_bias(const Output* __restrict__ grad, const First* __restrict__ first,
                       const Update* __restrict__ update, const Bias* __restrict__ bias,
                       Input* __restrict__ grad_input, Update* __restrict__ grad_update,
                       Sum* __restrict__ sums, Scale scale_argument, int64_t rows,
                       int64_t columns, int64_t grad_row, int64_t grad_column, int64_t first_row,
                       int64_t first_column, int64_t update_row, int64_t update_column,
                       int64_t bias_column) {
  using Real = Arithmetic<Output>;
  using Reads = Reads<Activation, Terms>;
  const Real scale = scale_of<Real>(scale_argument);
  const Index column = (Index(blockIdx.x) * blockDim.x + threadIdx.x) * width;
  const unsigned tile_rows = unroll * blockDim.y;
  const Index end = Index(rows);
  double total[width] = {};
  if (column < columns) {
    Pack<Bias, width> b;
    if constexpr (Reads::bias) {
#pragma unroll
      for (int i = 0; i < width; ++i) b.element[i] = bias[(column + i) * bias_column];
    }
    for (Index row = Index(blockIdx.y) * tile_rows + threadIdx.y; row < end;
         row += Index(gridDim.y) * tile_rows) {
      Pack<Output, width> g[unroll];
      Pack<First, width> x[unroll];
      Pack<Update, width> u[unroll];
#pragma unroll
      for (int k = 0; k < unroll; ++k) {
        const Index at = row + k * Index(blockDim.y);
        if (at >= end) break;
        g[k] = load<(width > 1), width>(grad + at * Index(grad_row) +
                                                column * Index(grad_column));
        if constexpr (Reads::first) {
          x[k] = load<(width > 1), width>(first + at * Index(first_row) +
                                                  column * Index(first_column));
        }
        if constexpr (Reads::update) {
          u[k] = load<(width > 1), width>(update + at * Index(update_row) +
                                                  column * Index(update_column));
        }
      }
#pragma unroll
      for (int k = 0; k < unroll; ++k) {
        const Index at = row + k * Index(blockDim.y);
        if (at >= end) break;
        Pack<Input, width> of_input;
        Pack<Update, width> of_update;
#pragma unroll
        for (int i = 0; i < width; ++i) {
          const Real gradient = pulled_back<Activation, Terms, Real>(
              g[k].element[i], x[k].element[i], u[k].element[i], b.element[i], scale);
          assign(of_input.element[i], gradient);
          assign(of_update.element[i], gradient * scale);
          total[i] += static_cast<double>(gradient);
        }
        const Index offset = at * Index(columns) + column;
        if (grad_input) store<(width > 1)>(grad_input + offset, of_input);
        if (grad_update) store<(width > 1)>(grad_update + offset, of_update);
      }
    }
  }
  sum_over_rows_of_threads<block_threads>(total);
  if (threadIdx.y == 0 && column < columns) {
#pragma unroll
    for (int i = 0; i < width; ++i) assign(sums[blockIdx.y * columns + column + i], total[i]);
  }
}

// grad_bias[column] = the sum of sums[block][column]. A block has (8, 128) threads. The order is
// fixed: rows of threads, four in turn, then lanes of a warp, then warps. Sizes are constants,
// which makes the code 126 instructions (instead of 248) with few jumps: with a cold L2 the code is
// read from memory too.
template <class Bias>
__global__ void __launch_bounds__(1024)
    column_sums(const double* __restrict__ sums, Bias* __restrict__ grad_bias, int64_t blocks,
                int64_t columns) {
  constexpr int across = 8, down = 128;
  __shared__ double of_warp[32 * across];
  const int lane = threadIdx.y * across % 32 + threadIdx.x;
  const int warp = threadIdx.y * across / 32;
  const int64_t column = int64_t(blockIdx.x) * across + threadIdx.x;
  double total = 0;
  if (column < columns) {
    const double* from = sums + threadIdx.y * columns + column;
    const double* const end = sums + blocks * columns;
#pragma unroll 1
    for (; from < end; from += 4 * down * columns) {
      double part[4] = {};  // all loads are issued before the first addition
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (from + i * down * columns < end) part[i] = from[i * down * columns];
      }
      total += (part[0] + part[1]) + (part[2] + part[3]);
    }
  }
  total = sum_over_lanes_apart(total, across);
  if (lane < across) of_warp[warp * across + lane] = total;
  __syncthreads();
  if (warp > 0) return;
  total = 0;
#pragma unroll
  for (int i = 0; i < across; ++i) total += of_warp[32 * i + lane];
  total = sum_over_lanes_apart(total, across);
  if (lane < across && column < columns) assign(grad_bias[column], total);
}

// input + other on NVIDIA GPUs. Every element is read once and written once: memory is the limit.
//
// A thread owns `width` consecutive elements of the output (16 bytes of the narrowest type), all in
// one row of the loop nest. If both tensors are dense alike there is one loop, and Position divides
// nothing. A packed operand is read by 16-byte loads; a broadcast (stride 0) or strided one,
// element by element. Both loads are issued before the first use: 32 bytes per thread, 64 KB per
// multiprocessor.

#include "../_shared/cuda_nest.h"

template <class Output, class Input, class Other, class Index, int rank, int width,
          bool input_packed, bool other_packed>
__global__ void __launch_bounds__(threads)
    add(const Input* __restrict__ input, const Other* __restrict__ other,
        Output* __restrict__ output, int64_t numel, int64_t size_0, int64_t size_1, int64_t size_2,
        int64_t size_3, int64_t size_4, int64_t input_0, int64_t input_1, int64_t input_2,
        int64_t input_3, int64_t input_4, int64_t other_0, int64_t other_1, int64_t other_2,
        int64_t other_3, int64_t other_4) {
  using Real = Arithmetic<Output>;
  const Index begin = (Index(blockIdx.x) * threads + threadIdx.x) * width;
  if (begin >= numel) return;
  const Position<rank, Index> at(begin, {size_0, size_1, size_2, size_3, size_4});
  input += at.offset({input_0, input_1, input_2, input_3, input_4});
  other += at.offset({other_0, other_1, other_2, other_3, other_4});
  if (begin + width <= numel) {
    const auto a = load_along<input_packed, width>(input, Index(input_4));
    const auto b = load_along<other_packed, width>(other, Index(other_4));
    Pack<Output, width> sum;
#pragma unroll
    for (int i = 0; i < width; ++i) {
      assign(sum.element[i], widened<Real>(a.element[i]) + widened<Real>(b.element[i]));
    }
    store<true>(output + begin, sum);
  } else {
    for (int i = 0; begin + i < numel; ++i) {
      const Real a = widened<Real>(input[i * Index(input_4)]);
      assign(output[begin + i], a + widened<Real>(other[i * Index(other_4)]));
    }
  }
}

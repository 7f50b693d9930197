// input * input on NVIDIA GPUs, and its gradient. Every element is read once and written once:
// memory is the limit.
//
// A thread owns `width` consecutive elements of the output (16 bytes of the narrowest type), all in
// one row of the loop nest. If the tensors are dense alike there is one loop, and Position divides
// nothing. A packed operand is read by 16-byte loads, a strided one element by element.

#include "../_shared/cuda_nest.h"

template <class Element, class Index, int rank, int width, bool input_packed>
__global__ void __launch_bounds__(threads)
    square(const Element* __restrict__ input, Element* __restrict__ output, int64_t numel,
           int64_t size_0, int64_t size_1, int64_t size_2, int64_t size_3, int64_t size_4,
           int64_t input_0, int64_t input_1, int64_t input_2, int64_t input_3, int64_t input_4) {
  using Real = Arithmetic<Element>;
  const Index begin = (Index(blockIdx.x) * threads + threadIdx.x) * width;
  if (begin >= numel) return;
  const Position<rank, Index> at(begin, {size_0, size_1, size_2, size_3, size_4});
  input += at.offset({input_0, input_1, input_2, input_3, input_4});
  if (begin + width <= numel) {
    const auto x = load_along<input_packed, width>(input, Index(input_4));
    Pack<Element, width> result;
#pragma unroll
    for (int i = 0; i < width; ++i) {
      const Real value = widened<Real>(x.element[i]);
      assign(result.element[i], value * value);
    }
    store<true>(output + begin, result);
  } else {
    for (int i = 0; begin + i < numel; ++i) {
      const Real value = widened<Real>(input[i * Index(input_4)]);
      assign(output[begin + i], value * value);
    }
  }
}

// grad_input = 2 grad input.
template <class Element, class Index, int rank, int width, bool grad_packed, bool input_packed>
__global__ void __launch_bounds__(threads)
    square_backward(const Element* __restrict__ grad, const Element* __restrict__ input,
                    Element* __restrict__ grad_input, int64_t numel, int64_t size_0,
                    int64_t size_1, int64_t size_2, int64_t size_3, int64_t size_4,
                    int64_t grad_0, int64_t grad_1, int64_t grad_2, int64_t grad_3,
                    int64_t grad_4, int64_t input_0, int64_t input_1, int64_t input_2,
                    int64_t input_3, int64_t input_4) {
  using Real = Arithmetic<Element>;
  const Index begin = (Index(blockIdx.x) * threads + threadIdx.x) * width;
  if (begin >= numel) return;
  const Position<rank, Index> at(begin, {size_0, size_1, size_2, size_3, size_4});
  grad += at.offset({grad_0, grad_1, grad_2, grad_3, grad_4});
  input += at.offset({input_0, input_1, input_2, input_3, input_4});
  if (begin + width <= numel) {
    const auto g = load_along<grad_packed, width>(grad, Index(grad_4));
    const auto x = load_along<input_packed, width>(input, Index(input_4));
    Pack<Element, width> result;
#pragma unroll
    for (int i = 0; i < width; ++i) {
      const Real slope = 2 * widened<Real>(x.element[i]);
      assign(result.element[i], widened<Real>(g.element[i]) * slope);
    }
    store<true>(grad_input + begin, result);
  } else {
    for (int i = 0; begin + i < numel; ++i) {
      const Real slope = 2 * widened<Real>(input[i * Index(input_4)]);
      assign(grad_input[begin + i], widened<Real>(grad[i * Index(grad_4)]) * slope);
    }
  }
}

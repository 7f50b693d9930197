// The flat CUDA kernels of the package add_mul_activation, instantiated for every dtype and
// activation, and how they are launched.
#include "add_mul_activation/cuda_kernels.cu"
#include "kernels.h"

namespace fuselab_extension {
namespace {

using Both = ::Terms<true, true>;

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// All pointers are aligned and packs do not straddle rows, or nothing is taken for granted.
using Packed = ::Access<true, true, true, true>;
using Scattered = ::Access<false, false, false, false>;

template <class Element, class Launch>
std::string launch(const Call& call, std::initializer_list<const void*> pointers, Launch body) {
  constexpr int width = 16 / sizeof(Element);
  const int64_t numel = call.rows * call.columns;
  bool packed = call.columns % width == 0;
  for (const void* pointer : pointers) packed = packed && is_aligned(pointer);
  const bool wide = numel + int64_t(threads) * width > INT32_MAX;
  const auto blocks = static_cast<unsigned>((numel + threads * width - 1) / (threads * width));
  if (wide) {
    packed ? body(int64_t{}, Packed{}, blocks) : body(int64_t{}, Scattered{}, blocks);
  } else {
    packed ? body(int32_t{}, Packed{}, blocks) : body(int32_t{}, Scattered{}, blocks);
  }
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
}

template <class Functor, class Element>
std::string forward_as(const Call& call, cudaStream_t stream) {
  using Real = ::Arithmetic<Element>;
  const auto* input = static_cast<const Element*>(call.first);
  const auto* update = static_cast<const Element*>(call.update);
  const auto* bias = static_cast<const Element*>(call.bias);
  auto* output = static_cast<Element*>(call.output);
  const auto run = [&](auto index, auto access, unsigned blocks) {
    ::forward<Functor, Both, Element, Element, Element, Element, Real, decltype(index),
              decltype(access), 16 / sizeof(Element)><<<blocks, threads, 0, stream>>>(
        input, update, bias, output, static_cast<Real>(call.scale), call.rows * call.columns,
        call.columns, 1);
  };
  return launch<Element>(call, {input, update, bias, output}, run);
}

template <class Functor, class Element>
std::string backward_as(const Call& call, cudaStream_t stream) {
  using Real = ::Arithmetic<Element>;
  const auto* grad = static_cast<const Element*>(call.grad);
  const auto* first = static_cast<const Element*>(call.first);
  const auto* update = static_cast<const Element*>(call.update);
  const auto* bias = static_cast<const Element*>(call.bias);
  auto* grad_input = static_cast<Element*>(call.grad_input);
  auto* grad_update = static_cast<Element*>(call.grad_update);
  const auto run = [&](auto index, auto access, unsigned blocks) {
    ::backward<Functor, Both, Element, Element, Element, Element, Element, Real, decltype(index),
               decltype(access), 16 / sizeof(Element)><<<blocks, threads, 0, stream>>>(
        grad, first, update, bias, grad_input, grad_update, static_cast<Real>(call.scale),
        call.rows * call.columns, call.columns, 1);
  };
  return launch<Element>(call, {grad, first, update, bias, grad_input, grad_update}, run);
}

template <class Body>
std::string with_dtype(Dtype dtype, Body body) {
  switch (dtype) {
    case Dtype::float32:
      return body(float{});
    case Dtype::float16:
      return body(__half{});
    case Dtype::bfloat16:
      return body(__nv_bfloat16{});
    default:
      return body(double{});
  }
}

}  // namespace

std::string forward_cuda(const Call& call, void* stream) {
  const auto run = [&](auto functor) {
    using Functor = decltype(functor);
    return with_dtype(call.dtype, [&](auto element) {
      return forward_as<Functor, decltype(element)>(call, static_cast<cudaStream_t>(stream));
    });
  };
  FUSELAB_WITH_ACTIVATION(call.activation, run)
  return "no such activation";
}

std::string backward_cuda(const Call& call, void* stream) {
  const auto run = [&](auto functor) {
    using Functor = decltype(functor);
    return with_dtype(call.dtype, [&](auto element) {
      return backward_as<Functor, decltype(element)>(call, static_cast<cudaStream_t>(stream));
    });
  };
  FUSELAB_WITH_ACTIVATION(call.activation, run)
  return "no such activation";
}

}  // namespace fuselab_extension

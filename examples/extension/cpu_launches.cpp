// The CPU kernels of the package add_mul_activation, instantiated for every dtype and activation.
#include "add_mul_activation/cpu_kernels.cpp"
#include "kernels.h"

namespace fuselab_extension {
namespace {

using Both = ::Terms<true, true>;

template <class Functor, class Element>
void forward_as(const Call& call) {
  const int64_t rows = call.rows, columns = call.columns;
  ::forward<Functor, Both>(
      static_cast<const Element*>(call.first), static_cast<const Element*>(call.update),
      static_cast<const Element*>(call.bias), static_cast<Element*>(call.output),
      static_cast<Arithmetic<Element>>(call.scale), 1, 1, 1, rows, columns, 0, 0, 0, columns, 1, 0,
      0, 0, columns, 1, 0, 0, 0, 0, 1);
}

template <class Functor, class Element>
void backward_as(const Call& call) {
  const int64_t rows = call.rows, columns = call.columns;
  ::backward<Functor, Both>(
      static_cast<const Element*>(call.grad), static_cast<const Element*>(call.first),
      static_cast<const Element*>(call.update), static_cast<const Element*>(call.bias),
      static_cast<Element*>(call.grad_input), static_cast<Element*>(call.grad_update),
      static_cast<Arithmetic<Element>>(call.scale), 1, 1, 1, rows, columns, 0, 0, 0, columns, 1, 0,
      0, 0, columns, 1, 0, 0, 0, columns, 1, 0, 0, 0, 0, 1);
}

template <class Body>
void with_dtype(Dtype dtype, Body body) {
  switch (dtype) {
    case Dtype::float32:
      return body(float{});
    case Dtype::float16:
      return body(::Half{});
    case Dtype::bfloat16:
      return body(::BFloat16{});
    case Dtype::float64:
      return body(double{});
  }
}

}  // namespace

void forward_cpu(const Call& call) {
  const auto run = [&](auto functor) {
    using Functor = decltype(functor);
    with_dtype(call.dtype, [&](auto element) { forward_as<Functor, decltype(element)>(call); });
  };
  FUSELAB_WITH_ACTIVATION(call.activation, run)
}

void backward_cpu(const Call& call) {
  const auto run = [&](auto functor) {
    using Functor = decltype(functor);
    with_dtype(call.dtype, [&](auto element) { backward_as<Functor, decltype(element)>(call); });
  };
  FUSELAB_WITH_ACTIVATION(call.activation, run)
}

}  // namespace fuselab_extension

// The dot interaction and its gradient on the CPU.
//
// A thread takes whole samples. It converts a sample's vectors once into a scratch of the
// arithmetic type, which stays in L1. Forward: the scratch is transposed, so that a vector register
// has one element of 16 neighbouring vectors (8 for double), and no product is summed across lanes.
// Backward: the packed upstream gradient becomes a symmetric matrix, and lanes are the vectors'
// elements.

#include "../../runtime/include/cpu_vectors.h"

#include <memory>

namespace {

template <class Element>
using Arithmetic = std::conditional_t<std::is_same_v<Element, double>, double, float>;

template <class Vec>
int64_t padded(int64_t count) {
  return (count + lanes<Vec> - 1) / lanes<Vec> * lanes<Vec>;
}

template <class Vec, class Element>
void widen(const Element* from, int64_t count, Scalar<Vec>* to) {
  for_each_vector<Vec>(count, [&](int64_t i, auto part) {
    store<false>(to + i, load<Vec>(from + i, part), part);
  });
}

template <class Vec, class Element>
void narrow(const Scalar<Vec>* from, int64_t count, Element* to) {
  for_each_vector<Vec>(count, [&](int64_t i, auto part) {
    store<false>(to + i, load<Vec>(from + i, part), part);
  });
}

}  // namespace

template <class Element>
void forward(const Element* dense, const Element* embeddings, Element* output, int64_t batch,
             int64_t vectors, int64_t width, int64_t columns, int64_t dense_stride,
             int64_t batch_stride, int64_t vector_stride) {
  using Real = Arithmetic<Element>;
  using Vec = Vector<Real>;
  const int64_t across = padded<Vec>(vectors);
#pragma omp parallel
  {
    const auto line = std::make_unique<Real[]>(width + lanes<Vec>);
    const auto transposed = std::make_unique<Real[]>(width * across);
    // A row's last vector store may run past the pairs.
    const auto row = std::make_unique<Real[]>(columns + lanes<Vec>);
#pragma omp for
    for (int64_t sample = 0; sample < batch; ++sample) {
      for (int64_t vector = 0; vector < vectors; ++vector) {
        const Element* from =
            vector == 0 ? dense + sample * dense_stride
                        : embeddings + sample * batch_stride + (vector - 1) * vector_stride;
        Real* to = vector == 0 ? row.get() : line.get();
        widen<Vec>(from, width, to);
        for (int64_t k = 0; k < width; ++k) transposed[k * across + vector] = to[k];
      }
      Real* pairs = row.get() + width;
      for (int64_t vector = 1; vector < vectors; pairs += vector++) {
        for (int64_t other = 0; other < vector; other += lanes<Vec>) {
          Vec total = {};
          for (int64_t k = 0; k < width; ++k)
            total += load<Vec>(transposed.get() + k * across + other) *
                     transposed[k * across + vector];
          store<false>(pairs + other, total);
        }
      }
      for (Real* end = row.get() + columns; pairs < end; ++pairs) *pairs = 0;
      narrow<Vec>(row.get(), columns, output + sample * columns);
    }
  }
}

// Computes the gradients; grad_dense or grad_embeddings is null if it is not needed.
template <class Element>
void backward(const Element* grad_output, const Element* dense, const Element* embeddings,
              Element* grad_dense, Element* grad_embeddings, int64_t batch, int64_t vectors,
              int64_t width, int64_t grad_stride, int64_t dense_stride, int64_t batch_stride,
              int64_t vector_stride) {
  using Real = Arithmetic<Element>;
  using Vec = Vector<Real>;
  const int64_t across = padded<Vec>(width), pair_count = vectors * (vectors - 1) / 2;
#pragma omp parallel
  {
    const auto values = std::make_unique<Real[]>(vectors * across);
    const auto symmetric = std::make_unique<Real[]>(vectors * vectors);
    const auto pairs = std::make_unique<Real[]>(width + pair_count + lanes<Vec>);
#pragma omp for
    for (int64_t sample = 0; sample < batch; ++sample) {
      for (int64_t vector = 0; vector < vectors; ++vector) {
        const Element* from =
            vector == 0 ? dense + sample * dense_stride
                        : embeddings + sample * batch_stride + (vector - 1) * vector_stride;
        widen<Vec>(from, width, values.get() + vector * across);
      }
      widen<Vec>(grad_output + sample * grad_stride, width + pair_count, pairs.get());
      const Real* pair = pairs.get() + width;
      for (int64_t vector = 1; vector < vectors; ++vector) {
        for (int64_t other = 0; other < vector; ++other)
          symmetric[vector * vectors + other] = symmetric[other * vectors + vector] = *pair++;
      }
      for (int64_t k = 0; k < width; k += lanes<Vec>) {
        // As in eager's G Z, an infinity or NaN makes its column NaN: G has zeros to multiply it.
        Vec zero = {};
        for (int64_t other = 0; other < vectors; ++other)
          zero += load<Vec>(values.get() + other * across + k) * Real(0);
        for (int64_t vector = 0; vector < vectors; ++vector) {
          Element* to = vector == 0 ? grad_dense : grad_embeddings;
          if (to == nullptr) continue;
          to += (vector == 0 ? sample : sample * (vectors - 1) + vector - 1) * width + k;
          Vec total = zero;
          for (int64_t other = 0; other < vectors; ++other)
            total += load<Vec>(values.get() + other * across + k) *
                     symmetric[vector * vectors + other];
          if (k + lanes<Vec> <= width) {
            if (vector == 0) total += load<Vec>(pairs.get() + k);
            store<false>(to, total, Whole{});
          } else {
            if (vector == 0) total += load<Vec>(pairs.get() + k, First{width - k});
            store<false>(to, total, First{width - k});
          }
        }
      }
    }
  }
}

// Softmax and log_softmax over one dimension and their gradients on the CPU.
//
// Rows: a thread takes whole rows. A row is read from memory once, for its maximum, and again from
// the cache for its exponentials, which are kept in a scratch row in L1 or L2 until their sum is
// known. Columns: a thread takes strips of kStrip neighbouring columns and walks down the dimension
// three times.
//
// In place (output is input): a thread reads and writes only its own rows or columns, and writes a
// row or a strip after its last read of it.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>

#include "../../runtime/include/cpu_vectors.h"
#include "../_shared/activations.h"

enum Form { kSoftmax, kLogSoftmax };

namespace {

template <typename T>
using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;
template <typename T>
using VectorFor = Vector<Compute<T>>;
template <typename T>
constexpr int kLanes = lanes<VectorFor<T>>;

constexpr int64_t kSerial = 1 << 15;  // elements below which a second thread does not pay
constexpr int64_t kStrip = 64;        // columns that one thread takes: 4 cache lines of float32
constexpr int64_t kStreamFrom = 1 << 22;  // output bytes; smaller outputs stay in the cache

// Returns exp(x) for x <= 0 or NaN. kBounded: all results of the row are normal numbers, and so is
// 2^n. Otherwise results below half the smallest subnormal number become 0 without a multiplication
// that underflows, which takes 150 cycles on some machines; masks are full of -inf.
template <bool kBounded, typename V>
FUSELAB_INLINE V exponential_of(V x) {
  if constexpr (kBounded) {
    const Exponential<V> parts = reduced_exponential<V>(x);
    const V scale = power_of_two<V>(parts.exponent);
    return scale * parts.fraction + scale;
  } else {
    const auto vanishes = x < constant<V>(is_single<V> ? -104.0 : -746.0);
    return choose(vanishes, V{}, exponential<V>(choose(vanishes, V{}, x)));
  }
}
template <typename C>
constexpr C kBound = sizeof(C) == 4 ? C(-86) : C(-707);

// Returns the value that is kept of an element until its row's sum is known, and the output from
// it; `factor` is 1 / sum or log(sum).
template <Form kForm, typename V>
FUSELAB_INLINE V kept(V difference, V term) {
  return kForm == kSoftmax ? term : difference;
}
template <Form kForm, typename V>
FUSELAB_INLINE V finished(V kept, V factor) {
  return kForm == kSoftmax ? kept * factor : kept - factor;
}
template <Form kForm, typename C>
FUSELAB_INLINE C factor_of(C sum) {
  return kForm == kSoftmax ? 1 / sum : std::log(sum);
}
template <Form kForm, typename V>
FUSELAB_INLINE V factors_of(V sums) {
  if (kForm == kSoftmax) return constant<V>(1.0) / sums;
  for (int i = 0; i < lanes<V>; ++i) sums[i] = std::log(sums[i]);
  return sums;
}

// Returns the term that the backward sums over a row, and the gradient of an element.
template <Form kForm, typename V>
FUSELAB_INLINE V summand(V grad, V y) {
  return kForm == kSoftmax ? grad * y : grad;
}
template <Form kForm, typename V>
FUSELAB_INLINE V gradient(V grad, V y, V sum) {
  if constexpr (kForm == kSoftmax) return y * (grad - sum);
  return grad - exponential_of<false>(y) * sum;
}

// Calls body(element, repeated) for vectors that cover [0, width), width >= kStep. If the width is
// not a multiple of kStep, the last vector begins kStep before the end, and its first `repeated`
// lanes were in the one before.
template <int kStep, typename Body>
FUSELAB_INLINE void for_vectors(int64_t begin, int64_t width, Body body) {
  int64_t element = begin;
  for (; element + kStep <= width; element += kStep) body(element, Whole{});
  if (element < width) body(width - kStep, First{kStep - (width - element)});
}
// Selects the lanes of a vector of for_vectors that no other vector has counted.
template <typename V>
FUSELAB_INLINE V fresh(Whole, V value) {
  return value;
}
template <typename V>
FUSELAB_INLINE V fresh(First repeated, V value) {
  return choose(first_lanes<Integers<V>>(repeated.count), V{}, value);
}

FUSELAB_INLINE int64_t row_offset(int64_t row, int64_t inner_count, int64_t outer_stride,
                                  int64_t inner_stride) {
  if (inner_count == 1) return row * outer_stride;
  return (row / inner_count) * outer_stride + (row % inner_count) * inner_stride;
}

// Computes kLanes rows narrower than a vector, of which `count` are wanted, with one row per lane.
// They are gathered, widened and transposed, and stored the reverse way.
template <Form kForm, typename T>
FUSELAB_INLINE void forward_row_per_lane(const T* const* from, T* to, int64_t count,
                                         int64_t width) {
  using C = Compute<T>;
  using V = VectorFor<T>;
  constexpr int kStep = kLanes<T>;
  alignas(64) T packed[kStep * kStep] = {};
  alignas(64) C rows[kStep * kStep], columns[kStep * kStep];
  for (int64_t lane = 0; lane < count; ++lane)
    for (int64_t i = 0; i < width; ++i) packed[lane * width + i] = from[lane][i];
  for (int64_t i = 0; i < width; ++i)
    store<false>(rows + i * kStep, load<V>(packed + i * kStep));
  for (int64_t i = 0; i < width; ++i)
    for (int64_t lane = 0; lane < kStep; ++lane) columns[i * kStep + lane] = rows[lane * width + i];
  V maximum = constant<V>(-INFINITY), sum = {};
  for (int64_t i = 0; i < width; ++i) maximum = larger(maximum, load<V>(columns + i * kStep));
  for (int64_t i = 0; i < width; ++i) {
    const V difference = load<V>(columns + i * kStep) - maximum;
    const V term = exponential_of<false>(difference);
    store<false>(columns + i * kStep, kept<kForm>(difference, term));
    sum += term;
  }
  const V factor = factors_of<kForm>(sum);
  for (int64_t i = 0; i < width; ++i)
    store<false>(columns + i * kStep, finished<kForm>(load<V>(columns + i * kStep), factor));
  for (int64_t i = 0; i < width; ++i)
    for (int64_t lane = 0; lane < kStep; ++lane) rows[lane * width + i] = columns[i * kStep + lane];
  for (int64_t i = 0; i < width; ++i)
    store<false>(packed + i * kStep, load<V>(rows + i * kStep));
  std::memcpy(to, packed, count * width * sizeof(T));
}

// Writes exponentials of a row's differences from its maximum to `waiting`; returns their sum.
template <Form kForm, bool kBounded, typename T>
FUSELAB_INLINE Compute<T> exponentials(const T* from, Compute<T>* waiting, int64_t width,
                                       Compute<T> maximum) {
  using V = VectorFor<T>;
  constexpr int kStep = kLanes<T>;
  const int64_t unrolled = width - width % (4 * kStep);
  V sums[4] = {};
  for (int64_t element = 0; element < unrolled; element += 4 * kStep)
    for (int i = 0; i < 4; ++i) {
      const V difference = load<V>(from + element + i * kStep) - maximum;
      const V term = exponential_of<kBounded>(difference);
      store<false>(waiting + element + i * kStep, kept<kForm>(difference, term));
      sums[i] += term;
    }
  for_vectors<kStep>(unrolled, width, [&](int64_t element, auto repeated) {
    const V difference = load<V>(from + element) - maximum;
    const V term = exponential_of<kBounded>(difference);
    store<false>(waiting + element, kept<kForm>(difference, term));
    sums[0] += fresh(repeated, term);
  });
  return sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// Writes the waiting row, times or minus `factor`, to the output; past the caches if kStream.
template <Form kForm, bool kStream, typename T>
FUSELAB_INLINE void finish(const Compute<T>* waiting, T* to, int64_t width, Compute<T> factor) {
  using V = VectorFor<T>;
  constexpr int kStep = kLanes<T>;
  const V factors = V{} + factor;
  const auto at = [&](int64_t element) {
    return finished<kForm>(load<V>(waiting + element), factors);
  };
  if constexpr (kStream) {
    const int64_t past = reinterpret_cast<uintptr_t>(to) / sizeof(T) % kStep;
    int64_t element = past == 0 ? 0 : kStep - past;
    if (element != 0) store<false>(to, at(0));
    for (; element + kStep <= width; element += kStep) store<true>(to + element, at(element));
    if (element < width) store<false>(to + width - kStep, at(width - kStep));
  } else {
    for_vectors<kStep>(0, width,
                       [&](int64_t element, auto) { store<false>(to + element, at(element)); });
  }
}

}  // namespace

// output[row, :] = softmax(input[row, :]), or log_softmax, for rows of `width` contiguous elements.
// Row = outer * inner_count + inner begins at outer * outer_stride + inner * inner_stride. The
// output is contiguous.
template <Form kForm, typename T>
void forward_rows(const T* input, T* output, int64_t rows, int64_t width, int64_t inner_count,
                  int64_t outer_stride, int64_t inner_stride) {
  using C = Compute<T>;
  using V = VectorFor<T>;
  constexpr int kStep = kLanes<T>;
  const int64_t unrolled = width - width % (4 * kStep);
  if (width < kStep) {
#pragma omp parallel for if (rows * width >= kSerial)
    for (int64_t first = 0; first < rows; first += kStep) {
      const int64_t count = std::min<int64_t>(rows - first, kStep);
      const T* from[kStep];
      for (int64_t lane = 0; lane < count; ++lane)
        from[lane] = input + row_offset(first + lane, inner_count, outer_stride, inner_stride);
      forward_row_per_lane<kForm>(from, output + first * width, count, width);
    }
    return;
  }
  const bool stream = rows * width * int64_t(sizeof(T)) >= kStreamFrom &&
                      reinterpret_cast<uintptr_t>(output) % sizeof(T) == 0;
#pragma omp parallel if (rows > 1 && rows * width >= kSerial)
  {
    const std::unique_ptr<C[]> scratch(new C[width]);
    C* waiting = scratch.get();
#pragma omp for
    for (int64_t row = 0; row < rows; ++row) {
      const T* from = input + row_offset(row, inner_count, outer_stride, inner_stride);
      T* to = output + row * width;
      V maxima[4], minima[4];
      for (int i = 0; i < 4; ++i) maxima[i] = constant<V>(-INFINITY), minima[i] = V{} + INFINITY;
      for (int64_t element = 0; element < unrolled; element += 4 * kStep)
        for (int i = 0; i < 4; ++i) {
          const V value = load<V>(from + element + i * kStep);
          maxima[i] = larger(maxima[i], value), minima[i] = smaller(minima[i], value);
        }
      for_vectors<kStep>(unrolled, width, [&](int64_t element, auto) {
        const V value = load<V>(from + element);
        maxima[0] = larger(maxima[0], value), minima[0] = smaller(minima[0], value);
      });
      const C maximum =
          maximum_of(larger(larger(maxima[0], maxima[1]), larger(maxima[2], maxima[3])));
      const C minimum =
          minimum_of(smaller(smaller(minima[0], minima[1]), smaller(minima[2], minima[3])));
      // A NaN is in neither of the two, and its exponential is NaN either way.
      const C sum = minimum - maximum >= kBound<C>
                        ? exponentials<kForm, true>(from, waiting, width, maximum)
                        : exponentials<kForm, false>(from, waiting, width, maximum);
      const C factor = factor_of<kForm>(sum);
      if (stream) {
        finish<kForm, true>(waiting, to, width, factor);
      } else {
        finish<kForm, false>(waiting, to, width, factor);
      }
    }
    finish_streaming();
  }
}

// grad_input[row, :] = output * (grad_output - sum(grad_output * output)), or for log_softmax
// grad_output - exp(output) * sum(grad_output). grad_output has rows like forward_rows' input;
// output and grad_input are contiguous.
template <Form kForm, typename T>
void backward_rows(const T* grad_output, const T* output, T* grad_input, int64_t rows,
                   int64_t width, int64_t inner_count, int64_t outer_stride,
                   int64_t inner_stride) {
  using V = VectorFor<T>;
  constexpr int kStep = kLanes<T>;
  const int64_t unrolled = width - width % (4 * kStep);
  const int64_t whole = width - width % kStep;
  const auto row_body = [&](int64_t row, auto stream) {
    const T* grad = grad_output + row_offset(row, inner_count, outer_stride, inner_stride);
    const T* y = output + row * width;
    T* to = grad_input + row * width;
    V sums[4] = {};
    for (int64_t element = 0; element < unrolled; element += 4 * kStep)
      for (int i = 0; i < 4; ++i)
        sums[i] += summand<kForm>(load<V>(grad + element + i * kStep),
                                  load<V>(y + element + i * kStep));
    for_each_vector<V>(width - unrolled, [&](int64_t i, auto part) {
      sums[0] += summand<kForm>(load<V>(grad + unrolled + i, part), load<V>(y + unrolled + i, part));
    });
    const V sum = V{} + sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
    const auto at = [&](int64_t element, auto part) {
      return gradient<kForm>(load<V>(grad + element, part), load<V>(y + element, part), sum);
    };
    int64_t element = 0;
    if constexpr (stream.value) {
      const int64_t past = reinterpret_cast<uintptr_t>(to) / sizeof(T) % kStep;
      if (past != 0 && width >= kStep) {
        store<false>(to, at(0, Whole{}));
        element = kStep - past;
      }
      if (width < kStep) element = width;
    }
    for (; element + kStep <= width; element += kStep)
      store<stream.value>(to + element, at(element, Whole{}));
    if (whole == 0) {
      store<false>(to, at(0, First{width}), First{width});
    } else if (element < width) {
      store<false>(to + width - kStep, at(width - kStep, Whole{}));
    }
  };
  const bool stream = rows * width * int64_t(sizeof(T)) >= kStreamFrom &&
                      reinterpret_cast<uintptr_t>(grad_input) % sizeof(T) == 0;
#pragma omp parallel if (rows > 1 && rows * width >= kSerial)
  {
#pragma omp for
    for (int64_t row = 0; row < rows; ++row) {
      if (stream) {
        row_body(row, std::true_type{});
      } else {
        row_body(row, std::false_type{});
      }
    }
    finish_streaming();
  }
}

// Calls body(index, column, part) for every vector of a strip's `columns` columns.
template <typename V, typename Body>
FUSELAB_INLINE void for_columns(int64_t columns, Body body) {
  for_each_vector<V>(columns, [&](int64_t column, auto part) {
    body(column / lanes<V>, column, part);
  });
}

// Computes the forward along the middle dimension of a contiguous (outer, width, inner) tensor.
// Lanes past the last column contain zeros.
template <Form kForm, typename T>
void forward_columns(const T* input, T* output, int64_t outer, int64_t width, int64_t inner) {
  using C = Compute<T>;
  using V = VectorFor<T>;
  constexpr int kStep = kLanes<T>;
  constexpr int kVectors = kStrip / kStep;
  const int64_t strips = (inner + kStrip - 1) / kStrip;
#pragma omp parallel if (outer * strips > 1 && outer * width * inner >= kSerial)
  {
    const std::unique_ptr<C[]> scratch(new C[width * kStrip]);
#pragma omp for
    for (int64_t strip = 0; strip < outer * strips; ++strip) {
      const int64_t begin = (strip % strips) * kStrip;
      const int64_t columns = std::min(kStrip, inner - begin);
      const T* from = input + (strip / strips) * width * inner + begin;
      T* to = output + (strip / strips) * width * inner + begin;
      V maxima[kVectors], sums[kVectors];
      for (int i = 0; i < kVectors; ++i) maxima[i] = constant<V>(-INFINITY), sums[i] = V{};
      for (int64_t row = 0; row < width; ++row)
        for_columns<V>(columns, [&](int64_t index, int64_t column, auto part) {
          maxima[index] = larger(maxima[index], load<V>(from + row * inner + column, part));
        });
      for (int64_t row = 0; row < width; ++row)
        for_columns<V>(columns, [&](int64_t index, int64_t column, auto part) {
          const V difference = load<V>(from + row * inner + column, part) - maxima[index];
          const V term = exponential_of<false>(difference);
          store<false>(scratch.get() + row * kStrip + index * kStep, kept<kForm>(difference, term));
          sums[index] += term;
        });
      for (int i = 0; i < kVectors; ++i) sums[i] = factors_of<kForm>(sums[i]);
      for (int64_t row = 0; row < width; ++row)
        for_columns<V>(columns, [&](int64_t index, int64_t column, auto part) {
          const V value = load<V>(scratch.get() + row * kStrip + index * kStep);
          store<false>(to + row * inner + column, finished<kForm>(value, sums[index]), part);
        });
    }
  }
}

// Computes the gradient along the middle dimension; all tensors are contiguous (outer, width,
// inner).
template <Form kForm, typename T>
void backward_columns(const T* grad_output, const T* output, T* grad_input, int64_t outer,
                      int64_t width, int64_t inner) {
  using V = VectorFor<T>;
  constexpr int kStep = kLanes<T>;
  constexpr int kVectors = kStrip / kStep;
  const int64_t strips = (inner + kStrip - 1) / kStrip;
#pragma omp parallel for if (outer * strips > 1 && outer * width * inner >= kSerial)
  for (int64_t strip = 0; strip < outer * strips; ++strip) {
    const int64_t begin = (strip % strips) * kStrip;
    const int64_t columns = std::min(kStrip, inner - begin);
    const int64_t offset = (strip / strips) * width * inner + begin;
    V sums[kVectors];
    for (int i = 0; i < kVectors; ++i) sums[i] = V{};
    for (int64_t row = 0; row < width; ++row)
      for_columns<V>(columns, [&](int64_t index, int64_t column, auto part) {
        const int64_t place = offset + row * inner + column;
        sums[index] += summand<kForm>(load<V>(grad_output + place, part),
                                      load<V>(output + place, part));
      });
    for (int64_t row = 0; row < width; ++row)
      for_columns<V>(columns, [&](int64_t index, int64_t column, auto part) {
        const int64_t place = offset + row * inner + column;
        store<false>(grad_input + place,
                     gradient<kForm>(load<V>(grad_output + place, part),
                                     load<V>(output + place, part), sums[index]),
                     part);
      });
  }
}

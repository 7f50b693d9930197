// Softmax and log_softmax over one dimension and their gradients on the CPU: vector code without
// intrinsics, except for float16 conversion, which GCC does not vectorise.
//
// Rows: a thread takes whole rows; a row is read once from memory and passes three times through a
// scratch row that stays in L1 or L2 (maximum; exp and sum; scale and store). Columns: a thread takes
// strips of kStrip neighbouring columns and walks down the dimension three times.
//
// In place (output is input): a thread reads and writes only its own rows or columns, and an element
// is written after its last read. The last vector of a row is read early where it overlaps the one
// before it.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>

#if defined(__F16C__)
#include <immintrin.h>
#endif

enum Form { kSoftmax, kLogSoftmax };

struct bfloat16 {
  uint16_t bits;
};

namespace {

// 64 bytes of float or double: one AVX-512 register, two of AVX2, four of SSE or NEON.
template <typename T>
struct VectorOf;
template <>
struct VectorOf<float> {
  typedef float type __attribute__((vector_size(64)));
  typedef int32_t integers __attribute__((vector_size(64)));
};
template <>
struct VectorOf<double> {
  typedef double type __attribute__((vector_size(64)));
  typedef int64_t integers __attribute__((vector_size(64)));
};
template <typename T>
using Vector = typename VectorOf<T>::type;

template <typename T>
struct ComputeOf {
  using type = float;
};
template <>
struct ComputeOf<double> {
  using type = double;
};
template <typename T>
using Compute = typename ComputeOf<T>::type;

template <typename T>
constexpr int kLanes = 64 / sizeof(Compute<T>);

typedef uint16_t Halves __attribute__((vector_size(32)));
typedef uint32_t Words __attribute__((vector_size(64)));

template <typename V>
inline V all(decltype(V{}[0] + V{}[0]) value) {
  return V{} + value;
}

// Loads and stores of one vector, converted from and to the tensor's type.
inline Vector<float> load(const float* from) {
  Vector<float> value;
  std::memcpy(&value, from, 64);
  return value;
}
inline Vector<double> load(const double* from) {
  Vector<double> value;
  std::memcpy(&value, from, 64);
  return value;
}
inline Vector<float> load(const bfloat16* from) {
  Halves bits;
  std::memcpy(&bits, from, 32);
  return (Vector<float>)(__builtin_convertvector(bits, Words) << 16);
}
inline Vector<float> load(const _Float16* from) {
  Vector<float> value;
#if defined(__AVX512F__)
  const __m512 wide = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
  std::memcpy(&value, &wide, 64);
#elif defined(__F16C__)
  const __m256 low = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
  const __m256 high = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + 8)));
  std::memcpy(&value, &low, 32);
  std::memcpy((char*)&value + 32, &high, 32);
#else
  for (int i = 0; i < 16; ++i) value[i] = (float)from[i];
#endif
  return value;
}

inline void store(float* to, Vector<float> value) { std::memcpy(to, &value, 64); }
inline void store(double* to, Vector<double> value) { std::memcpy(to, &value, 64); }
inline void store(bfloat16* to, Vector<float> value) {
  const Words bits = (Words)value;
  // Round to nearest even; a NaN stays one, which the carry would otherwise turn into -0.
  Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  rounded = value == value ? rounded : all<Words>(0x7fc0u);
  const Halves halves = __builtin_convertvector(rounded, Halves);
  std::memcpy(to, &halves, 32);
}
inline void store(_Float16* to, Vector<float> value) {
#if defined(__AVX512F__)
  __m512 wide;
  std::memcpy(&wide, &value, 64);
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph(wide, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  __m256 low, high;
  std::memcpy(&low, &value, 32);
  std::memcpy(&high, (char*)&value + 32, 32);
  _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph(low, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i*)(to + 8), _mm256_cvtps_ph(high, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < 16; ++i) to[i] = (_Float16)value[i];
#endif
}

// The last `count` elements of a row, the other lanes `fill`.
template <typename T>
inline Vector<Compute<T>> load_some(const T* from, int64_t count, Compute<T> fill) {
  T padded[kLanes<T>];
  const T filler = [&] {
    if constexpr (sizeof(T) == 2) {
      T narrow[kLanes<T>];
      store(narrow, all<Vector<float>>(fill));
      return narrow[0];
    } else {
      return fill;
    }
  }();
  for (T& element : padded) element = filler;
  std::memcpy(padded, from, count * sizeof(T));
  return load(padded);
}
template <typename T>
inline void store_some(T* to, int64_t count, Vector<Compute<T>> value) {
  T padded[kLanes<T>];
  store(padded, value);
  std::memcpy(to, padded, count * sizeof(T));
}

// exp(x) for x <= 0 or NaN. 2^n * e^r with |r| <= ln(2)/2 and e^r by its Taylor series, whose
// remainder is below a quarter of an ulp. The float n comes from adding 1.5 * 2^23 (2^52), after which
// the low bits of the sum are n. 2^n is applied in two halves, so that results below the smallest
// normal number stay, as eager's do. Below half the smallest subnormal the result is 0, without a
// multiplication that underflows: that takes 150 cycles on some machines, and masks are full of -inf.
inline Vector<float> exponential(Vector<float> x) {
  using V = Vector<float>;
  using I = VectorOf<float>::integers;
  const V lowest = all<V>(-104.0f);
  const V clamped = x < lowest ? V{} : x;
  const V shifted = clamped * 1.44269504f + 12582912.0f;
  const V n = shifted - 12582912.0f;
  const V r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  V p = r * (1.0f / 5040) + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const I exponent = (I)shifted - 0x4b400000;
  const I half = exponent >> 1;
  const V result = p * (V)((half + 127) << 23) * (V)((exponent - half + 127) << 23);
  return x < lowest ? V{} : result;
}
inline Vector<double> exponential(Vector<double> x) {
  using V = Vector<double>;
  using I = VectorOf<double>::integers;
  const V lowest = all<V>(-746.0);
  const V clamped = x < lowest ? V{} : x;
  const V shifted = clamped * 1.4426950408889634 + 6755399441055744.0;
  const V n = shifted - 6755399441055744.0;
  const V r = (clamped - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  V p = all<V>(1.0 / 6227020800);
  for (const double coefficient :
       {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
        1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0})
    p = p * r + coefficient;
  const I exponent = (I)shifted - 0x4338000000000000;
  const I half = exponent >> 1;
  const V result = p * (V)((half + 1023) << 52) * (V)((exponent - half + 1023) << 52);
  return x < lowest ? V{} : result;
}

// Keeps `first` where `second` is NaN: a NaN shows in the sum, which makes all of the row NaN.
template <typename V>
inline V larger(V first, V second) {
  return second > first ? second : first;
}

template <typename C>
inline C maximum_of(Vector<C> value) {
  C result = value[0];
  for (int i = 1; i < kLanes<C>; ++i) result = value[i] > result ? value[i] : result;
  return result;
}
template <typename C>
inline C sum_of(Vector<C> value) {
  C result = 0;
  for (int i = 0; i < kLanes<C>; ++i) result += value[i];
  return result;
}

// What is kept of an element until its row's sum is known, and what then becomes of it: `factor` is
// 1 / sum, or log(sum).
template <Form kForm, typename V>
inline V kept(V difference, V term) {
  return kForm == kSoftmax ? term : difference;
}
template <Form kForm, typename V>
inline V finished(V kept, V factor) {
  return kForm == kSoftmax ? kept * factor : kept - factor;
}
template <Form kForm, typename C>
inline C factor_of(C sum) {
  return kForm == kSoftmax ? 1 / sum : std::log(sum);
}
template <Form kForm, typename C>
inline Vector<C> factors_of(Vector<C> sums) {
  if (kForm == kSoftmax) return 1 / sums;
  for (int i = 0; i < kLanes<C>; ++i) sums[i] = std::log(sums[i]);
  return sums;
}

// What the backward sums over a row, and the gradient of an element.
template <Form kForm, typename V>
inline V summand(V grad, V y) {
  return kForm == kSoftmax ? grad * y : grad;
}
template <Form kForm, typename V>
inline V gradient(V grad, V y, V sum) {
  if constexpr (kForm == kSoftmax) return y * (grad - sum);
  return grad - exponential(y) * sum;
}

// How a vector of a row meets memory. A row's last vector, where the width is no multiple, is read and
// written whole, kLanes before the end: it Overlaps the one before, and only its last `fresh` lanes
// count in a sum. A row shorter than a vector is Partial.
struct Whole {};
struct Overlap {
  int fresh;
};
struct Partial {
  int count;
};
template <typename How>
constexpr bool is_overlap = std::is_same_v<How, Overlap>;

template <typename T>
inline Vector<Compute<T>> load_as(Whole, const T* from, Compute<T>) {
  return load(from);
}
template <typename T>
inline Vector<Compute<T>> load_as(Overlap, const T* from, Compute<T>) {
  return load(from);
}
template <typename T>
inline Vector<Compute<T>> load_as(Partial partial, const T* from, Compute<T> fill) {
  return load_some(from, partial.count, fill);
}
template <typename T>
inline void store_as(Whole, T* to, Vector<Compute<T>> value) {
  store(to, value);
}
template <typename T>
inline void store_as(Overlap, T* to, Vector<Compute<T>> value) {
  store(to, value);
}
template <typename T>
inline void store_as(Partial partial, T* to, Vector<Compute<T>> value) {
  store_some(to, partial.count, value);
}

// The lanes that no earlier vector has counted. A partial vector's fill adds nothing by itself.
template <typename V>
inline V fresh(Whole, V value) {
  return value;
}
template <typename V>
inline V fresh(Partial, V value) {
  return value;
}
inline Vector<float> fresh(Overlap overlap, Vector<float> value) {
  const VectorOf<float>::integers lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return lane < 16 - overlap.fresh ? Vector<float>{} : value;
}
inline Vector<double> fresh(Overlap overlap, Vector<double> value) {
  const VectorOf<double>::integers lane = {0, 1, 2, 3, 4, 5, 6, 7};
  return lane < 8 - overlap.fresh ? Vector<double>{} : value;
}

// Calls body(index, element, how) for every vector of a row from its element `begin` on (a multiple
// of kStep); index counts vectors.
template <int kStep, typename Body>
inline void for_vectors(int64_t begin, int64_t width, Body body) {
  int64_t element = begin;
  for (; element + kStep <= width; element += kStep) body(element / kStep, element, Whole{});
  const int left = static_cast<int>(width - element);
  if (left == 0) return;
  if (width >= kStep) {
    body(element / kStep, width - kStep, Overlap{left});
  } else {
    body(element / kStep, element, Partial{left});
  }
}

constexpr int64_t kSerial = 1 << 15;  // elements below which a second thread costs more than it does
constexpr int64_t kStrip = 64;        // columns that one thread takes: 4 cache lines of float32

inline int64_t row_offset(int64_t row, int64_t inner_count, int64_t outer_stride,
                          int64_t inner_stride) {
  if (inner_count == 1) return row * outer_stride;
  return (row / inner_count) * outer_stride + (row % inner_count) * inner_stride;
}

// kLanes rows narrower than a vector, `count` of them wanted: one row per lane. They are gathered,
// widened, transposed, and go back the same way: 65536 rows of 5 float32 take 0.6 ms so, and 12.8 ms
// as one partial vector each (one thread, Zen 4).
template <Form kForm, typename T>
inline void forward_row_per_lane(const T* const* from, T* to, int64_t count, int64_t width) {
  using C = Compute<T>;
  using V = Vector<C>;
  constexpr int kStep = kLanes<T>;
  alignas(64) T packed[kStep * kStep] = {};
  alignas(64) C rows[kStep * kStep], columns[kStep * kStep];
  for (int64_t lane = 0; lane < count; ++lane)
    for (int64_t i = 0; i < width; ++i) packed[lane * width + i] = from[lane][i];
  for (int64_t i = 0; i < width; ++i) store(rows + i * kStep, V(load(packed + i * kStep)));
  for (int64_t i = 0; i < width; ++i)
    for (int64_t lane = 0; lane < kStep; ++lane) columns[i * kStep + lane] = rows[lane * width + i];
  V maximum = all<V>(-INFINITY), sum = {};
  for (int64_t i = 0; i < width; ++i) maximum = larger(maximum, V(load(columns + i * kStep)));
  for (int64_t i = 0; i < width; ++i) {
    const V difference = load(columns + i * kStep) - maximum, term = exponential(difference);
    store(columns + i * kStep, kept<kForm>(difference, term));
    sum += term;
  }
  const V factor = factors_of<kForm, C>(sum);
  for (int64_t i = 0; i < width; ++i)
    store(columns + i * kStep, finished<kForm>(load(columns + i * kStep), factor));
  for (int64_t i = 0; i < width; ++i)
    for (int64_t lane = 0; lane < kStep; ++lane) rows[lane * width + i] = columns[i * kStep + lane];
  for (int64_t i = 0; i < width; ++i) store(packed + i * kStep, V(load(rows + i * kStep)));
  std::memcpy(to, packed, count * width * sizeof(T));
}

}  // namespace

// output[row, :] = softmax(input[row, :]), or log_softmax: rows of `width` contiguous elements; row =
// outer * inner_count + inner begins at outer * outer_stride + inner * inner_stride. The output is
// contiguous.
template <Form kForm, typename T>
void forward_rows(const T* input, T* output, int64_t rows, int64_t width, int64_t inner_count,
                  int64_t outer_stride, int64_t inner_stride) {
  using C = Compute<T>;
  using V = Vector<C>;
  constexpr int kStep = kLanes<T>;
  constexpr bool kInOutput = std::is_same_v<T, C>;  // what is kept waits in the output
  const C lowest = -INFINITY;
  const int64_t unrolled = width - width % (4 * kStep);
  if (width < kStep) {
#pragma omp parallel for if (rows * width >= kSerial)
    for (int64_t first = 0; first < rows; first += kStep) {
      const int64_t count = rows - first < kStep ? rows - first : kStep;
      const T* from[kStep];
      for (int64_t lane = 0; lane < count; ++lane)
        from[lane] = input + row_offset(first + lane, inner_count, outer_stride, inner_stride);
      forward_row_per_lane<kForm>(from, output + first * width, count, width);
    }
    return;
  }
#pragma omp parallel if (rows > 1 && rows * width >= kSerial)
  {
    const std::unique_ptr<C[]> scratch(kInOutput ? nullptr : new C[width]);
#pragma omp for
    for (int64_t row = 0; row < rows; ++row) {
      const T* from = input + row_offset(row, inner_count, outer_stride, inner_stride);
      T* to = output + row * width;
      C* waiting;
      if constexpr (kInOutput) {
        waiting = to;
      } else {
        waiting = scratch.get();
      }
      V maxima[4] = {all<V>(lowest), all<V>(lowest), all<V>(lowest), all<V>(lowest)};
      for (int64_t element = 0; element < unrolled; element += 4 * kStep)
        for (int i = 0; i < 4; ++i) maxima[i] = larger(maxima[i], load(from + element + i * kStep));
      for_vectors<kStep>(unrolled, width, [&](int64_t, int64_t element, auto how) {
        maxima[0] = larger(maxima[0], load_as(how, from + element, lowest));
      });
      const C maximum =
          maximum_of<C>(larger(larger(maxima[0], maxima[1]), larger(maxima[2], maxima[3])));

      // Before its first lanes are written over.
      V last = load(from + width - kStep);
      V sums[4] = {};
      for (int64_t element = 0; element < unrolled; element += 4 * kStep)
        for (int i = 0; i < 4; ++i) {
          const V difference = load(from + element + i * kStep) - maximum;
          const V term = exponential(difference);
          store(waiting + element + i * kStep, kept<kForm>(difference, term));
          sums[i] += term;
        }
      for_vectors<kStep>(unrolled, width, [&](int64_t, int64_t element, auto how) {
        const V value = is_overlap<decltype(how)> ? last : load_as(how, from + element, lowest);
        const V difference = value - maximum, term = exponential(difference);
        store_as(how, waiting + element, kept<kForm>(difference, term));
        sums[0] += fresh(how, term);
      });
      const C factor = factor_of<kForm>(sum_of<C>((sums[0] + sums[1]) + (sums[2] + sums[3])));

      last = load(waiting + width - kStep);
      for_vectors<kStep>(0, width, [&](int64_t, int64_t element, auto how) {
        const V value = is_overlap<decltype(how)> ? last : load_as(how, waiting + element, C(0));
        store_as(how, to + element, finished<kForm>(value, V{} + factor));
      });
    }
  }
}

// grad_input[row, :] = output * (grad_output - sum(grad_output * output)), of log_softmax
// grad_output - exp(output) * sum(grad_output): grad_output has contiguous rows placed as
// forward_rows' input, output and grad_input are contiguous.
template <Form kForm, typename T>
void backward_rows(const T* grad_output, const T* output, T* grad_input, int64_t rows,
                   int64_t width, int64_t inner_count, int64_t outer_stride,
                   int64_t inner_stride) {
  using C = Compute<T>;
  using V = Vector<C>;
  constexpr int kStep = kLanes<T>;
  const int64_t unrolled = width - width % (4 * kStep);
#pragma omp parallel for if (rows > 1 && rows * width >= kSerial)
  for (int64_t row = 0; row < rows; ++row) {
    const T* grad = grad_output + row_offset(row, inner_count, outer_stride, inner_stride);
    const T* y = output + row * width;
    T* to = grad_input + row * width;
    V sums[4] = {};
    for (int64_t element = 0; element < unrolled; element += 4 * kStep)
      for (int i = 0; i < 4; ++i)
        sums[i] +=
            summand<kForm>(load(grad + element + i * kStep), load(y + element + i * kStep));
    for_vectors<kStep>(unrolled, width, [&](int64_t, int64_t element, auto how) {
      sums[0] += fresh(how, summand<kForm>(load_as(how, grad + element, C(0)),
                                           load_as(how, y + element, C(0))));
    });
    const V sum = V{} + sum_of<C>((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for_vectors<kStep>(0, width, [&](int64_t, int64_t element, auto how) {
      store_as(how, to + element,
               gradient<kForm>(load_as(how, grad + element, C(0)),
                               load_as(how, y + element, C(0)), sum));
    });
  }
}

// The forward along the middle dimension of a contiguous (outer, width, inner) tensor.
template <Form kForm, typename T>
void forward_columns(const T* input, T* output, int64_t outer, int64_t width, int64_t inner) {
  using C = Compute<T>;
  using V = Vector<C>;
  constexpr int kStep = kLanes<T>;
  constexpr int kVectors = kStrip / kStep;
  const C lowest = -INFINITY;
  const int64_t strips = (inner + kStrip - 1) / kStrip;
#pragma omp parallel if (outer * strips > 1 && outer * width * inner >= kSerial)
  {
    const std::unique_ptr<C[]> scratch(new C[width * kStrip]);
#pragma omp for
    for (int64_t strip = 0; strip < outer * strips; ++strip) {
      const int64_t begin = (strip % strips) * kStrip;
      const int64_t columns = inner - begin < kStrip ? inner - begin : kStrip;
      const T* from = input + (strip / strips) * width * inner + begin;
      T* to = output + (strip / strips) * width * inner + begin;
      V maxima[kVectors], sums[kVectors];
      for (int i = 0; i < kVectors; ++i) maxima[i] = all<V>(lowest), sums[i] = V{};
      for (int64_t row = 0; row < width; ++row)
        for_vectors<kStep>(0, columns, [&](int64_t index, int64_t column, auto how) {
          const V value = load_as(how, from + row * inner + column, lowest);
          maxima[index] = larger(maxima[index], value);
        });
      for (int64_t row = 0; row < width; ++row)
        for_vectors<kStep>(0, columns, [&](int64_t index, int64_t column, auto how) {
          const V value = load_as(how, from + row * inner + column, lowest);
          const V difference = value - maxima[index], term = exponential(difference);
          store(scratch.get() + row * kStrip + index * kStep, kept<kForm>(difference, term));
          sums[index] += term;
        });
      for (int i = 0; i < kVectors; ++i) sums[i] = factors_of<kForm, C>(sums[i]);
      for (int64_t row = 0; row < width; ++row)
        for_vectors<kStep>(0, columns, [&](int64_t index, int64_t column, auto how) {
          const V value = load(scratch.get() + row * kStrip + index * kStep);
          store_as(how, to + row * inner + column, finished<kForm>(value, sums[index]));
        });
    }
  }
}

// The gradient along the middle dimension; all three tensors are contiguous (outer, width, inner).
template <Form kForm, typename T>
void backward_columns(const T* grad_output, const T* output, T* grad_input, int64_t outer,
                      int64_t width, int64_t inner) {
  using C = Compute<T>;
  using V = Vector<C>;
  constexpr int kStep = kLanes<T>;
  constexpr int kVectors = kStrip / kStep;
  const int64_t strips = (inner + kStrip - 1) / kStrip;
#pragma omp parallel for if (outer * strips > 1 && outer * width * inner >= kSerial)
  for (int64_t strip = 0; strip < outer * strips; ++strip) {
    const int64_t begin = (strip % strips) * kStrip;
    const int64_t columns = inner - begin < kStrip ? inner - begin : kStrip;
    const int64_t offset = (strip / strips) * width * inner + begin;
    V sums[kVectors];
    for (int i = 0; i < kVectors; ++i) sums[i] = V{};
    for (int64_t row = 0; row < width; ++row)
      for_vectors<kStep>(0, columns, [&](int64_t index, int64_t column, auto how) {
        const int64_t place = offset + row * inner + column;
        sums[index] += summand<kForm>(load_as(how, grad_output + place, C(0)),
                                      load_as(how, output + place, C(0)));
      });
    for (int64_t row = 0; row < width; ++row)
      for_vectors<kStep>(0, columns, [&](int64_t index, int64_t column, auto how) {
        const int64_t place = offset + row * inner + column;
        store_as(how, grad_input + place,
                 gradient<kForm>(load_as(how, grad_output + place, C(0)),
                                 load_as(how, output + place, C(0)), sums[index]));
      });
  }
}

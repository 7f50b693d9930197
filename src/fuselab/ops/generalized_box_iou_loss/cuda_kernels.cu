// The generalized IoU loss of pairs of boxes and its gradient on NVIDIA GPUs, with or without a
// reduction; in kPadded a row of the second boxes whose bottom is not above 0 is padding.
//
// Memory is the limit: forward 32 bytes per pair in float32 (36 without a reduction), backward 32
// plus 16 per gradient. A thread owns `boxes` pairs, a block's threads apart, and loads all of them
// before it computes: one 16-byte load per float32 box, 8 bytes per 16-bit box, two of 16 per
// float64 box. So 256 threads x 8 blocks have 64 KB in flight per multiprocessor, where 4.8 TB/s
// over 132 of them at 0.7 us latency needs 25. Every byte is read once and written once. The
// backward computes the areas again: about 150 instructions per pair, where its 52 bytes leave time
// for 350. The only branch that depends on the data is the one around padding.
//
// Arithmetic is in float (double if one of the boxes is), compiled without FMA and with IEEE
// division, so that the forward rounds as eager does. Reductions are summed in double in an order
// that depends on shape and device only: thread, warp, block; then `finish` adds the blocks. It is
// a separate launch, because the counter by which the last block could know itself would need a
// launch to be zeroed.
//
// Maxima and minima may drop a NaN, but a NaN in any coordinate makes the union NaN, and so the
// loss and all eight derivatives.
//
// The offset of pair i, in a nest of `rank` loops (innermost last; the loss is contiguous), is the
// sum of index times stride; the coordinates of a box are `step` apart. Strides count elements and
// may be 0. aligned: steps are 1, and every box is aligned to its own size or to 16 bytes.

#include "../_shared/cuda_vectors.h"

enum Reduction { kNone, kSum, kMean, kPadded };

constexpr int threads = 256;
constexpr int finish_threads = 1024;

template <class First, class Second>
struct ArithmeticOf {
  using type = float;
};
template <class Second>
struct ArithmeticOf<double, Second> {
  using type = double;
};
template <class First>
struct ArithmeticOf<First, double> {
  using type = double;
};
template <>
struct ArithmeticOf<double, double> {
  using type = double;
};
template <class First, class Second>
using Arithmetic = typename ArithmeticOf<First, Second>::type;

FUSELAB_INLINE float larger(float a, float b) { return fmaxf(a, b); }
FUSELAB_INLINE double larger(double a, double b) { return fmax(a, b); }
FUSELAB_INLINE float smaller(float a, float b) { return fminf(a, b); }
FUSELAB_INLINE double smaller(double a, double b) { return fmin(a, b); }

// Returns the gradient of `mine`: that of the maximum of two coordinates if it is the larger, that
// of their minimum if it is the smaller, half of both if they tie.
template <class Real>
FUSELAB_INLINE Real of_edge(Real if_larger, Real if_smaller, Real mine, Real other) {
  const Real alone = mine > other ? if_larger : if_smaller;
  return mine == other ? (if_larger + if_smaller) * Real(0.5) : alone;
}

template <class Real>
struct Box {
  Real x1, y1, x2, y2;
};

template <bool aligned, class Real, class Element, class Index>
FUSELAB_INLINE Box<Real> read(const Element* boxes, Index offset, Index step) {
  if constexpr (aligned) {
    const auto pack = load<true, 4>(boxes + offset);
    return {widened<Real>(pack.element[0]), widened<Real>(pack.element[1]),
            widened<Real>(pack.element[2]), widened<Real>(pack.element[3])};
  } else {
    boxes += offset;
    return {widened<Real>(boxes[0]), widened<Real>(boxes[step]), widened<Real>(boxes[2 * step]),
            widened<Real>(boxes[3 * step])};
  }
}

template <class Element, class Real>
FUSELAB_INLINE void write(Element* boxes, const Box<Real>& box) {
  Pack<Element, 4> pack;
  assign(pack.element[0], box.x1);
  assign(pack.element[1], box.y1);
  assign(pack.element[2], box.x2);
  assign(pack.element[3], box.y2);
  store<true>(boxes, pack);
}

// Sides and areas of one pair.
template <class Real>
struct Pair {
  Box<Real> a, b;
  bool overlap;
  Real width, height, hull_width, hull_height;  // of the intersection (0 without overlap), the hull
  Real intersection, gap;                       // the hull without the union
  Real union_area, hull_area;                   // with eps

  FUSELAB_INLINE Pair(const Box<Real>& a, const Box<Real>& b, Real eps) : a(a), b(b) {
    const Real left = larger(a.x1, b.x1), top = larger(a.y1, b.y1);
    const Real right = smaller(a.x2, b.x2), bottom = smaller(a.y2, b.y2);
    overlap = right > left && bottom > top;
    width = overlap ? right - left : Real(0);
    height = overlap ? bottom - top : Real(0);
    hull_width = larger(a.x2, b.x2) - smaller(a.x1, b.x1);
    hull_height = larger(a.y2, b.y2) - smaller(a.y1, b.y1);
    const Real area_a = (a.x2 - a.x1) * (a.y2 - a.y1), area_b = (b.x2 - b.x1) * (b.y2 - b.y1);
    intersection = width * height;
    const Real both = area_a + area_b - intersection, hull = hull_width * hull_height;
    gap = hull - both;
    union_area = both + eps;
    hull_area = hull + eps;
  }

  FUSELAB_INLINE Real loss() const {
    return Real(1) - (intersection / union_area - gap / hull_area);
  }
};

// The derivatives of one pair's loss, times the upstream gradient. Two reciprocals replace six
// divisions and save 3 instructions each: 16-bit boxes leave time for about 190 per pair.
template <class Real>
struct Derivatives {
  Real of_union;
  Real inner_x, inner_y, outer_x, outer_y;  // of the sides of the intersection and of the hull

  FUSELAB_INLINE Derivatives(const Pair<Real>& pair, Real grad) {
    const Real by_union = Real(1) / pair.union_area, by_hull = Real(1) / pair.hull_area;
    const Real grad_by_hull = grad * by_hull;
    const Real of_hull = grad_by_hull - grad * (pair.gap * by_hull * by_hull);
    of_union = grad * (pair.intersection * by_union * by_union) - grad_by_hull;
    const Real of_intersection = -grad * by_union - of_union;
    inner_x = pair.overlap ? of_intersection * pair.height : Real(0);
    inner_y = pair.overlap ? of_intersection * pair.width : Real(0);
    outer_x = of_hull * pair.hull_height;
    outer_y = of_hull * pair.hull_width;
  }

  // Returns the gradient of `mine`, one of the pair's boxes. The intersection's low edge is the
  // larger of two, its high edge the smaller.
  FUSELAB_INLINE Box<Real> of(const Box<Real>& mine, const Box<Real>& other) const {
    const Real area_x = of_union * (mine.y2 - mine.y1), area_y = of_union * (mine.x2 - mine.x1);
    return {-(area_x + of_edge(inner_x, outer_x, mine.x1, other.x1)),
            -(area_y + of_edge(inner_y, outer_y, mine.y1, other.y1)),
            area_x + of_edge(outer_x, inner_x, mine.x2, other.x2),
            area_y + of_edge(outer_y, inner_y, mine.y2, other.y2)};
  }
};

// The offset of a pair in a nest of up to three loops, of which the inner two have these sizes.
template <int rank, class Index>
struct Place {
  Index outer = 0, middle = 0, inner;

  FUSELAB_INLINE Place(Index pair, int64_t middle_size, int64_t inner_size) : inner(pair) {
    if constexpr (rank > 1) {
      inner = pair % Index(inner_size);
      middle = pair / Index(inner_size);
    }
    if constexpr (rank > 2) {
      outer = middle / Index(middle_size);
      middle %= Index(middle_size);
    }
  }
  FUSELAB_INLINE Index offset(int64_t outer_stride, int64_t middle_stride,
                              int64_t inner_stride) const {
    Index sum = inner * Index(inner_stride);
    if constexpr (rank > 1) sum += middle * Index(middle_stride);
    if constexpr (rank > 2) sum += outer * Index(outer_stride);
    return sum;
  }
};

// Computes 1 - GIoU of each pair.
template <class First, class Second, class Eps, class Index, int rank, bool aligned, int boxes>
__global__ void __launch_bounds__(threads)
    forward(const First* __restrict__ first, const Second* __restrict__ second,
            Arithmetic<First, Second>* __restrict__ loss, Eps eps, int64_t count,
            int64_t middle_size, int64_t inner_size, int64_t first_0, int64_t first_1,
            int64_t first_2, int64_t first_step, int64_t second_0, int64_t second_1,
            int64_t second_2, int64_t second_step) {
  using Real = Arithmetic<First, Second>;
  const Index begin = Index(blockIdx.x) * (threads * boxes) + threadIdx.x;
  Box<Real> a[boxes], b[boxes];
#pragma unroll
  for (int k = 0; k < boxes; ++k) {
    const Index pair = begin + k * threads;
    if (pair < count) {
      const Place<rank, Index> at(pair, middle_size, inner_size);
      a[k] = read<aligned, Real>(first, at.offset(first_0, first_1, first_2), Index(first_step));
      b[k] =
          read<aligned, Real>(second, at.offset(second_0, second_1, second_2), Index(second_step));
    }
  }
#pragma unroll
  for (int k = 0; k < boxes; ++k) {
    const Index pair = begin + k * threads;
    if (pair < count) loss[pair] = Pair<Real>(a[k], b[k], scale_of<Real>(eps)).loss();
  }
}

// Returns the sum over a block in thread 0; all threads must call it. block_threads is a multiple
// of 32.
template <int block_threads>
FUSELAB_INLINE double sum_over_block(double value) {
  __shared__ double of_warp[block_threads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_down_sync(0xffffffffu, value, step);
  __syncthreads();  // an earlier call may still be reading
  if (lane == 0) of_warp[warp] = value;
  __syncthreads();
  if (warp == 0) {
    value = lane < block_threads / 32 ? of_warp[lane] : 0.0;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += __shfl_down_sync(0xffffffffu, value, step);
  }
  return value;
}

// Returns the result of a reduction over `count` pairs, of which `valid` are boxes (kPadded).
template <Reduction reduction>
FUSELAB_INLINE double reduced(double sum, double valid, int64_t count) {
  if constexpr (reduction == kMean) return sum / static_cast<double>(count);
  if constexpr (reduction == kPadded) return sum / fmax(valid, 1.0);
  return sum;
}

// Blocks take tiles of block_threads * boxes pairs in turn. A single block writes the result.
// Several blocks write their sums to partial[block] and, in kPadded, their number of boxes to
// partial[gridDim.x + block].
template <class First, class Second, class Eps, Reduction reduction, class Index, int rank,
          bool aligned, int boxes, int block_threads>
__global__ void __launch_bounds__(block_threads)
    reduce(const First* __restrict__ first, const Second* __restrict__ second,
           Arithmetic<First, Second>* __restrict__ result, double* __restrict__ partial, Eps eps,
           int64_t count, int64_t middle_size, int64_t inner_size, int64_t first_0,
           int64_t first_1, int64_t first_2, int64_t first_step, int64_t second_0,
           int64_t second_1, int64_t second_2, int64_t second_step) {
  using Real = Arithmetic<First, Second>;
  constexpr int tile = block_threads * boxes;
  double sum = 0, valid = 0;
  for (int64_t start = int64_t(blockIdx.x) * tile; start < count;
       start += int64_t(gridDim.x) * tile) {
    Box<Real> a[boxes], b[boxes];
#pragma unroll
    for (int k = 0; k < boxes; ++k) {
      const Index pair = Index(start) + k * block_threads + threadIdx.x;
      if (pair < count) {
        const Place<rank, Index> at(pair, middle_size, inner_size);
        a[k] = read<aligned, Real>(first, at.offset(first_0, first_1, first_2), Index(first_step));
        b[k] = read<aligned, Real>(second, at.offset(second_0, second_1, second_2),
                                   Index(second_step));
      }
    }
#pragma unroll
    for (int k = 0; k < boxes; ++k) {
      const Index pair = Index(start) + k * block_threads + threadIdx.x;
      if (pair < count && (reduction != kPadded || b[k].y2 > Real(0))) {
        sum += static_cast<double>(Pair<Real>(a[k], b[k], scale_of<Real>(eps)).loss());
        if constexpr (reduction == kPadded) valid += 1;
      }
    }
  }
  sum = sum_over_block<block_threads>(sum);
  if constexpr (reduction == kPadded) valid = sum_over_block<block_threads>(valid);
  if (threadIdx.x != 0) return;
  if (gridDim.x == 1) {
    *result = static_cast<Real>(reduced<reduction>(sum, valid, count));
    return;
  }
  partial[blockIdx.x] = sum;
  if constexpr (reduction == kPadded) partial[gridDim.x + blockIdx.x] = valid;
}

// Adds, in one block, the sums of the `blocks` blocks of `reduce`.
template <class Real, Reduction reduction>
__global__ void __launch_bounds__(finish_threads)
    finish(const double* __restrict__ partial, Real* __restrict__ result, int64_t blocks,
           int64_t count) {
  double sum = 0, valid = 0;
  for (int64_t block = threadIdx.x; block < blocks; block += finish_threads) {
    sum += partial[block];
    if constexpr (reduction == kPadded) valid += partial[blocks + block];
  }
  sum = sum_over_block<finish_threads>(sum);
  if constexpr (reduction == kPadded) valid = sum_over_block<finish_threads>(valid);
  if (threadIdx.x == 0) *result = static_cast<Real>(reduced<reduction>(sum, valid, count));
}

// Adds the number of boxes that are no padding to *valid, which was 0. They are integers, so any
// order is right.
template <class Second, class Index, int rank>
__global__ void __launch_bounds__(threads)
    count_valid(const Second* __restrict__ second, unsigned long long* __restrict__ valid,
                int64_t count, int64_t middle_size, int64_t inner_size, int64_t second_0,
                int64_t second_1, int64_t second_2, int64_t second_step) {
  using Real = Arithmetic<Second, Second>;
  unsigned mine = 0;
  for (int64_t pair = int64_t(blockIdx.x) * threads + threadIdx.x; pair < count;
       pair += int64_t(gridDim.x) * threads) {
    const Place<rank, Index> at(Index(pair), middle_size, inner_size);
    const Index offset = at.offset(second_0, second_1, second_2) + 3 * Index(second_step);
    mine += widened<Real>(second[offset]) > Real(0);
  }
  mine = __reduce_add_sync(0xffffffffu, mine);
  if (threadIdx.x % 32 == 0) atomicAdd(valid, static_cast<unsigned long long>(mine));
}

// Computes the gradients of both boxes, null if not needed, contiguous. After a reduction `grad` is
// one number, with strides 0. In kPadded *valid is the number of boxes; if it is null, every block
// counts them, for batches so small that another launch would cost more.
template <class First, class Second, class Eps, Reduction reduction, class Index, int rank,
          bool aligned, int boxes>
__global__ void __launch_bounds__(threads)
    backward(const Arithmetic<First, Second>* __restrict__ grad, const First* __restrict__ first,
             const Second* __restrict__ second, const unsigned long long* __restrict__ valid,
             First* __restrict__ grad_first, Second* __restrict__ grad_second, Eps eps,
             int64_t count, int64_t middle_size, int64_t inner_size, int64_t grad_0,
             int64_t grad_1, int64_t grad_2, int64_t first_0, int64_t first_1, int64_t first_2,
             int64_t first_step, int64_t second_0, int64_t second_1, int64_t second_2,
             int64_t second_step) {
  using Real = Arithmetic<First, Second>;
  Real divisor = 1;
  if constexpr (reduction == kMean) divisor = static_cast<Real>(count);
  if constexpr (reduction == kPadded) {
    __shared__ Real counted;
    if (valid != nullptr) {
      divisor = larger(static_cast<Real>(*valid), Real(1));
    } else {
      int mine = 0;
      for (Index pair = threadIdx.x; pair < count; pair += threads) {
        const Place<rank, Index> at(pair, middle_size, inner_size);
        const Index offset = at.offset(second_0, second_1, second_2) + 3 * Index(second_step);
        mine += widened<Real>(second[offset]) > Real(0);
      }
      const double total = sum_over_block<threads>(mine);
      if (threadIdx.x == 0) counted = larger(static_cast<Real>(total), Real(1));
      __syncthreads();
      divisor = counted;
    }
  }
  const Index begin = Index(blockIdx.x) * (threads * boxes) + threadIdx.x;
  Box<Real> a[boxes], b[boxes];
  Real upstream[boxes];
#pragma unroll
  for (int k = 0; k < boxes; ++k) {
    const Index pair = begin + k * threads;
    if (pair < count) {
      const Place<rank, Index> at(pair, middle_size, inner_size);
      a[k] = read<aligned, Real>(first, at.offset(first_0, first_1, first_2), Index(first_step));
      b[k] =
          read<aligned, Real>(second, at.offset(second_0, second_1, second_2), Index(second_step));
      upstream[k] = __ldg(grad + at.offset(grad_0, grad_1, grad_2));
    }
  }
#pragma unroll
  for (int k = 0; k < boxes; ++k) {
    const Index pair = begin + k * threads;
    if (pair >= count) return;
    Box<Real> of_a{}, of_b{};
    if (reduction != kPadded || b[k].y2 > Real(0)) {
      if constexpr (reduction == kMean || reduction == kPadded) upstream[k] /= divisor;
      const Pair<Real> both(a[k], b[k], scale_of<Real>(eps));
      const Derivatives<Real> derivatives(both, upstream[k]);
      if (grad_first) of_a = derivatives.of(both.a, both.b);
      if (grad_second) of_b = derivatives.of(both.b, both.a);
    }
    if (grad_first) write(grad_first + pair * 4, of_a);
    if (grad_second) write(grad_second + pair * 4, of_b);
  }
}

// The generalized IoU loss of pairs of boxes and its gradient on the CPU, with or without a
// reduction; in kPadded a row of the second boxes whose bottom is not above 0 is padding.
//
// A thread takes tiles of kTile pairs. Each tile's boxes are converted to the arithmetic type and
// split into one run per coordinate, which stay in L1; the arithmetic is on vectors of these runs.
// Every byte is read once from memory and written once; the backward computes the areas again.
// Arithmetic is in float (double if one of the boxes is), and products are kept out of FMAs: it
// rounds as eager does, and what cancels in eager cancels here. Reductions are summed in double,
// tile by tile, in an order that depends only on the shape.
//
// Maxima and minima may drop a NaN, but a NaN in any coordinate makes the union NaN, and so the
// loss and all eight derivatives.
//
// The offset of pair i, in a nest of three loops (innermost last; the loss is contiguous), is the
// sum of index times stride; the coordinates of a box are `step` apart. Strides count elements and
// may be 0.

#include <omp.h>

#include <algorithm>
#include <vector>

#include "../../runtime/include/cpu_vectors.h"

// The numbers are those of cpu_launch.py.
enum Reduction : int32_t { kNone, kSum, kMean, kPadded };

namespace {

constexpr int64_t kTile = 256;          // pairs: 16 KB of float runs and 4 KB of each operand
constexpr int64_t kParallelFrom = 4096;  // pairs; below, starting threads costs more (5 us)

template <class First, class Second>
using Arithmetic = std::conditional_t<
    std::is_same_v<First, double> || std::is_same_v<Second, double>, double, float>;

// The coordinates of a tile's boxes: run[0] has x1 of all boxes, then y1, x2, y2.
template <class Real>
struct Runs {
  alignas(64) Real run[4][kTile];
};

// An operand in a nest of three loops, of which the inner two have these sizes.
template <class Element>
struct Operand {
  const Element* data;
  int64_t middle_size, inner_size, outer_stride, middle_stride, inner_stride, step;

  bool is_dense() const {
    return step == 1 && inner_stride == 4 && middle_stride == 4 * inner_size &&
           outer_stride == 4 * inner_size * middle_size;
  }

  // Calls body(i, address) for i in [0, count) with the address of pair `pair` + i.
  template <class Body>
  void for_each(int64_t pair, int64_t count, Body body) const {
    int64_t inner = pair % inner_size, row = pair / inner_size;
    int64_t middle = row % middle_size, outer = row / middle_size;
    for (int64_t i = 0; i < count; ++i) {
      body(i, data + outer * outer_stride + middle * middle_stride + inner * inner_stride);
      if (++inner < inner_size) continue;
      inner = 0;
      if (++middle < middle_size) continue;
      middle = 0;
      ++outer;
    }
  }
};

// Reads and splits `count` boxes from `pair` on; the last vector's lanes past them are not written.
template <class Real, class Element>
void read(const Operand<Element>& boxes, int64_t pair, int64_t count, Runs<Real>& runs) {
  Element gathered[4 * kTile];
  const Element* source = boxes.data + 4 * pair;
  if (!boxes.is_dense()) {
    boxes.for_each(pair, count, [&](int64_t i, const Element* box) {
      for (int64_t k = 0; k < 4; ++k) gathered[4 * i + k] = box[k * boxes.step];
    });
    source = gathered;
  }
  alignas(64) Real converted[4 * kTile];
  for_each_vector<Vector<Real>>(4 * count, [&](int64_t i, auto part) {
    store<false>(converted + i, load<Vector<Real>>(source + i, part), part);
  });
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t k = 0; k < 4; ++k) runs.run[k][i] = converted[4 * i + k];
  }
}

template <class Real, class Element>
void write(Element* boxes, int64_t count, const Runs<Real>& runs) {
  alignas(64) Real together[4 * kTile];
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t k = 0; k < 4; ++k) together[4 * i + k] = runs.run[k][i];
  }
  for_each_vector<Vector<Real>>(4 * count, [&](int64_t i, auto part) {
    store<false>(boxes + i, load<Vector<Real>>(together + i, part), part);
  });
}

template <class Vec>
FUSELAB_INLINE Vec product(Vec a, Vec b) {
  return opaque<Vec>(a * b);
}

// Returns the gradient of `mine`: that of the maximum of two coordinates if it is the larger, that
// of their minimum if it is the smaller, half of both if they tie.
template <class Vec>
FUSELAB_INLINE Vec of_edge(Vec if_larger, Vec if_smaller, Vec mine, Vec other) {
  const Vec alone = choose(mine > other, if_larger, if_smaller);
  return choose(mine == other, (if_larger + if_smaller) / 2, alone);
}

template <class Vec>
struct Box {
  Vec x1, y1, x2, y2;

  template <class Real>
  FUSELAB_INLINE Box(const Runs<Real>& runs, int64_t i)
      : x1(load<Vec>(runs.run[0] + i)),
        y1(load<Vec>(runs.run[1] + i)),
        x2(load<Vec>(runs.run[2] + i)),
        y2(load<Vec>(runs.run[3] + i)) {}
};

// Sides and areas of pairs.
template <class Vec>
struct Pair {
  Integers<Vec> overlap;
  Vec width, height, hull_width, hull_height;  // of the intersection (0 without overlap), the hull
  Vec intersection, gap;                       // gap: the hull without the union
  Vec union_area, hull_area;                   // eps included

  FUSELAB_INLINE Pair(const Box<Vec>& a, const Box<Vec>& b, Scalar<Vec> eps) {
    const Vec left = larger(a.x1, b.x1), top = larger(a.y1, b.y1);
    const Vec right = smaller(a.x2, b.x2), bottom = smaller(a.y2, b.y2);
    overlap = (right > left) & (bottom > top);
    width = choose(overlap, right - left, Vec{});
    height = choose(overlap, bottom - top, Vec{});
    hull_width = larger(a.x2, b.x2) - smaller(a.x1, b.x1);
    hull_height = larger(a.y2, b.y2) - smaller(a.y1, b.y1);
    const Vec area_a = product(a.x2 - a.x1, a.y2 - a.y1);
    const Vec area_b = product(b.x2 - b.x1, b.y2 - b.y1);
    intersection = product(width, height);
    const Vec both = area_a + area_b - intersection;
    const Vec hull = product(hull_width, hull_height);
    gap = hull - both;
    union_area = both + eps;
    hull_area = hull + eps;
  }

  FUSELAB_INLINE Vec loss() const {
    return Scalar<Vec>(1) - (intersection / union_area - gap / hull_area);
  }
};

// Derivatives of the losses, times the upstream gradient.
template <class Vec>
struct Derivatives {
  Vec of_union;
  Vec inner_x, inner_y, outer_x, outer_y;  // of the sides of the intersection and of the hull

  FUSELAB_INLINE Derivatives(const Pair<Vec>& pair, Vec grad) {
    const Vec one = constant<Vec>(1);
    const Vec by_union = one / pair.union_area, by_hull = one / pair.hull_area;
    const Vec grad_by_hull = product(grad, by_hull);
    const Vec of_hull = grad_by_hull - product(grad, pair.gap * by_hull * by_hull);
    of_union = product(grad, pair.intersection * by_union * by_union) - grad_by_hull;
    const Vec of_intersection = product(-grad, by_union) - of_union;
    inner_x = choose(pair.overlap, product(of_intersection, pair.height), Vec{});
    inner_y = choose(pair.overlap, product(of_intersection, pair.width), Vec{});
    outer_x = product(of_hull, pair.hull_height);
    outer_y = product(of_hull, pair.hull_width);
  }

  // Stores the gradient of `mine`, one box of the pair, or 0 if not `valid`. The intersection's low
  // edge is the larger of two, its high edge the smaller.
  template <class Real>
  FUSELAB_INLINE void write(const Box<Vec>& mine, const Box<Vec>& other, Integers<Vec> valid,
                            Runs<Real>& to, int64_t i) const {
    const Vec area_x = product(of_union, mine.y2 - mine.y1);
    const Vec area_y = product(of_union, mine.x2 - mine.x1);
    const Vec of[4] = {-(area_x + of_edge(inner_x, outer_x, mine.x1, other.x1)),
                       -(area_y + of_edge(inner_y, outer_y, mine.y1, other.y1)),
                       area_x + of_edge(outer_x, inner_x, mine.x2, other.x2),
                       area_y + of_edge(outer_y, inner_y, mine.y2, other.y2)};
    for (int k = 0; k < 4; ++k) store<false>(to.run[k] + i, choose(valid, of[k], Vec{}));
  }
};

// Calls body(first pair, number of pairs, its own scratch) for every tile.
template <class Scratch, class Body>
void for_each_tile(int64_t count, Body body) {
#pragma omp parallel if (count >= kParallelFrom)
  {
    Scratch scratch{};
#pragma omp for schedule(static)
    for (int64_t begin = 0; begin < count; begin += kTile) {
      body(begin, std::min(kTile, count - begin), scratch);
    }
  }
}

template <class Real>
struct ForwardScratch {
  Runs<Real> a, b;
  alignas(64) Real loss[kTile];
};
template <class Real>
struct BackwardScratch {
  Runs<Real> a, b, of_a, of_b;
  alignas(64) Real grad[kTile];
};

// Writes the losses of one tile to scratch.loss.
template <class Real, class First, class Second>
void losses(const Operand<First>& a, const Operand<Second>& b, int64_t begin, int64_t count,
            Real eps, ForwardScratch<Real>& scratch) {
  using Vec = Vector<Real>;
  read(a, begin, count, scratch.a);
  read(b, begin, count, scratch.b);
  for (int64_t i = 0; i < count; i += lanes<Vec>) {
    const Pair<Vec> pair(Box<Vec>(scratch.a, i), Box<Vec>(scratch.b, i), eps);
    store<false>(scratch.loss + i, pair.loss());
  }
}

}  // namespace

template <class First, class Second>
void forward(const First* first, const Second* second, Arithmetic<First, Second>* loss,
             Arithmetic<First, Second> eps, int64_t count, int64_t middle_size,
             int64_t inner_size, int64_t first_0, int64_t first_1, int64_t first_2,
             int64_t first_step, int64_t second_0, int64_t second_1, int64_t second_2,
             int64_t second_step) {
  using Real = Arithmetic<First, Second>;
  const Operand<First> a{first, middle_size, inner_size, first_0, first_1, first_2, first_step};
  const Operand<Second> b{second,   middle_size, inner_size, second_0,
                          second_1, second_2,    second_step};
  for_each_tile<ForwardScratch<Real>>(
      count, [&](int64_t begin, int64_t size, ForwardScratch<Real>& scratch) {
        losses(a, b, begin, size, eps, scratch);
        std::copy_n(scratch.loss, size, loss + begin);
      });
}

// Computes the reduced loss, one number.
template <class First, class Second>
void reduce(const First* first, const Second* second, Arithmetic<First, Second>* result,
            int32_t reduction, Arithmetic<First, Second> eps, int64_t count, int64_t middle_size, int64_t inner_size,
            int64_t first_0, int64_t first_1, int64_t first_2, int64_t first_step,
            int64_t second_0, int64_t second_1, int64_t second_2, int64_t second_step) {
  using Real = Arithmetic<First, Second>;
  const Operand<First> a{first, middle_size, inner_size, first_0, first_1, first_2, first_step};
  const Operand<Second> b{second,   middle_size, inner_size, second_0,
                          second_1, second_2,    second_step};
  std::vector<double> sums((count + kTile - 1) / kTile);
  int64_t valid = 0;
#pragma omp parallel if (count >= kParallelFrom) reduction(+ : valid)
  {
    ForwardScratch<Real> scratch{};
#pragma omp for schedule(static)
    for (int64_t begin = 0; begin < count; begin += kTile) {
      const int64_t size = std::min(kTile, count - begin);
      losses(a, b, begin, size, eps, scratch);
      double sum = 0;
      for (int64_t i = 0; i < size; ++i) {
        const bool counts = reduction != kPadded || scratch.b.run[3][i] > 0;
        sum += counts ? static_cast<double>(scratch.loss[i]) : 0.0;
        valid += counts;
      }
      sums[begin / kTile] = sum;
    }
  }
  double total = 0;
  for (double sum : sums) total += sum;
  if (reduction != kSum) total /= static_cast<double>(std::max<int64_t>(valid, 1));
  *result = static_cast<Real>(total);
}

// Computes the gradients of both boxes, null if not needed, contiguous. After a reduction `grad` is
// one number, with strides 0.
template <class First, class Second>
void backward(const Arithmetic<First, Second>* grad, const First* first, const Second* second,
              First* grad_first, Second* grad_second, int32_t reduction,
              Arithmetic<First, Second> eps, int64_t count, int64_t middle_size, int64_t inner_size, int64_t grad_0,
              int64_t grad_1, int64_t grad_2, int64_t first_0, int64_t first_1, int64_t first_2,
              int64_t first_step, int64_t second_0, int64_t second_1, int64_t second_2,
              int64_t second_step) {
  using Real = Arithmetic<First, Second>;
  using Vec = Vector<Real>;
  const Operand<First> a{first, middle_size, inner_size, first_0, first_1, first_2, first_step};
  const Operand<Second> b{second,   middle_size, inner_size, second_0,
                          second_1, second_2,    second_step};
  const Operand<Real> g{grad, middle_size, inner_size, grad_0, grad_1, grad_2, 0};
  Real divisor = 1;
  if (reduction == kMean) divisor = static_cast<Real>(count);
  if (reduction == kPadded) {
    int64_t valid = 0;
#pragma omp parallel if (count >= kParallelFrom) reduction(+ : valid)
    {
      Runs<Real> runs;
#pragma omp for schedule(static)
      for (int64_t begin = 0; begin < count; begin += kTile) {
        const int64_t size = std::min(kTile, count - begin);
        read(b, begin, size, runs);
        for (int64_t i = 0; i < size; ++i) valid += runs.run[3][i] > 0;
      }
    }
    divisor = static_cast<Real>(std::max<int64_t>(valid, 1));
  }
  for_each_tile<BackwardScratch<Real>>(
      count, [&](int64_t begin, int64_t size, BackwardScratch<Real>& scratch) {
        read(a, begin, size, scratch.a);
        read(b, begin, size, scratch.b);
        g.for_each(begin, size, [&](int64_t i, const Real* upstream) {
          scratch.grad[i] = *upstream / divisor;
        });
        for (int64_t i = 0; i < size; i += lanes<Vec>) {
          const Box<Vec> mine(scratch.a, i), other(scratch.b, i);
          const Derivatives<Vec> derivatives(Pair<Vec>(mine, other, eps),
                                             load<Vec>(scratch.grad + i));
          Integers<Vec> valid = Integers<Vec>{} - 1;
          if (reduction == kPadded) valid = other.y2 > Vec{};
          if (grad_first) derivatives.write(mine, other, valid, scratch.of_a, i);
          if (grad_second) derivatives.write(other, mine, valid, scratch.of_b, i);
        }
        if (grad_first) write(grad_first + 4 * begin, size, scratch.of_a);
        if (grad_second) write(grad_second + 4 * begin, size, scratch.of_b);
      });
}

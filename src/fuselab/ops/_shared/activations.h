// The activations as functors, for CUDA C++ (Real = float, double) and for C++ on vectors.
//
// A file that includes this one first defines what elementary.h asks for.
//
// A functor maps a pre-activation to the output (forward) and an upstream gradient to that of the
// pre-activation (pullback); `derivative_of` says what the pullback's second argument is.
#pragma once

#include "../../runtime/include/elementary.h"

enum class Saved { nothing, output, preactivation };

struct Identity {
  static constexpr Saved derivative_of = Saved::nothing;
  template <class Real>
  static FUSELAB_INLINE Real forward(Real x) {
    return x;
  }
  template <class Real>
  static FUSELAB_INLINE Real pullback(Real grad, Real) {
    return grad;
  }
};

// NaN compares false and is kept; so is -0.0, as in PyTorch.
struct Relu {
  static constexpr Saved derivative_of = Saved::output;
  template <class Real>
  static FUSELAB_INLINE Real forward(Real x) {
    return choose(x < constant<Real>(0.0), constant<Real>(0.0), x);
  }
  template <class Real>
  static FUSELAB_INLINE Real pullback(Real grad, Real output) {
    return choose(output <= constant<Real>(0.0), constant<Real>(0.0), grad);
  }
};

struct LeakyRelu {
  static constexpr Saved derivative_of = Saved::output;
  template <class Real>
  static FUSELAB_INLINE Real forward(Real x) {
    return choose(x > constant<Real>(0.0), x, x * constant<Real>(0.01));
  }
  template <class Real>
  static FUSELAB_INLINE Real pullback(Real grad, Real output) {
    return choose(output > constant<Real>(0.0), grad, grad * constant<Real>(0.01));
  }
};

// x Phi(x) (Hendrycks and Gimpel, arXiv:1606.08415).
struct Gelu {
  static constexpr Saved derivative_of = Saved::preactivation;
  template <class Real>
  static FUSELAB_INLINE Real forward(Real x) {
    return x * normal<Real>(x).distribution;
  }
  template <class Real>
  static FUSELAB_INLINE Real pullback(Real grad, Real x) {
    const Normal<Real> at = normal<Real>(x);
    return grad * (at.distribution + x * at.density);
  }
};

// 0.5 x (1 + tanh(u)) = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3): the second form keeps
// its relative precision for negative x.
struct GeluTanh {
  static constexpr Saved derivative_of = Saved::preactivation;
  template <class Real>
  static FUSELAB_INLINE Real twice_u(Real x) {
    return x * (x * x * constant<Real>(0.07135481627260025) + constant<Real>(1.5957691216057308));
  }
  template <class Real>
  static FUSELAB_INLINE Real forward(Real x) {
    return x * logistic<Real>(twice_u<Real>(x)).gate;
  }
  template <class Real>
  static FUSELAB_INLINE Real pullback(Real grad, Real x) {
    const Logistic<Real> at = logistic<Real>(twice_u<Real>(x));
    const Real slope =
        x * x * constant<Real>(0.21406444881780074) + constant<Real>(1.5957691216057308);
    return grad * (at.gate + x * at.gate * at.complement * slope);
  }
};

struct Silu {
  static constexpr Saved derivative_of = Saved::preactivation;
  template <class Real>
  static FUSELAB_INLINE Real forward(Real x) {
    return x * logistic<Real>(x).gate;
  }
  template <class Real>
  static FUSELAB_INLINE Real pullback(Real grad, Real x) {
    const Logistic<Real> at = logistic<Real>(x);
    return grad * (at.gate * (x * at.complement + constant<Real>(1.0)));
  }
};

struct Sigmoid {
  static constexpr Saved derivative_of = Saved::output;
  template <class Real>
  static FUSELAB_INLINE Real forward(Real x) {
    return logistic<Real>(x).gate;
  }
  template <class Real>
  static FUSELAB_INLINE Real pullback(Real grad, Real output) {
    return grad * (output * (constant<Real>(1.0) - output));
  }
};

struct Tanh {
  static constexpr Saved derivative_of = Saved::output;
  template <class Real>
  static FUSELAB_INLINE Real forward(Real x) {
    return hyperbolic_tangent(x);
  }
  template <class Real>
  static FUSELAB_INLINE Real pullback(Real grad, Real output) {
    return grad * (constant<Real>(1.0) - output * output);
  }
};

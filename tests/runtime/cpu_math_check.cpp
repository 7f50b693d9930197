// Every function of cpu_math.h over an array, for test_cpu_math.py.

#include "cpu_math.h"

#define FUNCTION(name)                  \
  struct name {                         \
    template <class V>                  \
    static V of(V x) {                  \
      return math::name(x);             \
    }                                   \
  };

namespace functions {
FUNCTION(abs)
FUNCTION(ceil)
FUNCTION(erf)
FUNCTION(exp)
FUNCTION(expm1)
FUNCTION(floor)
FUNCTION(log)
FUNCTION(log1p)
FUNCTION(relu)
FUNCTION(round)
FUNCTION(rsqrt)
FUNCTION(sigmoid)
FUNCTION(sign)
FUNCTION(sin)
FUNCTION(cos)
FUNCTION(sqrt)
FUNCTION(tanh)
}  // namespace functions

// `count` is a multiple of the vectors' width.
template <class Function, class Real>
void apply(const Real* input, Real* output, int64_t count) {
  using V = Vector<Real>;
  for (int64_t i = 0; i < count; i += lanes<V>)
    store<false>(output + i, Function::of(load<V>(input + i)));
}

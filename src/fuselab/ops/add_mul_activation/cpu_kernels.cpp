// act(input + scale * update + bias) on the CPU, forward and backward; update or bias may be absent
// (bias_activation has no update).
//
// Every operand is read once and every output written once. Arithmetic is in float (double where
// the output is double), with the product and the sums rounded one by one, as eager rounds them.
// Sizes and strides are those of the loop nest, in elements, outermost dimension first.

#include <cmath>
#include "../_shared/cpu_nest.h"

template <class Output>
using Arithmetic = std::conditional_t<std::is_same_v<Output, double>, double, float>;

// Tells which terms there are besides the input.
template <bool update, bool bias>
struct Terms {
  static constexpr bool has_update = update, has_bias = bias;
};

template <class Terms, class Vec, class Part, class Input, class... Rest>
FUSELAB_INLINE Vec preactivation(Scalar<Vec> scale, int64_t i, Part part, const Input* input,
                                 const Rest*... rest) {
  Vec sum = load<Vec>(input + i, part);
  bool is_update = Terms::has_update;
  ((sum = sum + (is_update ? opaque<Vec>(load<Vec>(rest + i, part) * scale)
                           : load<Vec>(rest + i, part)),
    is_update = false),
   ...);
  return sum;
}

// Calls walk(operand...) with the operands of the pre-activation.
template <class Terms, class Walk, class Input, class Update, class Bias>
void with_terms(Walk walk, const Input& input, const Update& update, const Bias& bias) {
  if constexpr (Terms::has_update && Terms::has_bias) {
    walk(input, update, bias);
  } else if constexpr (Terms::has_update) {
    walk(input, update);
  } else {
    static_assert(Terms::has_bias, "act(input) alone is no fused operator");
    walk(input, bias);
  }
}

template <class Activation, class Terms, class Output, class... Operands>
void forward_nest(const Index& sizes, Output* output, Arithmetic<Output> scale,
                  const Operands&... operands) {
  using Vec = Vector<Arithmetic<Output>>;
  int64_t output_bytes = sizeof(Output);
  for (int64_t size : sizes) output_bytes *= size;
  const auto tile_body = [=](auto stream, int64_t offset, int64_t count, const auto*... runs) {
    for_each_vector<Vec>(count, [&](int64_t i, auto part) {
      const Vec result = Activation::forward(preactivation<Terms, Vec>(scale, i, part, runs...));
      store<stream.value>(output + offset + i, result, part);
    });
  };
  const bool streams = output_bytes >= stream_from;
  for_each_tile<Activation>(
      sizes, output, streams,
      [=](int64_t offset, int64_t count, const auto*... runs) {
        if (streams && is_aligned(output + offset)) {
          tile_body(std::true_type{}, offset, count, runs...);
        } else {
          tile_body(std::false_type{}, offset, count, runs...);
        }
      },
      operands...);
}

template <class Activation, class Terms, class Output, class Input, class Update, class Bias>
void forward(const Input* input, const Update* update, const Bias* bias, Output* output,
             Arithmetic<Output> scale, int64_t size_0, int64_t size_1, int64_t size_2,
             int64_t size_3, int64_t size_4, int64_t input_0, int64_t input_1, int64_t input_2,
             int64_t input_3, int64_t input_4, int64_t update_0, int64_t update_1,
             int64_t update_2, int64_t update_3, int64_t update_4, int64_t bias_0, int64_t bias_1,
             int64_t bias_2, int64_t bias_3, int64_t bias_4) {
  const Index sizes{size_0, size_1, size_2, size_3, size_4};
  const Operand<Input> x{input, {input_0, input_1, input_2, input_3, input_4}};
  const Operand<Update> u{update, {update_0, update_1, update_2, update_3, update_4}};
  const Operand<Bias> b{bias, {bias_0, bias_1, bias_2, bias_3, bias_4}};
  const auto walk = [&](const Index& part, int64_t row, int64_t repeat, const auto& row_bias) {
    const auto nest = [&](const auto&... terms) {
      forward_nest<Activation, Terms>(part, output + row * size_4, scale, terms...);
    };
    with_terms<Terms>(nest, folded(x, row, repeat), folded(u, row, repeat), row_bias);
  };
  if constexpr (!Terms::has_bias) {
    walk(sizes, 0, 1, b);
  } else if constexpr (Terms::has_update) {
    for_each_fold(sizes, b, walk, x, u);
  } else {
    for_each_fold(sizes, b, walk, x);
  }
}

// Returns the gradient of the pre-activation from the upstream gradient and the saved tensors: the
// output, or the operands from which the pre-activation is computed again.
template <class Activation, class Terms, class Vec, class Part, class Grad, class... Runs>
FUSELAB_INLINE Vec pullback(Scalar<Vec> scale, int64_t i, Part part, const Grad* grad,
                            const Runs*... saved) {
  const Vec upstream = load<Vec>(grad + i, part);
  if constexpr (Activation::derivative_of == Saved::nothing) {
    return upstream;
  } else if constexpr (Activation::derivative_of == Saved::output) {
    return Activation::pullback(upstream, load<Vec>(saved + i, part)...);
  } else {
    return Activation::pullback(upstream, preactivation<Terms, Vec>(scale, i, part, saved...));
  }
}

// Calls walk with the operands that Activation's derivative needs. `first` is the output or the
// input.
template <class Activation, class Terms, class Walk, class First, class Update, class Bias>
void with_saved(Walk walk, const First& first, const Update& update, const Bias& bias) {
  if constexpr (Activation::derivative_of == Saved::nothing) {
    walk();
  } else if constexpr (Activation::derivative_of == Saved::output) {
    walk(first);
  } else {
    with_terms<Terms>(walk, first, update, bias);
  }
}

// Computes the gradients of input and update, null if not needed; both are dense, in memory order.
template <class Activation, class Terms, class Output, class First, class Input, class Update,
          class Bias>
void backward(const Output* grad, const First* first, const Update* update, const Bias* bias,
              Input* grad_input, Update* grad_update, Arithmetic<Output> scale, int64_t size_0,
              int64_t size_1, int64_t size_2, int64_t size_3, int64_t size_4, int64_t grad_0,
              int64_t grad_1, int64_t grad_2, int64_t grad_3, int64_t grad_4, int64_t first_0,
              int64_t first_1, int64_t first_2, int64_t first_3, int64_t first_4,
              int64_t update_0, int64_t update_1, int64_t update_2, int64_t update_3,
              int64_t update_4, int64_t bias_0, int64_t bias_1, int64_t bias_2, int64_t bias_3,
              int64_t bias_4) {
  using Vec = Vector<Arithmetic<Output>>;
  const Index sizes{size_0, size_1, size_2, size_3, size_4};
  const Operand<Output> g{grad, {grad_0, grad_1, grad_2, grad_3, grad_4}};
  const Operand<First> x{first, {first_0, first_1, first_2, first_3, first_4}};
  const Operand<Update> u{update, {update_0, update_1, update_2, update_3, update_4}};
  const Operand<Bias> b{bias, {bias_0, bias_1, bias_2, bias_3, bias_4}};
  const auto tile_body = [=](int64_t offset, int64_t count, const auto*... runs) {
    for_each_vector<Vec>(count, [&](int64_t i, auto part) {
      const Vec gradient = pullback<Activation, Terms, Vec>(scale, i, part, runs...);
      if (grad_input) store<false>(grad_input + offset + i, gradient, part);
      if (grad_update) store<false>(grad_update + offset + i, gradient * scale, part);
    });
  };
  const auto walk = [&](const auto&... saved) {
    if (grad_input) {
      for_each_tile<Activation>(sizes, grad_input, false, tile_body, g, saved...);
    } else {
      for_each_tile<Activation>(sizes, grad_update, false, tile_body, g, saved...);
    }
  };
  with_saved<Activation, Terms>(walk, x, u, b);
}

// Computes the same for a matrix (rows, columns), and the bias's gradient: the column sums.
template <class Activation, class Terms, class Output, class First, class Input, class Update,
          class Bias>
void backward_with_bias(const Output* grad, const First* first, const Update* update,
                        const Bias* bias, Input* grad_input, Update* grad_update,
                        Bias* grad_bias, Arithmetic<Output> scale, int64_t rows, int64_t columns,
                        int64_t grad_row, int64_t grad_column, int64_t first_row,
                        int64_t first_column, int64_t update_row, int64_t update_column,
                        int64_t bias_column) {
  using Real = Arithmetic<Output>;
  using Vec = Vector<Real>;
  const Operand<Output> all_g{grad, {0, 0, 0, grad_row, grad_column}};
  const Operand<First> all_x{first, {0, 0, 0, first_row, first_column}};
  const Operand<Update> all_u{update, {0, 0, 0, update_row, update_column}};
  const Operand<Bias> all_b{bias, {0, 0, 0, 0, bias_column}};
  std::vector<double> totals(columns), lost(columns);  // lost: the rounding errors of the totals

  const auto walk = [&](const Index& part, int64_t skipped, int64_t repeat, const auto& b) {
    const int64_t width = part[rank - 1];
    const auto g = folded(all_g, skipped, repeat);
    const auto x = folded(all_x, skipped, repeat);
    const auto u = folded(all_u, skipped, repeat);
    std::vector<double> sums_of_part(width);
    const auto sum = [&](const auto&... saved) {
      const auto body = [&](int64_t row, int64_t last_row, int64_t column, int64_t count,
                            double* sums) {
        auto runs = runs_of(g, saved...);
        for (; row < last_row; ++row) {
          const Index index{0, 0, 0, row, column};
          const int64_t offset = skipped * columns + row * width + column;
          const auto row_body = [&](const auto*... run) {
            for_each_vector<Vec>(count, [&](int64_t i, auto lanes_used) {
              const Vec gradient = pullback<Activation, Terms, Vec>(scale, i, lanes_used, run...);
              if (grad_input) store<false>(grad_input + offset + i, gradient, lanes_used);
              if (grad_update) store<false>(grad_update + offset + i, gradient * scale, lanes_used);
              accumulate(sums + i, gradient);
            });
          };
          with_runs(runs, index, count, row_body, g, saved...);
        }
      };
      for_each_column_sum<Activation>(part[rank - 2], width, sums_of_part.data(), body);
    };
    with_saved<Activation, Terms>(sum, x, u, b);
    // A narrow bias is folded up to `width` times: so many additions in a row need compensation.
    for (int64_t i = 0; i < width; ++i) {
      double& total = totals[i % columns];
      const double before = total, added = sums_of_part[i];
      total += added;
      const double taken = total - before;
      lost[i % columns] += (before - (total - taken)) + (added - taken);
    }
  };
  const Index sizes{1, 1, 1, rows, columns};
  if constexpr (Activation::derivative_of == Saved::nothing) {
    for_each_fold(sizes, all_b, walk, all_g);
  } else if constexpr (Activation::derivative_of == Saved::output || !Terms::has_update) {
    for_each_fold(sizes, all_b, walk, all_g, all_x);
  } else {
    for_each_fold(sizes, all_b, walk, all_g, all_x, all_u);
  }
  for (int64_t i = 0; i < columns; ++i) {
    if (std::isfinite(lost[i])) totals[i] += lost[i];  // a total may be infinite
  }
  for_each_vector<Doubles>(columns, [&](int64_t i, auto part) {
    store<false>(grad_bias + i, load<Doubles>(totals.data() + i, part), part);
  });
}

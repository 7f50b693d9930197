// fuselab_extension::add_mul_activation(input, update, bias, scale, activation) for PyTorch, with
// its gradient: fuselab's own kernels, registered from C++.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>
#include <ATen/ATen.h>

#ifdef FUSELAB_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include <array>
#include <optional>
#include <string_view>

#include "kernels.h"

namespace fuselab_extension {
namespace {

Dtype dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return Dtype::float32;
    case at::kHalf:
      return Dtype::float16;
    case at::kBFloat16:
      return Dtype::bfloat16;
    case at::kDouble:
      return Dtype::float64;
    default:
      TORCH_CHECK_TYPE(false, "add_mul_activation: 'input' is ", tensor.scalar_type(),
                       "; expected float32, float16, bfloat16 or float64.");
  }
}

Activation activation_of(std::string_view name) {
  constexpr std::array<std::string_view, 8> names = {
      "identity", "relu", "leaky_relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh"};
  for (std::size_t place = 0; place < names.size(); ++place) {
    if (names[place] == name) return static_cast<Activation>(place);
  }
  TORCH_CHECK_VALUE(false, "add_mul_activation: no activation '", name,
                    "'; there are identity, relu, leaky_relu, gelu, gelu_tanh, silu, sigmoid and "
                    "tanh.");
}

// A dimension's worth of -0.0 where there is no bias: x + -0.0 is x, for -0.0 too.
at::Tensor bias_or_nothing(const std::optional<at::Tensor>& bias, const at::Tensor& input) {
  if (bias.has_value()) return bias->contiguous();
  return at::full({input.size(-1)}, -0.0, input.options());
}

void validate(const at::Tensor& input, const at::Tensor& update,
              const std::optional<at::Tensor>& bias) {
  TORCH_CHECK_VALUE(input.dim() > 0, "add_mul_activation: 'input' has no dimension.");
  TORCH_CHECK_VALUE(update.sizes() == input.sizes(), "add_mul_activation: 'update' has shape ",
                    update.sizes(), "; expected ", input.sizes(), ", that of 'input'.");
  const auto matches = [&](const char* name, const at::Tensor& tensor) {
    TORCH_CHECK_TYPE(tensor.scalar_type() == input.scalar_type(), "add_mul_activation: '", name,
                     "' is ", tensor.scalar_type(), "; expected ", input.scalar_type(), ".");
    TORCH_CHECK_VALUE(tensor.device() == input.device(), "add_mul_activation: '", name,
                      "' is on ", tensor.device(), " and 'input' on ", input.device(), ".");
  };
  matches("update", update);
  if (!bias.has_value()) return;
  matches("bias", *bias);
  TORCH_CHECK_VALUE(bias->dim() == 1 && bias->size(0) == input.size(-1),
                    "add_mul_activation: 'bias' has shape ", bias->sizes(), "; expected [",
                    input.size(-1), "].");
}

Call call_of(const at::Tensor& shape, Activation activation, double scale) {
  Call call{};
  call.dtype = dtype_of(shape);
  call.activation = activation;
  call.columns = shape.size(-1);
  call.rows = call.columns == 0 ? 0 : shape.numel() / call.columns;
  call.scale = scale;
  return call;
}

void run(const at::Tensor& on, const Call& call, bool backward) {
  if (call.rows == 0) return;
  if (on.is_cpu()) {
    return backward ? backward_cpu(call) : forward_cpu(call);
  }
#ifdef FUSELAB_WITH_CUDA
  const c10::cuda::CUDAGuard guard(on.device());
  void* stream = c10::cuda::getCurrentCUDAStream().stream();
  const std::string error = backward ? backward_cuda(call, stream) : forward_cuda(call, stream);
  TORCH_CHECK(error.empty(), "add_mul_activation: the launch failed: ", error);
#else
  TORCH_CHECK(false, "this extension was built without CUDA");
#endif
}

at::Tensor add_mul_activation(const at::Tensor& input_, const at::Tensor& update_,
                              const std::optional<at::Tensor>& bias_, double scale,
                              std::string_view activation) {
  validate(input_, update_, bias_);
  const at::Tensor input = input_.contiguous(), update = update_.contiguous();
  const at::Tensor bias = bias_or_nothing(bias_, input);
  at::Tensor output = at::empty_like(input);
  Call call = call_of(input, activation_of(activation), scale);
  call.first = input.const_data_ptr();
  call.update = update.const_data_ptr();
  call.bias = bias.const_data_ptr();
  call.output = output.mutable_data_ptr();
  run(input, call, /*backward=*/false);
  return output;
}

at::Tensor meta(const at::Tensor& input, const at::Tensor& update,
                const std::optional<at::Tensor>& bias, double, std::string_view activation) {
  validate(input, update, bias);
  dtype_of(input);
  activation_of(activation);
  return at::empty_like(input, input.options(), at::MemoryFormat::Contiguous);
}

struct Differentiable : torch::autograd::Function<Differentiable> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input,
                            const at::Tensor& update, const std::optional<at::Tensor>& bias,
                            double scale, std::string name) {
    const at::AutoDispatchBelowADInplaceOrView below;
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("fuselab_extension::add_mul_activation", "")
                               .typed<decltype(add_mul_activation)>();
    at::Tensor output = op.call(input, update, bias, scale, name);
    const Activation activation = activation_of(name);
    context->saved_data["scale"] = scale;
    context->saved_data["activation"] = static_cast<int64_t>(activation);
    context->saved_data["has_bias"] = bias.has_value();
    switch (needs_of(activation)) {
      case Needs::nothing:
        break;
      case Needs::output:
        context->save_for_backward({output});
        break;
      case Needs::operands:
        context->save_for_backward({input, update, bias.value_or(at::Tensor())});
    }
    return output;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !at::GradMode::is_enabled(),
        "add_mul_activation: this extension has no second derivative; fuselab's operator has.");
    const at::Tensor grad = grads[0].contiguous();
    const auto saved = context->get_saved_variables();
    const auto activation =
        static_cast<Activation>(context->saved_data["activation"].toInt());
    const double scale = context->saved_data["scale"].toDouble();
    Call call = call_of(grad, activation, scale);
    at::Tensor first, update, bias;
    if (!saved.empty()) first = saved[0].contiguous();
    if (saved.size() > 1) {
      update = saved[1].contiguous();
      bias = saved[2].defined() ? saved[2].contiguous()
                                : bias_or_nothing(std::nullopt, saved[0]);
    }
    const auto pointer = [](const at::Tensor& tensor) -> const void* {
      return tensor.defined() ? tensor.const_data_ptr() : nullptr;
    };
    at::Tensor grad_input = at::empty_like(grad), grad_update = at::empty_like(grad);
    call.grad = grad.const_data_ptr();
    call.first = pointer(first);
    call.update = pointer(update);
    call.bias = pointer(bias);
    call.grad_input = grad_input.mutable_data_ptr();
    call.grad_update = grad_update.mutable_data_ptr();
    run(grad, call, /*backward=*/true);
    at::Tensor grad_bias;
    if (context->saved_data["has_bias"].toBool() && context->needs_input_grad(2)) {
      grad_bias = grad_input.sum_to_size({grad.size(-1)});
    }
    return {grad_input, grad_update, grad_bias, at::Tensor(), at::Tensor()};
  }
};

at::Tensor differentiable(const at::Tensor& input, const at::Tensor& update,
                          const std::optional<at::Tensor>& bias, double scale,
                          std::string_view activation) {
  return Differentiable::apply(input, update, bias, scale, std::string(activation));
}

}  // namespace

TORCH_LIBRARY(fuselab_extension, library) {
  library.def(
      "add_mul_activation(Tensor input, Tensor update, Tensor? bias=None, float scale=1.0, "
      "str activation='identity') -> Tensor");
}

TORCH_LIBRARY_IMPL(fuselab_extension, CPU, library) {
  library.impl("add_mul_activation", add_mul_activation);
}
#ifdef FUSELAB_WITH_CUDA
TORCH_LIBRARY_IMPL(fuselab_extension, CUDA, library) {
  library.impl("add_mul_activation", add_mul_activation);
}
#endif
TORCH_LIBRARY_IMPL(fuselab_extension, Meta, library) {
  library.impl("add_mul_activation", meta);
}
TORCH_LIBRARY_IMPL(fuselab_extension, Autograd, library) {
  library.impl("add_mul_activation", differentiable);
}

}  // namespace fuselab_extension

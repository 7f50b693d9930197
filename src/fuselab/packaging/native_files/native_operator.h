// An operator of a kernel package as PyTorch's dispatcher calls it: its kernels where they take the
// arguments, else its definition in PyTorch's own operators; and its gradient.
#pragma once

#include <ATen/ScalarOps.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace fuselab::native {

using Tensors = std::vector<at::Tensor>;
using Stack = torch::jit::Stack;

// One computation. It returns nothing if it was not written for tensors of such sizes.
using Compute = std::optional<Tensors> (*)(const Tensors&);

// A computation for tensors of these dtypes.
struct Variant {
  std::vector<at::ScalarType> dtypes;
  Compute compute;

  bool takes(const Tensors& tensors) const {
    if (tensors.size() != dtypes.size()) return false;
    for (size_t place = 0; place < dtypes.size(); ++place) {
      if (tensors[place].scalar_type() != dtypes[place]) return false;
    }
    return true;
  }
};

// What computes the forward or the backward: kernels for the CPU, and the definition.
struct Computation {
  const char* name;
  std::vector<Variant> kernels, definition;

  Tensors operator()(const Tensors& tensors, const std::string& implementation) const {
    const bool wants_kernels = implementation == "auto" || implementation == "cpp";
    TORCH_CHECK(wants_kernels || implementation == "reference", name, ": implementation '",
                implementation, "' is not in this library; it has auto, cpp and reference.");
    bool on_cpu = true;
    for (const at::Tensor& tensor : tensors) on_cpu = on_cpu && tensor.is_cpu();
    if (wants_kernels && on_cpu) {
      if (auto found = first(kernels, tensors)) return *found;
    }
    TORCH_CHECK(implementation != "cpp", name, ": its C++ kernels do not take these tensors.");
    if (auto found = first(definition, tensors)) return *found;
    std::string given;
    for (const at::Tensor& tensor : tensors) {
      given += std::string(given.empty() ? "" : ", ") + toString(tensor.scalar_type());
      given += "[" + c10::Join(", ", tensor.sizes()) + "]";
    }
    TORCH_CHECK(false, name, " was not built for tensors like ", given,
                "; build its package with an example like them.");
  }

  static std::optional<Tensors> first(const std::vector<Variant>& variants,
                                      const Tensors& tensors) {
    for (const Variant& variant : variants) {
      if (!variant.takes(tensors)) continue;
      if (auto found = variant.compute(tensors)) return found;
    }
    return std::nullopt;
  }
};

struct Operator {
  Computation forward;
  // For each argument its value where it is not a tensor: the computations are written for it.
  std::vector<std::optional<c10::IValue>> constants;
  size_t outputs;     // tensors that users see; what is kept for the backward follows
  bool is_contiguous;  // whether results are contiguous, whatever the arguments are
  // No kernels and no definition if there is no gradient.
  Computation backward;
  std::vector<Variant> save;  // from outputs and arguments to what the backward reads

  bool has_gradient() const { return !backward.definition.empty() || !backward.kernels.empty(); }
};

inline bool are_contiguous(const Tensors& tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_contiguous()) return false;
  }
  return true;
}

inline Tensors contiguous(const Tensors& tensors) {
  Tensors result;
  for (const at::Tensor& tensor : tensors) result.push_back(tensor.contiguous());
  return result;
}

// Runs a forward. Its kernels get contiguous tensors; results lie in memory as the definition's do
// for the tensors as they came, which an exported program relies on.
inline Tensors run_forward(const Operator& op, const Tensors& given, const std::string& chosen) {
  if (are_contiguous(given)) return op.forward(given, chosen);
  Tensors results = op.forward(contiguous(given), chosen);
  if (op.is_contiguous) return results;
  Tensors meta;
  for (const at::Tensor& tensor : given) {
    meta.push_back(at::empty_strided(tensor.sizes(), tensor.strides(),
                                     tensor.options().device(at::kMeta)));
  }
  const auto like = Computation::first(op.forward.definition, meta);
  if (!like) return results;
  for (size_t place = 0; place < results.size(); ++place) {
    if (results[place].strides() == (*like)[place].strides()) continue;
    at::Tensor moved = at::empty_strided(results[place].sizes(), (*like)[place].strides(),
                                         results[place].options());
    results[place] = moved.copy_(results[place]);
  }
  return results;
}

// Takes the tensors of a call off the stack, and the implementation that it names.
inline std::pair<Tensors, std::string> taken(const Operator& op, Stack* stack) {
  const size_t count = op.constants.size();
  const auto arguments = torch::jit::last(*stack, count + 1);
  Tensors tensors;
  for (size_t place = 0; place < count; ++place) {
    if (!op.constants[place]) {
      tensors.push_back(arguments[place].toTensor());
      continue;
    }
    TORCH_CHECK(arguments[place] == *op.constants[place], op.forward.name, ": argument ",
                place + 1, " was ", *op.constants[place], " when this was built, and is ",
                arguments[place], ".");
  }
  std::string implementation(arguments[count].toStringRef());
  torch::jit::drop(*stack, count + 1);
  return {tensors, implementation};
}

inline void give(Stack* stack, const Tensors& results) {
  for (const at::Tensor& result : results) stack->emplace_back(result);
}

class Differentiable : public torch::autograd::Function<Differentiable> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context,
                                                at::TensorList given, const Operator* op,
                                                const std::string& implementation) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const Tensors arguments = given.vec();
    const Tensors results = run_forward(*op, arguments, implementation);
    Tensors known = contiguous(results);
    for (const at::Tensor& argument : arguments) known.push_back(argument.contiguous());
    auto saved = Computation::first(op->save, known);
    TORCH_CHECK(saved, op->forward.name, " was built with no gradient for these tensors.");
    context->save_for_backward(*saved);
    Tensors constant;
    for (size_t place = 0; place < results.size(); ++place) {
      if (place >= op->outputs || !results[place].is_floating_point()) {
        constant.push_back(results[place]);
      }
    }
    context->mark_non_differentiable(constant);
    context->saved_data["op"] = reinterpret_cast<int64_t>(op);
    context->saved_data["implementation"] = implementation;
    for (size_t place = 0; place < op->outputs; ++place) {
      const auto name = "like_" + std::to_string(place);
      context->saved_data[name] = at::empty_strided(results[place].sizes(),
                                                    results[place].strides(),
                                                    results[place].options().device(at::kMeta));
    }
    context->saved_data["tensors"] = static_cast<int64_t>(arguments.size());
    return results;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list upstream) {
    TORCH_CHECK(!at::GradMode::is_enabled(),
                "a fuselab operator in C++ has no second derivative; call the Python package.");
    const auto* op = reinterpret_cast<const Operator*>(context->saved_data["op"].toInt());
    const Tensors saved = context->get_saved_variables();
    Tensors arguments;
    for (size_t place = 0; place < op->outputs; ++place) {
      const at::Tensor like = context->saved_data["like_" + std::to_string(place)].toTensor();
      at::Tensor grad = upstream[place];
      if (!grad.defined()) {
        grad = at::empty(like.sizes(), like.options().device(saved.at(0).device())).zero_();
      }
      arguments.push_back(grad.contiguous());
    }
    arguments.insert(arguments.end(), saved.begin(), saved.end());
    const std::string implementation = context->saved_data["implementation"].toStringRef();
    Tensors grads = op->backward(arguments, implementation);
    const size_t tensors = context->saved_data["tensors"].toInt();
    torch::autograd::variable_list result;
    for (size_t place = 0; place < tensors; ++place) {
      const bool needed = context->needs_input_grad(place);
      result.push_back(needed ? grads[place] : at::Tensor());
    }
    result.resize(tensors + 2);  // the operator and the implementation have none
    return result;
  }
};

// The dispatcher's functions. `op` is a function that returns the operator's description.
template <const Operator& (*op)()>
void call(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) {
  const auto [tensors, implementation] = taken(op(), stack);
  give(stack, run_forward(op(), tensors, implementation));
}

template <const Operator& (*op)()>
void call_with_gradient(const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
                        Stack* stack) {
  bool wanted = false;
  for (const c10::IValue& value : torch::jit::last(*stack, op().constants.size() + 1)) {
    wanted = wanted || (value.isTensor() && value.toTensor().requires_grad());
  }
  if (!wanted || !at::GradMode::is_enabled()) {
    at::AutoDispatchBelowADInplaceOrView guard;
    handle.callBoxed(stack);
    return;
  }
  TORCH_CHECK(op().has_gradient(), op().forward.name, " was built without a gradient.");
  const auto [tensors, implementation] = taken(op(), stack);
  give(stack, Differentiable::apply(at::TensorList(tensors), &op(), implementation));
}

}  // namespace fuselab::native

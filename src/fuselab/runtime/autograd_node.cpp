// The C++ half of autograd_node.py: a node of autograd's graph whose backward is a launch plan.
//
// torch.autograd.Function goes through Python five times per forward and backward. This node goes
// directly from the engine to `lookup` of launcher/launcher.cpp, and to Python only if that finds
// no plan.

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>
#include <functional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::dynamo::autograd::CompiledNodeArgs;
using torch::dynamo::autograd::SwapSavedVariables;
using NodePointer = decltype(std::declval<Node&>().getptr());  // another type from torch 2.12 on

class Object {  // an owned reference; made, copied and destroyed under the GIL only
 public:
  explicit Object(PyObject* held) : held_(held) {
    if (held_ == nullptr) throw python_error();
  }
  Object(Object&& other) noexcept : held_(std::exchange(other.held_, nullptr)) {}
  ~Object() { Py_XDECREF(held_); }
  PyObject* get() const { return held_; }
  PyObject* release() { return std::exchange(held_, nullptr); }

 private:
  PyObject* held_;
};

class Gil {
 public:
  Gil() : state_(PyGILState_Ensure()) {}
  ~Gil() { PyGILState_Release(state_); }

 private:
  PyGILState_STATE state_;
};

// Whether two tensors have one dtype, device and shape.
bool are_alike(const at::Tensor& one, const at::Tensor& other) {
  return one.scalar_type() == other.scalar_type() && one.device() == other.device() &&
         one.sizes() == other.sizes();
}

// Returns the number at a side of a pair in a tuple of pairs.
std::size_t number_in(PyObject* pairs, Py_ssize_t index, int side) {
  return PyLong_AsSize_t(PyTuple_GET_ITEM(PyTuple_GET_ITEM(pairs, index), side));
}

// What the upstream gradient of an output is like. An output of integers has none.
struct Output {
  std::vector<int64_t> sizes;
  at::TensorOptions options;
  bool has_gradient;
};

// The arguments of a backward besides tensors. The references are borrowed.
struct Formula {
  // name, lookup, id of the backward, implementation, function without a plan, Gradient.equal,
  // Gradient.passed
  PyObject* rule;
  PyObject* plain;  // a tuple of the saved values, None at `places`, where tensors go
  std::vector<Py_ssize_t> places;
  std::vector<Output> outputs;  // none where there is one, which has a gradient
  std::vector<std::pair<std::size_t, std::size_t>> equal;  // the first's gradient is the second's
  // The first's gradient is the second of the upstream gradients.
  std::vector<std::pair<std::size_t, std::size_t>> passed;

  // Returns the gradients that are needed, and none for the others. `grads` are those of the
  // outputs that have one. Called under the GIL.
  variable_list operator()(const variable_list& grads, const variable_list& saved,
                           const std::vector<bool>& needed) const {
    const Py_ssize_t wanted = static_cast<Py_ssize_t>(needed.size());
    // If all inputs that require a gradient are views made under no_grad, none has an edge.
    if (std::ranges::none_of(needed, std::identity())) return variable_list(wanted);
    std::vector<bool> asked = needed;
    for (auto [place, of_output] : passed) asked[place] = false;
    for (auto [place, other] : equal) {
      if (needed[other]) asked[place] = false;
    }
    variable_list result = std::ranges::any_of(asked, std::identity())
                               ? computed(grads, saved, asked)
                               : variable_list(wanted);
    for (auto [place, of_output] : passed) {
      if (needed[place]) result[place] = grads[of_output];
    }
    for (auto [place, other] : equal) {
      if (needed[place] && needed[other]) result[place] = result[other];
    }
    return result;
  }

  std::string name() const { return PyUnicode_AsUTF8(PyTuple_GET_ITEM(rule, 0)); }

 private:
  // Returns the gradients that an implementation is asked for.
  variable_list computed(const variable_list& grads, const variable_list& saved,
                         const std::vector<bool>& asked) const {
    const Py_ssize_t wanted = static_cast<Py_ssize_t>(asked.size());
    Object needs(PyTuple_New(wanted));
    for (Py_ssize_t place = 0; place < wanted; ++place) {
      PyTuple_SET_ITEM(needs.get(), place, PyBool_FromLong(asked[place]));
    }
    const Py_ssize_t count = PyTuple_GET_SIZE(plain);
    Object arguments(PyTuple_New(2 + count));
    PyTuple_SET_ITEM(arguments.get(), 0, Py_NewRef(needs.get()));
    PyTuple_SET_ITEM(arguments.get(), 1, upstream(grads).release());
    for (Py_ssize_t place = 0; place < count; ++place) {
      PyTuple_SET_ITEM(arguments.get(), 2 + place, Py_NewRef(PyTuple_GET_ITEM(plain, place)));
    }
    for (std::size_t index = 0; index < places.size(); ++index) {
      Object tensor(THPVariable_Wrap(saved[index]));
      Py_DECREF(PyTuple_GET_ITEM(arguments.get(), 2 + places[index]));
      PyTuple_SET_ITEM(arguments.get(), 2 + places[index], tensor.release());
    }
    Object returned(call(arguments.get()));
    Object found(PySequence_Tuple(returned.get()));
    TORCH_CHECK(PyTuple_GET_SIZE(found.get()) == wanted, name(),
                " returned something else than ", wanted, " gradients");
    variable_list result(wanted);
    for (Py_ssize_t place = 0; place < wanted; ++place) {
      PyObject* value = PyTuple_GET_ITEM(found.get(), place);
      if (asked[place] && THPVariable_Check(value)) result[place] = THPVariable_Unpack(value);
    }
    return result;
  }

  // Returns the upstream gradient of the only output, or a tuple of those of several: zeros for
  // one that nothing used, as autograd.Function passes them.
  Object upstream(const variable_list& grads) const {
    if (outputs.empty()) return Object(THPVariable_Wrap(grads[0]));
    Object all(PyTuple_New(static_cast<Py_ssize_t>(outputs.size())));
    auto grad = grads.begin();
    for (std::size_t place = 0; place < outputs.size(); ++place) {
      const Output& output = outputs[place];
      at::Tensor found = output.has_gradient ? *grad++ : at::Tensor();
      if (!found.defined()) found = at::zeros(output.sizes, output.options);
      PyTuple_SET_ITEM(all.get(), static_cast<Py_ssize_t>(place),
                       Object(THPVariable_Wrap(std::move(found))).release());
    }
    return all;
  }

  PyObject* call(PyObject* arguments) const {
    PyObject* implementation = PyTuple_GET_ITEM(rule, 3);
    if (!at::GradMode::is_enabled()) {
      Object held(PyObject_CallFunctionObjArgs(PyTuple_GET_ITEM(rule, 1), PyTuple_GET_ITEM(rule, 2),
                                               implementation, arguments, nullptr));
      if (held.get() != Py_None) return held.release();
    }
    return PyObject_CallFunctionObjArgs(PyTuple_GET_ITEM(rule, 4), implementation, arguments,
                                        nullptr);
  }
};

class PlannedBackward : public Node {
 public:
  PlannedBackward(PyObject* rule, torch::autograd::edge_list&& edges)
      : Node(std::move(edges)), formula_{Py_NewRef(rule), nullptr, {}, {}, {}, {}} {}

  ~PlannedBackward() override {
    if (Py_IsInitialized() == 0) return;  // the process is ending
    Gil gil;
    Py_DECREF(formula_.rule);
    Py_XDECREF(formula_.plain);
  }

  // Notes one of several outputs. Those that have a gradient are the node's inputs, in this order.
  void note(const at::Tensor& output) {
    formula_.outputs.push_back(
        {output.sizes().vec(), output.options(), output.is_floating_point()});
  }

  // Notes which of the rule's pairs hold for these inputs and outputs.
  void pair(PyObject* inputs, const variable_list& outputs) {
    const auto input = [&](std::size_t place) {
      PyObject* found = PyList_GET_ITEM(inputs, static_cast<Py_ssize_t>(place));
      return THPVariable_Check(found) ? &THPVariable_Unpack(found) : nullptr;
    };
    PyObject* equal = PyTuple_GET_ITEM(formula_.rule, 5);
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(equal); ++index) {
      const std::size_t place = number_in(equal, index, 0), other = number_in(equal, index, 1);
      const at::Tensor *one = input(place), *two = input(other);
      if (one != nullptr && two != nullptr && are_alike(*one, *two) &&
          one->strides() == two->strides()) {
        formula_.equal.emplace_back(place, other);
      }
    }
    PyObject* passed = PyTuple_GET_ITEM(formula_.rule, 6);
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(passed); ++index) {
      const std::size_t place = number_in(passed, index, 0), of = number_in(passed, index, 1);
      const at::Tensor* one = input(place);
      if (one == nullptr || !are_alike(*one, outputs[of])) continue;
      // The upstream gradients are those of the outputs that have one.
      const auto gradient = std::count_if(outputs.begin(), outputs.begin() + of,
                                          [](const at::Tensor& tensor) {
                                            return tensor.is_floating_point();
                                          });
      formula_.passed.emplace_back(place, static_cast<std::size_t>(gradient));
    }
  }

  // Saves the backward's arguments: tensors become saved variables, the others stay in the tuple.
  void save(PyObject* values, const variable_list& outputs) {
    const Py_ssize_t count = PyTuple_GET_SIZE(values);
    Object plain(PyTuple_New(count));
    for (Py_ssize_t place = 0; place < count; ++place) {
      PyObject* value = PyTuple_GET_ITEM(values, place);
      if (THPVariable_Check(value)) {
        const at::Tensor& tensor = THPVariable_Unpack(value);
        formula_.places.push_back(place);
        const bool is_output = std::ranges::any_of(
            outputs, [&](const at::Tensor& output) { return tensor.is_same(output); });
        saved_.emplace_back(tensor, is_output);
        value = Py_None;
      }
      PyTuple_SET_ITEM(plain.get(), place, Py_NewRef(value));
    }
    formula_.plain = plain.release();
  }

  variable_list apply(variable_list&& grads) override {
    if (std::ranges::none_of(grads, &at::Tensor::defined)) return variable_list(num_outputs());
    Gil gil;
    TORCH_CHECK(!released_, torch::autograd::ERR_BACKWARD_TWICE);
    return formula_(grads, unpacked(), needed());
  }

  // Compiled autograd: the saved tensors are inputs of its graph, everything else is its key.
  void compiled_args(CompiledNodeArgs& args) const override {
    Gil gil;
    TORCH_CHECK(!released_, torch::autograd::ERR_BACKWARD_TWICE);
    for (PyObject* value : {PyTuple_GET_ITEM(formula_.rule, 2), PyTuple_GET_ITEM(formula_.rule, 3),
                            formula_.plain}) {
      Object text(PyObject_Repr(value));
      args.collect(std::string(PyUnicode_AsUTF8(text.get())));
    }
    for (Py_ssize_t place : formula_.places) args.collect(static_cast<int64_t>(place));
    for (auto [place, other] : formula_.equal) {
      args.collect(static_cast<int64_t>(place));
      args.collect(static_cast<int64_t>(other));
    }
    for (auto [place, of_output] : formula_.passed) {
      args.collect(static_cast<int64_t>(place));
      args.collect(static_cast<int64_t>(of_output));
    }
    for (std::size_t place = 0; place < num_outputs(); ++place) {
      args.collect(task_should_compute_output(place));
    }
    args.collect(saved_, true);
  }

  // Calls the formula in that graph. While traced, it finds no plan and calls the raw operator.
  variable_list apply_with_saved(const variable_list& grads, SwapSavedVariables& swap) override {
    namespace compiled = torch::dynamo::autograd;
    Gil gil;
    swap.before(saved_);
    const std::vector<at::IValue> tensors = {unpacked()};
    const auto metadata = compiled::IValuePacker<
        std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
        compiled::get_input_metadata(next_edges()));
    Formula formula = formula_;  // torch keeps bound functions forever, so its objects must live
    Py_INCREF(formula.rule), Py_INCREF(formula.plain);
    const auto& interface = compiled::getPyCompilerInterface();
    const std::string bound = interface->bind_function(
        swap.get_py_compiler(), name(),
        [formula, needed = needed()](const variable_list& grads,
                                     const std::vector<at::IValue>& saved) {
          if (std::ranges::none_of(grads, &at::Tensor::defined))
            return variable_list(needed.size());
          Gil gil;
          return formula(grads, saved[0].toTensorVector(), needed);
        },
        {tensors[0].type()}, /*is_custom_function=*/true, /*is_traceable=*/true);
    variable_list result = interface->call_function(swap.get_py_compiler(), "apply_functional",
                                                    bound, grads, tensors, metadata);
    swap.after(saved_);
    return result;
  }

  void release_variables() override {
    Gil gil;
    released_ = true;
    for (auto& saved : saved_) saved.reset_data();
  }

  std::string name() const override {
    Gil gil;
    return formula_.name();
  }

 private:
  std::vector<bool> needed() const {
    std::vector<bool> needed(num_outputs());
    for (std::size_t place = 0; place < needed.size(); ++place) {
      needed[place] = task_should_compute_output(place);
    }
    return needed;
  }

  variable_list unpacked() {
    variable_list tensors;
    for (const SavedVariable& saved : saved_) tensors.push_back(saved.unpack(getptr()));
    return tensors;
  }

  Formula formula_;
  std::vector<SavedVariable> saved_;  // of the formula's `places`
  bool released_ = false;
};

template <typename Pointer>
auto make_node(PyObject* rule, torch::autograd::edge_list&& edges) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    return Pointer(new PlannedBackward(rule, std::move(edges)),
                   [](auto* node) { deleteNode(node); });  // torch's, against deep recursion
  } else {
    return c10::make_intrusive<PlannedBackward>(rule, std::move(edges));
  }
}

// attach(outputs, inputs, saved, rule): gives the outputs, a tuple, a node by which `rule` passes
// their gradients to the inputs, if one of these requires one. `inputs` are tensors and None,
// `saved` is a tuple.
PyObject* attach(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 4 && PyTuple_Check(args[0]) && PyList_Check(args[1]) &&
                       PyTuple_Check(args[2]) && PyTuple_Check(args[3]),
                   "expected (outputs, inputs, saved, rule)");
  variable_list outputs;
  for (Py_ssize_t place = 0; place < PyTuple_GET_SIZE(args[0]); ++place) {
    PyObject* output = PyTuple_GET_ITEM(args[0], place);
    TORCH_CHECK_TYPE(THPVariable_Check(output), "an output is no tensor");
    outputs.push_back(THPVariable_Unpack(output));
  }
  torch::autograd::edge_list edges;
  bool requires_grad = false;
  for (Py_ssize_t place = 0; place < PyList_GET_SIZE(args[1]); ++place) {
    PyObject* input = PyList_GET_ITEM(args[1], place);
    Edge& edge = edges.emplace_back();
    if (!THPVariable_Check(input)) continue;
    const at::Tensor& tensor = THPVariable_Unpack(input);
    // The tensor is asked, not its edge: a view of a leaf that was made under no_grad requires a
    // gradient and has no edge, and PyTorch's own functions give their output a node there too.
    if (!tensor.requires_grad()) continue;
    requires_grad = true;
    edge = torch::autograd::impl::gradient_edge(tensor);
  }
  // Another thread recorded the plan after this call, which needs no gradient, had looked for one.
  if (!requires_grad) Py_RETURN_NONE;
  NodePointer node = make_node<NodePointer>(args[3], std::move(edges));
  auto& planned = static_cast<PlannedBackward&>(*node);
  for (at::Tensor& output : outputs) {
    if (outputs.size() > 1) planned.note(output);
    if (output.is_floating_point()) torch::autograd::create_gradient_edge(output, node);
  }
  planned.pair(args[1], outputs);
  // Saved after the edges are set: a saved output must not own its node.
  planned.save(args[2], outputs);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"attach", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(attach)), METH_FASTCALL,
     nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "fuselab_autograd_node", nullptr, -1, methods};

}  // namespace

extern "C" __attribute__((visibility("default"))) PyObject* PyInit_fuselab_autograd_node() {
  return PyModule_Create(&module);
}

// The C++ half of autograd_node.py: a node of autograd's graph whose backward is a launch plan.
//
// torch.autograd.Function goes through Python five times per forward and backward; this node goes
// straight from the engine to `lookup` of launcher.cpp, and to Python where that finds no plan.

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using NodePointer = decltype(std::declval<Node&>().getptr());  // another type from torch 2.12 on

class Object {  // a reference that is held; made, copied and ended under the GIL only
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

class PlannedBackward : public Node {
 public:
  // rule: (name, lookup, id of the backward, implementation, what runs where there is no plan)
  PlannedBackward(PyObject* rule, torch::autograd::edge_list&& edges)
      : Node(std::move(edges)), rule_(Py_NewRef(rule)) {}

  ~PlannedBackward() override {
    if (Py_IsInitialized() == 0) return;  // the process ends
    Gil gil;
    Py_DECREF(rule_);
    Py_XDECREF(plain_);
  }

  // What the backward needs: tensors become saved variables, the rest stays in the tuple.
  void save(PyObject* values, const at::Tensor& output) {
    const Py_ssize_t count = PyTuple_GET_SIZE(values);
    Object plain(PyTuple_New(count));
    for (Py_ssize_t place = 0; place < count; ++place) {
      PyObject* value = PyTuple_GET_ITEM(values, place);
      if (THPVariable_Check(value)) {
        const at::Tensor& tensor = THPVariable_Unpack(value);
        saved_.emplace_back(place, SavedVariable(tensor, tensor.is_same(output)));
        value = Py_None;
      }
      PyTuple_SET_ITEM(plain.get(), place, Py_NewRef(value));
    }
    plain_ = plain.release();
  }

  variable_list apply(variable_list&& grads) override {
    variable_list result(num_outputs());
    if (!grads[0].defined()) return result;
    Gil gil;
    TORCH_CHECK(!released_, torch::autograd::ERR_BACKWARD_TWICE);
    const Py_ssize_t wanted = static_cast<Py_ssize_t>(result.size());
    Object needs(PyTuple_New(wanted));
    for (Py_ssize_t place = 0; place < wanted; ++place) {
      PyTuple_SET_ITEM(needs.get(), place, PyBool_FromLong(task_should_compute_output(place)));
    }
    const Py_ssize_t count = PyTuple_GET_SIZE(plain_);
    Object arguments(PyTuple_New(2 + count));
    PyTuple_SET_ITEM(arguments.get(), 0, Py_NewRef(needs.get()));
    PyTuple_SET_ITEM(arguments.get(), 1, Object(THPVariable_Wrap(grads[0])).release());
    for (Py_ssize_t place = 0; place < count; ++place) {
      PyTuple_SET_ITEM(arguments.get(), 2 + place, Py_NewRef(PyTuple_GET_ITEM(plain_, place)));
    }
    for (const auto& [place, variable] : saved_) {
      Object unpacked(THPVariable_Wrap(variable.unpack(getptr())));
      Py_DECREF(PyTuple_GET_ITEM(arguments.get(), 2 + place));
      PyTuple_SET_ITEM(arguments.get(), 2 + place, unpacked.release());
    }
    Object returned(call(arguments.get()));
    Object found(PySequence_Tuple(returned.get()));
    TORCH_CHECK(PyTuple_GET_SIZE(found.get()) == wanted, name(),
                " returned something else than ", wanted, " gradients");
    for (Py_ssize_t place = 0; place < wanted; ++place) {
      PyObject* grad = PyTuple_GET_ITEM(found.get(), place);
      if (PyTuple_GET_ITEM(needs.get(), place) == Py_True && THPVariable_Check(grad)) {
        result[place] = THPVariable_Unpack(grad);
      }
    }
    return result;
  }

  void release_variables() override {
    Gil gil;
    released_ = true;
    for (auto& saved : saved_) saved.second.reset_data();
  }

  std::string name() const override {
    Gil gil;
    return PyUnicode_AsUTF8(PyTuple_GET_ITEM(rule_, 0));
  }

 private:
  PyObject* call(PyObject* arguments) const {
    PyObject* implementation = PyTuple_GET_ITEM(rule_, 3);
    if (!at::GradMode::is_enabled()) {
      Object held(PyObject_CallFunctionObjArgs(PyTuple_GET_ITEM(rule_, 1),
                                               PyTuple_GET_ITEM(rule_, 2), implementation,
                                               arguments, nullptr));
      if (held.get() != Py_None) return held.release();
    }
    return PyObject_CallFunctionObjArgs(PyTuple_GET_ITEM(rule_, 4), implementation, arguments,
                                        nullptr);
  }

  PyObject* rule_;
  PyObject* plain_ = nullptr;  // a tuple, None where a saved variable goes
  std::vector<std::pair<Py_ssize_t, SavedVariable>> saved_;
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

// attach(output, inputs, saved, rule): output, whose gradient `rule` takes to the inputs. `inputs`
// is a list of tensors and None, `saved` a tuple.
PyObject* attach(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 4 && THPVariable_Check(args[0]) && PyList_Check(args[1]) &&
                       PyTuple_Check(args[2]) && PyTuple_Check(args[3]),
                   "expected (output, inputs, saved, rule)");
  torch::autograd::edge_list edges;
  for (Py_ssize_t place = 0; place < PyList_GET_SIZE(args[1]); ++place) {
    PyObject* input = PyList_GET_ITEM(args[1], place);
    edges.push_back(THPVariable_Check(input)
                        ? torch::autograd::impl::gradient_edge(THPVariable_Unpack(input))
                        : Edge());
  }
  NodePointer node = make_node<NodePointer>(args[3], std::move(edges));
  at::Tensor output = THPVariable_Unpack(args[0]);
  torch::autograd::create_gradient_edge(output, node);
  static_cast<PlannedBackward&>(*node).save(args[2], output);  // past the edge: an output that is saved must not hold its node
  return Py_NewRef(args[0]);
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

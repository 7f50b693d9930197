// The C++ half of launch_plans.py: launch plans, found by an exact key and run in about a
// microsecond, calls that are known to run the reference, and the direct launch of every first
// call. This file has the functions that Python calls; each header beside it has one subject.
//
// It is plain CPython and ATen without CUDA headers: the few driver symbols come from libcuda.so.1
// by dlsym, the current stream from torch's own C function. extension.py builds it once by g++.

#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include "callbacks.h"
#include "key.h"
#include "launch.h"
#include "plan.h"
#include "python_values.h"
#include "read_plan.h"
#include "run.h"

namespace {

// Returns whether the operator call need not be visible in this thread: there is no mode, no
// functorch layer, no tracer, no autocast.
bool nobody_watches() {
  static const uint64_t autocast =
      c10::DispatchKeySet({c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA})
          .raw_repr();
  const c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
  return (local.included_.raw_repr() & ~c10::default_included_set.raw_repr()) == 0 &&
         (~local.excluded_.raw_repr() & autocast) == 0 && !c10::impl::dispatch_mode_enabled() &&
         !at::impl::torch_function_mode_enabled();
}

std::vector<c10::IValue> profiled_inputs(PyObject* args) {
  std::vector<c10::IValue> inputs;
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(args); ++index) {
    PyObject* arg = PyTuple_GET_ITEM(args, index);
    if (is_plain_tensor(arg)) {
      inputs.emplace_back(tensor_of(arg));
    } else if (PyFloat_Check(arg)) {
      inputs.emplace_back(PyFloat_AS_DOUBLE(arg));
    } else if (PyBool_Check(arg)) {
      inputs.emplace_back(arg == Py_True);
    } else if (PyTuple_CheckExact(arg)) {
      c10::List<at::Tensor> tensors;
      for (Py_ssize_t place = 0; place < PyTuple_GET_SIZE(arg); ++place) {
        PyObject* item = PyTuple_GET_ITEM(arg, place);
        if (is_plain_tensor(item)) tensors.push_back(tensor_of(item));
      }
      inputs.emplace_back(std::move(tensors));
    } else {
      inputs.emplace_back();
    }
  }
  return inputs;
}

bool arguments_are(PyObject* const* args, Py_ssize_t count, Py_ssize_t wanted) {
  if (count == wanted && PyLong_Check(args[0]) &&
      static_cast<std::size_t>(PyLong_AsLong(args[0])) < operators.size() &&
      PyTuple_Check(args[2])) {
    return true;
  }
  PyErr_SetString(PyExc_TypeError, "expected (operator id, implementation, argument tuple, ...)");
  return false;
}

Operator& operator_of(PyObject* id) { return *operators[PyLong_AsLong(id)]; }

// lookup(id, implementation, args, named=True, detached=False): the output from a plan, or from the
// reference if that is known to run for such a call, else None. A named hit tells the profiler the
// operator's name; inside a raw operator the dispatcher has done that. With detached, the caller
// attaches the gradient that the arguments need. With either, the reference is not used, because
// its output may be a view of an argument and has its own gradient.
PyObject* lookup(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!arguments_are(args, std::min<Py_ssize_t>(count, 3), 3)) return nullptr;
  const bool named = count < 4 || args[3] == Py_True;
  const bool detached = count > 4 && args[4] == Py_True;
  return translated([&]() -> PyObject* {
  Operator& op = operator_of(args[0]);
  if (op.is_empty() || !nobody_watches()) Py_RETURN_NONE;
  const Arguments arguments(args[2]);
  KeyBuilder key;
  if (!key.build(op, args[1], arguments.get())) Py_RETURN_NONE;
  std::shared_ptr<const Plan> plan;  // outlives the GIL's release
  if (detached || !key.needs_gradient()) plan = plan_for(op, key);
  if (plan == nullptr) {
    if (!named || detached || !is_by_reference(op, key)) Py_RETURN_NONE;
    PyObject* reference = Py_NewRef(op.reference);  // outlives `forget`
    PyObject* output = PyObject_CallObject(reference, arguments.get());
    Py_DECREF(reference);
    return output;
  }
  if (!named) return run(*plan, arguments.get());
  std::vector<c10::IValue> inputs;  // outlives the guard
  at::RecordFunction guard(at::RecordScope::FUNCTION);
  if (guard.isActive()) {
    if (guard.needsInputs()) {
      inputs = profiled_inputs(arguments.get());
      guard.before(op.name.c_str(), c10::ArrayRef<const c10::IValue>(inputs.data(), inputs.size()));
    } else {
      guard.before(op.name.c_str());
    }
  }
  return run(*plan, arguments.get());
  });
}

// planned(id, implementation, args): whether a detached lookup would find a plan.
PyObject* planned(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!arguments_are(args, count, 3)) return nullptr;
  return translated([&]() -> PyObject* {
  Operator& op = operator_of(args[0]);
  KeyBuilder key;
  if (op.entries.empty() || !nobody_watches() || !key.build(op, args[1], args[2])) Py_RETURN_FALSE;
  return PyBool_FromLong(plan_for(op, key) != nullptr);
  });
}

// wanted(id, implementation, args): whether there is no plan for these arguments but could be.
PyObject* wanted(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!arguments_are(args, count, 3)) return nullptr;
  return translated([&]() -> PyObject* {
  Operator& op = operator_of(args[0]);
  KeyBuilder key;
  if (!nobody_watches() || !key.build(op, args[1], args[2]) || key.needs_gradient()) {
    Py_RETURN_FALSE;
  }
  const auto found = op.entries.find(key.words());
  return PyBool_FromLong(found == op.entries.end() || !found->second.rejected);
  });
}

// reject(id, implementation, args): there is no plan for these arguments, whatever the floats.
PyObject* reject(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!arguments_are(args, count, 3)) return nullptr;
  return translated([&]() -> PyObject* {
  Operator& op = operator_of(args[0]);
  KeyBuilder key;
  if (key.build(op, args[1], args[2]) && !key.needs_gradient()) {
    if (op.entries.size() >= max_plans) op.entries.clear();
    op.entries[Key(key.words().begin(), key.words().end())] = Entry{.rejected = true};
  }
  Py_RETURN_NONE;
  });
}

// keep_reference(id, implementation, args, reference): such calls run the reference.
PyObject* keep_reference(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!arguments_are(args, count, 4)) return nullptr;
  return translated([&]() -> PyObject* {
  Operator& op = operator_of(args[0]);
  KeyBuilder key;
  if (!nobody_watches() || !key.build(op, args[1], args[2])) Py_RETURN_NONE;
  const Words words = key.with_values();
  if (words.empty()) Py_RETURN_NONE;
  if (op.by_reference.size() >= max_plans) op.by_reference.clear();
  op.by_reference.emplace(words.begin(), words.end());
  Py_XDECREF(std::exchange(op.reference, Py_NewRef(args[3])));
  Py_RETURN_NONE;
  });
}

// keep_differentiable(id, implementation, args): such calls need a gradient, and may take a plan.
PyObject* keep_differentiable(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!arguments_are(args, count, 3)) return nullptr;
  return translated([&]() -> PyObject* {
  Operator& op = operator_of(args[0]);
  KeyBuilder key;
  if (nobody_watches() && key.build(op, args[1], args[2])) {
    if (op.differentiable.size() >= max_plans) op.differentiable.clear();
    op.differentiable.emplace(key.words().begin(), key.words().end());
  }
  Py_RETURN_NONE;
  });
}

// keep(id, implementation, args, steps, memory, outputs, is_tuple, by_value)
//   steps: [(launch, parameters, bytes touched), a product as for `read_product`, a call as for
//     `read_call`, or the index of the memory to fill with zeros]
//     launch: (cuda, function, device index, grid, block, shared bytes)
//     parameters: [(code, source, index, item, constant)]. Source 0 is a constant; 1 an argument or
//     an item of it (-1: itself), 2 a memory, each with the constant as byte offset. A tensor map's
//     layout follows. A struct's bytes are the constant, and the addresses in it follow:
//     [(byte, (source, index, item, constant))]
//   memory: [a tensor of that shape, strides and dtype, or None], `outputs` outputs first
PyObject* keep(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!arguments_are(args, count, 8)) return nullptr;
  return translated([&]() -> PyObject* {
  Operator& op = operator_of(args[0]);
  for (Py_ssize_t index = 0; index < std::min<Py_ssize_t>(64, PyTuple_GET_SIZE(args[2])); ++index) {
    if (PyFloat_Check(PyTuple_GET_ITEM(args[2], index))) op.float_arguments |= uint64_t{1} << index;
  }
  KeyBuilder key;
  if (!key.build(op, args[1], args[2]) || key.needs_gradient() ||
      PyList_GET_SIZE(args[4]) > static_cast<Py_ssize_t>(max_memory)) {
    Py_RETURN_FALSE;
  }
  auto plan = std::make_shared<Plan>();
  for (Py_ssize_t place = 0; place < PyList_GET_SIZE(args[3]); ++place) {
    Step& step = plan->steps.emplace_back();
    if (!read_step(PyList_GET_ITEM(args[3], place), step)) return nullptr;
    const auto maps = std::ranges::count(step.parameters, 'm', &Parameter::code);
    if (step.parameters.size() > max_parameters || maps > static_cast<int64_t>(max_maps)) {
      Py_RETURN_FALSE;
    }
    if (step.launch.cuda) plan->device_index = step.launch.device_index;
  }
  for (Py_ssize_t place = 0; place < PyList_GET_SIZE(args[4]); ++place) {
    PyObject* item = PyList_GET_ITEM(args[4], place);
    Memory memory{item != Py_None, {}, {}, {}};
    if (memory.present) {
      const at::Tensor& sample = tensor_of(item);
      memory.sizes = sample.sizes().vec();
      memory.strides = sample.strides().vec();
      memory.options = sample.options();
      if (sample.is_cuda()) plan->device_index = sample.get_device();
    }
    plan->memory.push_back(std::move(memory));
  }
  plan->outputs = PyLong_AsSize_t(args[5]);
  plan->is_tuple = args[6] == Py_True;
  if (PyErr_Occurred() != nullptr) return nullptr;

  if (op.entries.size() >= max_plans) op.entries.clear();
  Entry& entry = op.entries[Key(key.words().begin(), key.words().end())];
  if (args[7] != Py_True && entry.by_value.empty()) {
    entry.plan = std::move(plan);
  } else if (entry.by_value.size() < max_values) {
    entry.by_value[Key(key.float_bits().begin(), key.float_bits().end())] = std::move(plan);
  } else {
    entry = Entry{.rejected = true};  // every call has a new value: recording would cost more
  }
  Py_RETURN_TRUE;
  });
}

// launch(described, codes, values): launches once, without a plan.
PyObject* launch_once(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 3 || !PyTuple_Check(args[0]) || !PyUnicode_Check(args[1]) ||
      !PyList_Check(args[2])) {
    PyErr_SetString(PyExc_TypeError, "expected (launch, codes, values)");
    return nullptr;
  }
  return translated([&]() -> PyObject* {
  Launch launch;
  Py_ssize_t length = 0;
  const char* codes = PyUnicode_AsUTF8AndSize(args[1], &length);
  if (codes == nullptr || !read_launch(args[0], launch)) return nullptr;
  c10::SmallVector<uint64_t, 32> values(length, 0);
  c10::SmallVector<void*, 32> pointers(length, nullptr);
  std::deque<TensorMap> maps;
  std::deque<std::string> structs;
  for (Py_ssize_t index = 0; index < length; ++index) {
    PyObject* value = PyList_GET_ITEM(args[2], index);
    pointers[index] = &values[index];
    if (codes[index] == 't') {
      const at::Tensor& tensor = tensor_of(value);
      values[index] = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
    } else if (codes[index] == 's') {  // (bytes, ((place, tensor), ...))
      PyObject *content = nullptr, *tensors = nullptr;
      if (PyArg_ParseTuple(value, "SO!", &content, &PyTuple_Type, &tensors) == 0) return nullptr;
      std::string& made =
          structs.emplace_back(PyBytes_AS_STRING(content), PyBytes_GET_SIZE(content));
      for (Py_ssize_t place = 0; place < PyTuple_GET_SIZE(tensors); ++place) {
        Py_ssize_t at = 0;
        PyObject* tensor = nullptr;
        if (PyArg_ParseTuple(PyTuple_GET_ITEM(tensors, place), "nO", &at, &tensor) == 0) {
          return nullptr;
        }
        put_address(made, at, reinterpret_cast<uintptr_t>(tensor_of(tensor).const_data_ptr()));
      }
      pointers[index] = made.data();
    } else if (codes[index] == 'm') {  // (matrix, layout)
      TensorMap& map = maps.emplace_back();
      pointers[index] = &map;
      MapLayout layout;
      if (!layout.read(PyTuple_GetItem(value, 1))) return nullptr;
      const at::Tensor& matrix = tensor_of(PyTuple_GetItem(value, 0));
      layout.encode(map, reinterpret_cast<uintptr_t>(matrix.const_data_ptr()));
    } else {
      values[index] = scalar_bits(codes[index], value);
    }
  }
  if (PyErr_Occurred() != nullptr) return nullptr;
  if (launch.cuda) {
    launch.run_cuda(pointers.data(), Queue(launch.device_index));
  } else {
    launch.run_cpu(pointers.data(), true);  // releases the GIL, because it may wait for a disk
  }
  Py_RETURN_NONE;
  });
}

PyObject* add_operator(PyObject*, PyObject* name) {
  const char* text = PyUnicode_AsUTF8(name);
  if (text == nullptr) return nullptr;
  operators.push_back(std::make_unique<Operator>());
  operators.back()->name = text;
  return PyLong_FromSize_t(operators.size() - 1);
}

PyObject* forget(PyObject*, PyObject* id) {
  const auto index = static_cast<std::size_t>(PyLong_AsLong(id));
  if (index < operators.size()) operators[index]->forget();
  if (PyErr_Occurred() != nullptr) return nullptr;
  Py_RETURN_NONE;
}

// count(id): the number of keys that have a plan, or are known to have none.
PyObject* count_entries(PyObject*, PyObject* id) {
  const auto index = static_cast<std::size_t>(PyLong_AsLong(id));
  return PyLong_FromSize_t(index < operators.size() ? operators[index]->entries.size() : 0);
}

// probe(tensor): (data pointer, number of elements), to check that torch's layout is as expected.
PyObject* probe(PyObject*, PyObject* object) {
  const at::Tensor& tensor = tensor_of(object);
  return Py_BuildValue("(KL)", reinterpret_cast<unsigned long long>(tensor.const_data_ptr()),
                       static_cast<long long>(tensor.numel()));
}

// start(raise_launch_error, raise_kernel_error, raise_map_error, raw_stream, torch.dtype,
// torch.OutOfMemoryError)
PyObject* start(PyObject*, PyObject* args) {
  PyObject *launch = nullptr, *kernel = nullptr, *stream = nullptr, *type = nullptr;
  PyObject *memory = nullptr, *map = nullptr;
  if (PyArg_ParseTuple(args, "OOOOOO", &launch, &kernel, &map, &stream, &type, &memory) == 0) {
    return nullptr;
  }
  out_of_memory = Py_NewRef(memory);
  raise_launch_error = Py_NewRef(launch);
  raise_kernel_error = Py_NewRef(kernel);
  raise_map_error = Py_NewRef(map);
  raw_stream = Py_NewRef(stream);
  dtype_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(type));
  Py_RETURN_NONE;
}

template <typename Function>
PyCFunction fast(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"lookup", fast(lookup), METH_FASTCALL, nullptr},
    {"planned", fast(planned), METH_FASTCALL, nullptr},
    {"wanted", fast(wanted), METH_FASTCALL, nullptr},
    {"reject", fast(reject), METH_FASTCALL, nullptr},
    {"keep", fast(keep), METH_FASTCALL, nullptr},
    {"keep_reference", fast(keep_reference), METH_FASTCALL, nullptr},
    {"keep_differentiable", fast(keep_differentiable), METH_FASTCALL, nullptr},
    {"launch", fast(launch_once), METH_FASTCALL, nullptr},
    {"add_operator", add_operator, METH_O, nullptr},
    {"forget", forget, METH_O, nullptr},
    {"count", count_entries, METH_O, nullptr},
    {"probe", probe, METH_O, nullptr},
    {"start", start, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "fuselab_launcher", nullptr, -1, methods};

}  // namespace

extern "C" __attribute__((visibility("default"))) PyObject* PyInit_fuselab_launcher() {
  return PyModule_Create(&module);
}

// Running a plan: its memory, launches and products.

#pragma once

#include <Python.h>

#include <cstdint>
#include <cstring>
#include <deque>
#include <optional>
#include <string>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_addmm_activation.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/mm.h>

#include "plan.h"
#include "python_values.h"

namespace {

// The arguments of a call, with tuples in place of lists, because another thread may change a list
// while a CPU kernel runs.
class Arguments {
 public:
  explicit Arguments(PyObject* given) : held_(Py_NewRef(given)) {
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(given); ++index) {
      PyObject* arg = PyTuple_GET_ITEM(given, index);
      if (!PyList_CheckExact(arg)) continue;
      if (held_ == given) copy(given);
      Py_DECREF(PyTuple_GET_ITEM(held_, index));
      PyTuple_SET_ITEM(held_, index, PyList_AsTuple(arg));
    }
  }
  ~Arguments() { Py_DECREF(held_); }
  PyObject* get() const { return held_; }

 private:
  void copy(PyObject* given) {
    Py_DECREF(given);
    held_ = PyTuple_New(PyTuple_GET_SIZE(given));
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(given); ++index) {
      PyTuple_SET_ITEM(held_, index, Py_NewRef(PyTuple_GET_ITEM(given, index)));
    }
  }

  PyObject* held_;
};

using Tensors = c10::SmallVector<at::Tensor, 8>;

const at::Tensor& argument_of(const Origin& origin, PyObject* args) {
  PyObject* arg = PyTuple_GET_ITEM(args, origin.index);
  return tensor_of(origin.item < 0 ? arg : PyTuple_GET_ITEM(arg, origin.item));
}

uint64_t value_of(const Origin& origin, char code, const Plan& plan, PyObject* args,
                  const Tensors& memory) {
  if (origin.source == Origin::Source::constant) return origin.bits;
  if (origin.source == Origin::Source::memory) {
    return reinterpret_cast<uintptr_t>(memory[origin.index].mutable_data_ptr()) + origin.bits;
  }
  if (code == 'f' || code == 'd') {
    return float_bits(code, as_double(PyTuple_GET_ITEM(args, origin.index)));
  }
  const at::Tensor& tensor = argument_of(origin, args);
  // For in-place operators: mutable_data_ptr gives a lazily cloned tensor memory of its own first.
  return reinterpret_cast<uintptr_t>(plan.outputs == 0 ? tensor.mutable_data_ptr()
                                                       : tensor.const_data_ptr()) +
         origin.bits;
}

void put_address(std::string& content, std::size_t at, uint64_t address) {
  std::memcpy(content.data() + at, &address, sizeof address);
}

void run_step(const Step& step, const Plan& plan, PyObject* args, const Tensors& memory,
              const std::optional<Queue>& queue) {
  uint64_t values[max_parameters];
  void* pointers[max_parameters];
  TensorMap maps[max_maps];
  std::deque<std::string> structs;
  std::size_t count = 0, map_count = 0;
  for (const Parameter& parameter : step.parameters) {
    uint64_t& value = values[count];
    pointers[count++] = &value;
    value = value_of(parameter.origin, parameter.code, plan, args, memory);
    if (parameter.code == 'm') {
      TensorMap& map = maps[map_count++];
      pointers[count - 1] = &map;
      parameter.map.encode(map, value);
    } else if (parameter.code == 's') {
      std::string& content = structs.emplace_back(parameter.content);
      pointers[count - 1] = content.data();
      for (const auto& [at, origin] : parameter.addresses) {
        put_address(content, at, value_of(origin, 't', plan, args, memory));
      }
    }
  }
  if (queue.has_value()) {
    step.launch.run_cuda(pointers, *queue);
  } else {
    step.launch.run_cpu(pointers, step.release_gil);
  }
}

class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }

 private:
  PyThreadState* state_;
};

at::Tensor tensor_at(const Operand& operand, PyObject* args, const Tensors& memory) {
  const Origin& origin = operand.origin;
  const bool in_memory = origin.source == Origin::Source::memory;
  const at::Tensor& base = in_memory ? memory[origin.index] : argument_of(origin, args);
  const int64_t offset = static_cast<int64_t>(origin.bits) / base.element_size();
  if (offset == 0 && base.sizes() == operand.sizes && base.strides() == operand.strides) {
    return base;
  }
  return base.as_strided(operand.sizes, operand.strides, base.storage_offset() + offset);
}

void multiply(const Product& product, PyObject* args, const Tensors& memory) {
  const at::AutoDispatchBelowADInplaceOrView guard;  // the caller of `run` attaches gradients
  Tensors t;
  for (const Operand& operand : product.operands) t.push_back(tensor_at(operand, args, memory));
  const WithoutGil without_gil;
  switch (product.kind) {
    case Product::Kind::none:
      break;
    case Product::Kind::mm:
      at::mm_out(t[0], t[1], t[2]);
      break;
    case Product::Kind::addmm:
      at::addmm_out(t[0], t[1], t[2], t[3]);
      break;
    case Product::Kind::relu:
    case Product::Kind::gelu:
      at::_addmm_activation_out(t[0], t[1], t[2], t[3], 1, 1,
                                product.kind == Product::Kind::gelu);
      break;
  }
}


// An object that this owns, or the error that there is none.
class Owned {
 public:
  explicit Owned(PyObject* object) : object_(object) {
    if (object == nullptr) throw Raised{};
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() { Py_XDECREF(object_); }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }

 private:
  PyObject* object_;
};

PyObject* given_to(const Given& one, PyObject* args, const Tensors& memory) {
  if (one.constant != nullptr) return Py_NewRef(one.constant);
  if (!one.is_items) return THPVariable_Wrap(tensor_at(one.tensor, args, memory));
  Owned items(PyList_New(static_cast<Py_ssize_t>(one.items.size())));
  for (std::size_t place = 0; place < one.items.size(); ++place) {
    Owned item(given_to(one.items[place], args, memory));
    PyList_SET_ITEM(items.get(), static_cast<Py_ssize_t>(place), item.release());
  }
  return items.release();
}

void make_call(const Call& call, PyObject* args, Tensors& memory) {
  const at::AutoDispatchBelowADInplaceOrView guard;  // the caller of `run` attaches gradients
  Owned given(PyTuple_New(static_cast<Py_ssize_t>(call.given.size())));
  for (std::size_t place = 0; place < call.given.size(); ++place) {
    Owned item(given_to(call.given[place], args, memory));
    PyTuple_SET_ITEM(given.get(), static_cast<Py_ssize_t>(place), item.release());
  }
  const Owned returned(PyObject_Call(call.function, given.get(), call.keywords));
  const bool are_several = PyTuple_Check(returned.get()) || PyList_Check(returned.get());
  for (std::size_t place = 0; place < call.results.size(); ++place) {
    if (call.results[place] < 0) continue;
    PyObject* result =
        are_several ? PySequence_Fast_GET_ITEM(returned.get(), static_cast<Py_ssize_t>(place))
                    : returned.get();
    memory[call.results[place]] = tensor_of(result);
  }
}

void fill_with_zeros(const at::Tensor& memory, const std::optional<Queue>& queue) {
  void* bytes = memory.mutable_data_ptr();
  if (!queue.has_value()) {
    std::memset(bytes, 0, memory.nbytes());
    return;
  }
  const int status = Driver::instance().set_bytes(reinterpret_cast<uintptr_t>(bytes), 0,
                                                  memory.nbytes(), queue->stream());
  TORCH_CHECK(status == 0, "memory cannot be filled with zeros (CUresult ", status, ")");
}

PyObject* run(const Plan& plan, PyObject* args) {
  Tensors memory;
  for (const Memory& wanted : plan.memory) {
    memory.push_back(wanted.present
                         ? at::empty_strided(wanted.sizes, wanted.strides, wanted.options)
                         : at::Tensor());
  }
  {
    std::optional<Queue> queue;
    if (plan.device_index >= 0) queue.emplace(plan.device_index);
    for (const Step& step : plan.steps) {
      if (step.call != nullptr) {
        make_call(*step.call, args, memory);
      } else if (step.product.kind != Product::Kind::none) {
        multiply(step.product, args, memory);
      } else if (step.launch.function == nullptr) {
        fill_with_zeros(memory[step.zeroed], queue);
      } else {
        run_step(step, plan, args, memory, queue);
      }
    }
  }
  if (!plan.is_tuple) return THPVariable_Wrap(std::move(memory[0]));
  PyObject* result = PyTuple_New(static_cast<Py_ssize_t>(plan.outputs));
  for (std::size_t index = 0; index < plan.outputs; ++index) {
    PyObject* item =
        memory[index].defined() ? THPVariable_Wrap(std::move(memory[index])) : Py_NewRef(Py_None);
    PyTuple_SET_ITEM(result, static_cast<Py_ssize_t>(index), item);
  }
  return result;
}

}  // namespace

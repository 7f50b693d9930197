// The key of a call: everything that a plan may depend on.

#pragma once

#include <Python.h>

#include <algorithm>
#include <bit>
#include <bitset>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include "plan.h"
#include "python_values.h"

namespace {

// Of a call; more have no plan. A step of an optimizer takes four tensors for each parameter.
constexpr std::size_t max_tensors = 1024;
constexpr std::size_t max_key_words = 6 * max_tensors;  // for two dimensions, on average
constexpr std::size_t max_floats = 64;

// Everything that a plan may depend on, as words. Float values are kept apart, because most plans
// hold for all of them.
class KeyBuilder {
 public:
  // Returns whether the arguments can have a key at all.
  bool build(const Operator& op, PyObject* implementation, PyObject* args) {
    const at::Context& settings = at::globalContext();
    const bool tf32 = settings.float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) ==
                      at::Float32Precision::TF32;  // as in allows_tf32
    push((settings.deterministicAlgorithms() ? 1 : 0) | (tf32 ? 2 : 0));
    if (!add_string(implementation)) return false;
    const Py_ssize_t count = PyTuple_GET_SIZE(args);
    for (Py_ssize_t index = 0; index < count; ++index) {
      PyObject* arg = PyTuple_GET_ITEM(args, index);
      const bool is_float = index < 64 && (op.float_arguments >> index & 1) != 0;
      if (is_float && PyLong_CheckExact(arg)) {
        add_float(PyLong_AsDouble(arg));
        if (PyErr_Occurred() != nullptr) return PyErr_Clear(), false;
      } else if (!add(arg)) {
        return false;
      }
    }
    if (!device_.has_value()) return false;
    if (device_->is_cpu()) push(at::get_num_threads());
    return words_ <= max_key_words;
  }

  Words words() const { return {key_, words_}; }
  Words float_bits() const { return {floats_, float_count_}; }
  bool needs_gradient() const { return requires_grad_.any() && c10::GradMode::is_enabled(); }

  // The words of `by_reference`; none where they are too many. No other words come after them.
  Words with_values() {
    push(needs_gradient() ? 1 : 0);
    for (std::size_t tensor = 0; needs_gradient() && tensor < address_count_; ++tensor) {
      if (requires_grad_[tensor]) push(static_cast<int64_t>(tensor));
    }
    for (int64_t bits : float_bits()) push(bits);
    return {key_, words_ <= max_key_words ? words_ : 0};
  }

 private:
  enum Tag : int64_t { tensor = 1, none, boolean, integer, real, string, dtype, sequence };

  void push(int64_t word) {
    if (words_ < max_key_words) key_[words_] = word;
    ++words_;
  }

  bool add(PyObject* arg) {
    if (is_plain_tensor(arg)) return add_tensor(tensor_of(arg));
    if (arg == Py_None) return push(Tag::none), true;
    if (arg == Py_True || arg == Py_False) {
      return push(Tag::boolean | (arg == Py_True ? 1 << 8 : 0)), true;
    }
    if (PyFloat_Check(arg)) return add_float(PyFloat_AS_DOUBLE(arg)), true;
    if (PyLong_CheckExact(arg)) return add_integer(arg);
    if (PyUnicode_CheckExact(arg)) return add_string(arg);
    if (Py_TYPE(arg) == dtype_type) {  // one object per dtype, which lives as long as torch
      push(Tag::dtype);
      return push(reinterpret_cast<intptr_t>(arg)), true;
    }
    if (PyTuple_CheckExact(arg) || PyList_CheckExact(arg)) return add_sequence(arg);
    return false;
  }

  bool add_tensor(const at::Tensor& value) {
    // Backends and keys of a plain strided tensor. Any other kind of tensor (sparse, quantised,
    // conjugate, negative, named, functorch's, fake) has another key.
    constexpr c10::DispatchKeySet plain =
        c10::DispatchKeySet({c10::DispatchKey::CPU, c10::DispatchKey::CUDA,
                             c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutogradCUDA,
                             c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA,
                             c10::DispatchKey::ADInplaceOrView});
    if (!value.defined()) return false;
    const c10::TensorImpl* impl = value.unsafeGetTensorImpl();
    if ((impl->key_set().raw_repr() & ~plain.raw_repr()) != 0) return false;
    if (value._fw_grad(0).defined()) return false;  // a dual tensor of forward-mode differentiation
    const c10::Device device = value.device();
    if (device_.has_value() && *device_ != device) return false;
    device_ = device;
    const auto address = reinterpret_cast<uintptr_t>(value.const_data_ptr());
    const int64_t alignment = std::countr_zero(address | 16);  // 2^alignment divides the address
    // The number of the earlier tensor that begins at the same address, if any (1 is the first): a
    // plan recorded with one tensor twice cannot tell which of two it passed to the kernel.
    if (address_count_ == max_tensors) return false;
    const std::span<const uintptr_t> earlier(addresses_, address_count_);
    const auto same = std::find(earlier.begin(), earlier.end(), address);
    const int64_t shared_with = same == earlier.end() ? 0 : same - earlier.begin() + 1;
    if (impl->requires_grad()) requires_grad_.set(address_count_);
    addresses_[address_count_++] = address;
    const int64_t rank = value.dim();
    push(Tag::tensor | static_cast<int64_t>(value.scalar_type()) << 8 | alignment << 16 |
         static_cast<int64_t>(device.is_cuda()) << 19 |
         static_cast<int64_t>(static_cast<uint8_t>(device.index())) << 24 | rank << 32 |
         shared_with << 48);
    for (int64_t size : value.sizes()) push(size);
    for (int64_t stride : value.strides()) push(stride);
    return true;
  }

  bool add_integer(PyObject* arg) {
    int overflow = 0;
    push(Tag::integer);
    push(PyLong_AsLongLongAndOverflow(arg, &overflow));
    return overflow == 0;
  }

  void add_float(double value) {
    push(Tag::real);
    if (float_count_ < max_floats) floats_[float_count_++] = std::bit_cast<int64_t>(value);
  }

  bool add_string(PyObject* arg) {
    Py_ssize_t length = 0;
    const char* text = PyUnicode_AsUTF8AndSize(arg, &length);
    if (text == nullptr) return PyErr_Clear(), false;
    push(Tag::string | static_cast<int64_t>(length) << 8);
    for (Py_ssize_t offset = 0; offset < length; offset += 8) {
      int64_t word = 0;
      std::memcpy(&word, text + offset, std::min<Py_ssize_t>(8, length - offset));
      push(word);
    }
    return true;
  }

  // Adds a sequence of tensors, ints, bools and None; a list and a tuple are the same.
  bool add_sequence(PyObject* arg) {
    const Py_ssize_t length = PySequence_Fast_GET_SIZE(arg);
    push(Tag::sequence | static_cast<int64_t>(length) << 8);
    for (Py_ssize_t index = 0; index < length; ++index) {
      PyObject* item = PySequence_Fast_GET_ITEM(arg, index);
      if (is_plain_tensor(item) || item == Py_None || PyBool_Check(item) ||
          PyLong_CheckExact(item)) {
        if (!add(item)) return false;
      } else {
        return false;
      }
    }
    return true;
  }

  int64_t key_[max_key_words];
  std::size_t words_ = 0;
  int64_t floats_[max_floats];
  std::size_t float_count_ = 0;
  uintptr_t addresses_[max_tensors];
  std::size_t address_count_ = 0;
  std::optional<c10::Device> device_;
  std::bitset<max_tensors> requires_grad_;
};

// Returns the plan of a call, or of a call that needs a gradient if that may use it.
std::shared_ptr<const Plan> plan_for(const Operator& op, const KeyBuilder& key) {
  if (key.needs_gradient() && !op.differentiable.contains(key.words())) return nullptr;
  const auto found = op.entries.find(key.words());
  if (found == op.entries.end()) return nullptr;
  if (found->second.plan != nullptr) return found->second.plan;
  const auto& by_value = found->second.by_value;
  const auto value = by_value.find(key.float_bits());
  return value == by_value.end() ? nullptr : value->second;
}

bool is_by_reference(const Operator& op, KeyBuilder& key) {
  return !op.by_reference.empty() && op.by_reference.contains(key.with_values());
}

}  // namespace

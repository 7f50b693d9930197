// Tensors and numbers as Python passes them.

#pragma once

#include <Python.h>

#include <bit>
#include <cstdint>

#include <ATen/core/Tensor.h>

// This declares what torch/csrc/autograd/python_variable.h has in torch 2.11 to 2.13. That header
// itself includes pybind11 and takes 8 s; launch_plans.py compares what `probe` reads with Python.
struct THPVariable {
  PyObject_HEAD
  at::Tensor cdata;
};
extern PyObject* THPVariableClass;
extern PyObject* ParameterClass;
PyObject* THPVariable_Wrap(at::TensorBase&& tensor);

namespace {

bool is_plain_tensor(PyObject* object) {  // a Tensor or a Parameter, no other subclass
  const PyTypeObject* type = Py_TYPE(object);
  return type == reinterpret_cast<PyTypeObject*>(THPVariableClass) ||
         type == reinterpret_cast<PyTypeObject*>(ParameterClass);
}

const at::Tensor& tensor_of(PyObject* object) {
  return reinterpret_cast<THPVariable*>(object)->cdata;
}

uint64_t float_bits(char code, double value) {
  return code == 'f' ? std::bit_cast<uint32_t>(static_cast<float>(value))
                     : std::bit_cast<uint64_t>(value);
}

double as_double(PyObject* number) {
  return PyFloat_Check(number) ? PyFloat_AS_DOUBLE(number) : PyLong_AsDouble(number);
}

}  // namespace

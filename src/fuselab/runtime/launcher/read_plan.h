// Reading a plan, as launch_recording.py describes it.

#pragma once

#include <Python.h>

#include <cstdint>

#include "plan.h"
#include "python_values.h"

namespace {

constexpr int64_t release_gil_bytes = 1 << 20;  // of a plan: above 1 MiB a CPU kernel runs 20 us

uint64_t scalar_bits(char code, PyObject* value) {
  switch (code) {
    case 'i':
      return static_cast<uint32_t>(PyLong_AsLong(value));
    case 'l':
      return PyLong_AsUnsignedLongLongMask(value);
    case 'n':
    case 's':
      return 0;
    default:
      return float_bits(code, as_double(value));
  }
}

bool read_launch(PyObject* described, Launch& launch) {
  unsigned long long function = 0;
  int cuda = 0;
  if (PyArg_ParseTuple(described, "pKi(III)(III)I", &cuda, &function, &launch.device_index,
                       &launch.grid[0], &launch.grid[1], &launch.grid[2], &launch.block[0],
                       &launch.block[1], &launch.block[2], &launch.shared_bytes) == 0) {
    return false;
  }
  launch.cuda = cuda != 0;
  launch.function = reinterpret_cast<void*>(static_cast<uintptr_t>(function));
  return true;
}

Origin read_origin(char code, int source, int index, PyObject* constant) {
  const auto from = static_cast<Origin::Source>(source);
  const uint64_t bits = from == Origin::Source::constant ? scalar_bits(code, constant)
                                                         : PyLong_AsUnsignedLongLongMask(constant);
  return {from, static_cast<uint8_t>(index), bits};
}

bool read_struct(PyObject* content, PyObject* addresses, Parameter& parameter) {
  const Py_ssize_t length = PyBytes_Size(content);
  if (length < 0) return false;
  parameter.content.assign(PyBytes_AS_STRING(content), length);
  for (Py_ssize_t place = 0; place < PyList_GET_SIZE(addresses); ++place) {
    Py_ssize_t at = 0;
    int source = 0, index = 0;
    PyObject* constant = nullptr;
    if (PyArg_ParseTuple(PyList_GET_ITEM(addresses, place), "n(iiO)", &at, &source, &index,
                         &constant) == 0) {
      return false;
    }
    parameter.addresses.emplace_back(at, read_origin('t', source, index, constant));
  }
  return true;
}

// Reads a product from (kind, [((source, index, constant), sizes, strides)]).
bool read_product(PyObject* described, Product& product) {
  int kind = 0;
  PyObject* operands = nullptr;
  if (PyArg_ParseTuple(described, "iO!", &kind, &PyList_Type, &operands) == 0) return false;
  product.kind = static_cast<Product::Kind>(kind);
  for (Py_ssize_t place = 0; place < PyList_GET_SIZE(operands); ++place) {
    int source = 0, index = 0;
    PyObject *constant = nullptr, *sizes = nullptr, *strides = nullptr;
    if (PyArg_ParseTuple(PyList_GET_ITEM(operands, place), "(iiO)O!O!", &source, &index, &constant,
                         &PyTuple_Type, &sizes, &PyTuple_Type, &strides) == 0) {
      return false;
    }
    Operand& operand = product.operands.emplace_back();
    operand.origin = read_origin('t', source, index, constant);
    for (Py_ssize_t dim = 0; dim < PyTuple_GET_SIZE(sizes); ++dim) {
      operand.sizes.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(sizes, dim)));
      operand.strides.push_back(PyLong_AsLongLong(PyTuple_GetItem(strides, dim)));
    }
  }
  return PyErr_Occurred() == nullptr;
}

// Reads a step of a plan from (launch, parameters, bytes touched), from a product (a pair), or from
// the index of the memory to zero.
bool read_step(PyObject* described, Step& step) {
  if (PyLong_Check(described)) {
    step.zeroed = static_cast<uint8_t>(PyLong_AsLong(described));
    return true;
  }
  if (PyTuple_Check(described) && PyTuple_GET_SIZE(described) == 2) {
    return read_product(described, step.product);
  }
  PyObject *launch = nullptr, *parameters = nullptr;
  long long bytes = 0;
  if (PyArg_ParseTuple(described, "O!O!L", &PyTuple_Type, &launch, &PyList_Type, &parameters,
                       &bytes) == 0 ||
      !read_launch(launch, step.launch)) {
    return false;
  }
  for (Py_ssize_t place = 0; place < PyList_GET_SIZE(parameters); ++place) {
    int code = 0, source = 0, index = 0;
    PyObject* constant = nullptr;
    PyObject* rest = nullptr;
    if (PyArg_ParseTuple(PyList_GET_ITEM(parameters, place), "CiiO|O", &code, &source, &index,
                         &constant, &rest) == 0) {
      return false;
    }
    Parameter& parameter = step.parameters.emplace_back();
    parameter.code = static_cast<char>(code);
    parameter.origin = read_origin(parameter.code, source, index, constant);
    if (code == 'm' && !parameter.map.read(rest)) return false;
    if (code == 's' && !read_struct(constant, rest, parameter)) return false;
  }
  step.release_gil = !step.launch.cuda && bytes >= release_gil_bytes;
  return PyErr_Occurred() == nullptr;
}

}  // namespace

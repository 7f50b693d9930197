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

Origin read_origin(char code, int source, int index, int item, PyObject* constant) {
  const auto from = static_cast<Origin::Source>(source);
  const uint64_t bits = from == Origin::Source::constant ? scalar_bits(code, constant)
                                                         : PyLong_AsUnsignedLongLongMask(constant);
  return {from, static_cast<uint8_t>(index), static_cast<int16_t>(item), bits};
}

bool read_struct(PyObject* content, PyObject* addresses, Parameter& parameter) {
  const Py_ssize_t length = PyBytes_Size(content);
  if (length < 0) return false;
  parameter.content.assign(PyBytes_AS_STRING(content), length);
  for (Py_ssize_t place = 0; place < PyList_GET_SIZE(addresses); ++place) {
    Py_ssize_t at = 0;
    int source = 0, index = 0, item = 0;
    PyObject* constant = nullptr;
    if (PyArg_ParseTuple(PyList_GET_ITEM(addresses, place), "n(iiiO)", &at, &source, &index, &item,
                         &constant) == 0) {
      return false;
    }
    parameter.addresses.emplace_back(at, read_origin('t', source, index, item, constant));
  }
  return true;
}

// Reads a tensor from ((source, index, item, constant), sizes, strides).
bool read_operand(PyObject* described, Operand& operand) {
  int source = 0, index = 0, item = 0;
  PyObject *constant = nullptr, *sizes = nullptr, *strides = nullptr;
  if (PyArg_ParseTuple(described, "(iiiO)O!O!", &source, &index, &item, &constant, &PyTuple_Type,
                       &sizes, &PyTuple_Type, &strides) == 0) {
    return false;
  }
  operand.origin = read_origin('t', source, index, item, constant);
  for (Py_ssize_t dim = 0; dim < PyTuple_GET_SIZE(sizes); ++dim) {
    operand.sizes.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(sizes, dim)));
    operand.strides.push_back(PyLong_AsLongLong(PyTuple_GetItem(strides, dim)));
  }
  return true;
}

// Reads a product from (kind, [operand]).
bool read_product(PyObject* described, Product& product) {
  int kind = 0;
  PyObject* operands = nullptr;
  if (PyArg_ParseTuple(described, "iO!", &kind, &PyList_Type, &operands) == 0) return false;
  product.kind = static_cast<Product::Kind>(kind);
  for (Py_ssize_t place = 0; place < PyList_GET_SIZE(operands); ++place) {
    if (!read_operand(PyList_GET_ITEM(operands, place), product.operands.emplace_back())) {
      return false;
    }
  }
  return PyErr_Occurred() == nullptr;
}

// Reads arguments of a call from a list: an operand as a tuple, several arguments as a list, and a
// constant as the ``value`` of an object.
bool read_given(PyObject* described, Call& call, std::vector<Given>& given) {
  for (Py_ssize_t place = 0; place < PyList_GET_SIZE(described); ++place) {
    PyObject* one = PyList_GET_ITEM(described, place);
    Given& made = given.emplace_back();
    if (PyTuple_Check(one)) {
      if (!read_operand(one, made.tensor)) return false;
    } else if (PyList_Check(one)) {
      made.is_items = true;
      if (!read_given(one, call, made.items)) return false;
    } else {
      made.constant = PyObject_GetAttrString(one, "value");
      if (made.constant == nullptr) return false;
      const int status = PyList_Append(call.constants, made.constant);
      Py_DECREF(made.constant);  // the list owns it now
      if (status != 0) return false;
    }
  }
  return true;
}

// Reads a call from (function, [argument], keywords, [memory of each result]).
bool read_call(PyObject* described, Step& step) {
  PyObject *function = nullptr, *given = nullptr, *keywords = nullptr, *results = nullptr;
  if (PyArg_ParseTuple(described, "OO!O!O!", &function, &PyList_Type, &given, &PyDict_Type,
                       &keywords, &PyList_Type, &results) == 0) {
    return false;
  }
  step.call = std::make_shared<Call>();
  step.call->function = Py_NewRef(function);
  step.call->keywords = Py_NewRef(keywords);
  step.call->constants = PyList_New(0);
  if (!read_given(given, *step.call, step.call->given)) return false;
  for (Py_ssize_t place = 0; place < PyList_GET_SIZE(results); ++place) {
    step.call->results.push_back(
        static_cast<int>(PyLong_AsLong(PyList_GET_ITEM(results, place))));
  }
  return PyErr_Occurred() == nullptr;
}

// Reads a step of a plan from (launch, parameters, bytes touched), from a product (a pair), a call
// (four items), or the index of the memory to zero.
bool read_step(PyObject* described, Step& step) {
  if (PyLong_Check(described)) {
    step.zeroed = static_cast<uint8_t>(PyLong_AsLong(described));
    return true;
  }
  if (PyTuple_Check(described) && PyTuple_GET_SIZE(described) == 2) {
    return read_product(described, step.product);
  }
  if (PyTuple_Check(described) && PyTuple_GET_SIZE(described) == 4) {
    return read_call(described, step);
  }
  PyObject *launch = nullptr, *parameters = nullptr;
  long long bytes = 0;
  if (PyArg_ParseTuple(described, "O!O!L", &PyTuple_Type, &launch, &PyList_Type, &parameters,
                       &bytes) == 0 ||
      !read_launch(launch, step.launch)) {
    return false;
  }
  for (Py_ssize_t place = 0; place < PyList_GET_SIZE(parameters); ++place) {
    int code = 0, source = 0, index = 0, item = 0;
    PyObject* constant = nullptr;
    PyObject* rest = nullptr;
    if (PyArg_ParseTuple(PyList_GET_ITEM(parameters, place), "CiiiO|O", &code, &source, &index,
                         &item, &constant, &rest) == 0) {
      return false;
    }
    Parameter& parameter = step.parameters.emplace_back();
    parameter.code = static_cast<char>(code);
    parameter.origin = read_origin(parameter.code, source, index, item, constant);
    if (code == 'm' && !parameter.map.read(rest)) return false;
    if (code == 's' && !read_struct(constant, rest, parameter)) return false;
  }
  step.release_gil = !step.launch.cuda && bytes >= release_gil_bytes;
  return PyErr_Occurred() == nullptr;
}

}  // namespace

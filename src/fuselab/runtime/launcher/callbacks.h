// Python's objects that `start` is given: functions that raise errors, the current stream's, types.

#pragma once

#include <Python.h>

#include <exception>

#include <c10/util/Exception.h>

namespace {

PyObject* raise_launch_error = nullptr;  // (status, grid, block, shared_bytes), raises
PyObject* raise_kernel_error = nullptr;  // (message), raises
PyObject* raise_map_error = nullptr;     // (status, or -1 without tensor maps; layout), raises
PyObject* raw_stream = nullptr;          // torch._C._cuda_getCurrentRawStream, or None
PyTypeObject* dtype_type = nullptr;      // torch.dtype
PyObject* out_of_memory = nullptr;       // torch.OutOfMemoryError

struct Raised {};  // a Python exception is set

// Runs `body` and turns its C++ exceptions into Python's.
template <typename Body>
PyObject* translated(Body body) {
  try {
    return body();
  } catch (const Raised&) {
  } catch (const c10::OutOfMemoryError& error) {
    PyErr_SetString(out_of_memory, error.what_without_backtrace());
  } catch (const c10::Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

void* current_stream(int device_index) {
  PyObject* index = PyLong_FromLong(device_index);
  PyObject* stream = PyObject_CallOneArg(raw_stream, index);
  Py_DECREF(index);
  if (stream == nullptr) throw Raised{};
  void* handle = PyLong_AsVoidPtr(stream);
  Py_DECREF(stream);
  return handle;
}

}  // namespace

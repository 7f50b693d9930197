// One launch: of a CUDA kernel, with its tensor maps, or of a CPU kernel.

#pragma once

#include <Python.h>

#include <cstdint>

#include <ATen/Parallel.h>

#include "callbacks.h"
#include "driver.h"

namespace {

struct alignas(64) TensorMap {  // CUtensorMap
  uint64_t words[16];
};

// All of a tensor map except the address, as `Layout` of tensor_map.py.
struct MapLayout {
  int dtype;
  unsigned long long rows, columns, pitch;  // pitch in bytes
  unsigned box_rows, box_columns;

  // This takes less than 0.5 us, so a map is made for the current address in every launch.
  void encode(TensorMap& map, uint64_t address) const {
    const uint64_t sizes[2] = {columns, rows};
    const uint64_t strides[1] = {pitch};
    const uint32_t box[2] = {box_columns, box_rows};
    const uint32_t steps[2] = {1, 1};
    const auto encode = Driver::instance().encode_map;
    const int status =
        encode == nullptr
            ? -1
            : encode(&map, dtype, 2, reinterpret_cast<void*>(static_cast<uintptr_t>(address)),
                     sizes, strides, box, steps, 0, 3, 3, 0);  // the modes: see cuda_driver.py
    if (status != 0) {
      Py_XDECREF(PyObject_CallFunction(raise_map_error, "i(iKKKII)", status, dtype, rows, columns,
                                       pitch, box_rows, box_columns));
      throw Raised{};
    }
  }

  bool read(PyObject* described) {
    return PyArg_ParseTuple(described, "iKKKII", &dtype, &rows, &columns, &pitch, &box_rows,
                            &box_columns) != 0;
  }
};

// A CUDA device's current stream, asked for once, while the device's context is current.
class Queue {
 public:
  explicit Queue(int device_index) : stream_(current_stream(device_index)), guard_(device_index) {}
  void* stream() const { return stream_; }

 private:
  void* stream_;
  ContextGuard guard_;
};

struct Launch {
  bool cuda = false;
  int device_index = 0;
  void* function = nullptr;  // CUfunction, or const char* (*)(void**)
  unsigned grid[3] = {1, 1, 1};
  unsigned block[3] = {1, 1, 1};
  unsigned shared_bytes = 0;

  void run_cuda(void** parameters, const Queue& queue) const {
    const int status =
        Driver::instance().launch(function, grid[0], grid[1], grid[2], block[0], block[1],
                                  block[2], shared_bytes, queue.stream(), parameters, nullptr);
    if (status != 0) {
      Py_XDECREF(PyObject_CallFunction(raise_launch_error, "i(III)(III)I", status, grid[0], grid[1],
                                       grid[2], block[0], block[1], block[2], shared_bytes));
      throw Raised{};
    }
  }

  void run_cpu(void** parameters, bool release_gil) const {
    // Sets OpenMP's thread count in a thread that has not run a torch operator yet.
    at::get_num_threads();
    auto entry = reinterpret_cast<const char* (*)(void**)>(function);
    PyThreadState* state = release_gil ? PyEval_SaveThread() : nullptr;
    const char* message = entry(parameters);
    if (state != nullptr) PyEval_RestoreThread(state);
    if (message != nullptr) {
      Py_XDECREF(PyObject_CallFunction(raise_kernel_error, "s", message));
      throw Raised{};
    }
  }
};

}  // namespace

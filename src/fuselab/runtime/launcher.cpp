// The C++ half of launch_plans.py: launch plans, found by an exact key and run in about a
// microsecond, calls that are known to run the reference, and the direct launch of every first
// call.
//
// It is plain CPython and ATen without CUDA headers: the few driver symbols come from libcuda.so.1
// by dlsym, the current stream from torch's own C function. extension.py builds it once by g++.

#include <Python.h>
#include <dlfcn.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_addmm_activation.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/mm.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

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

constexpr std::size_t max_key_words = 384;  // 64 tensors of 2 dimensions; more have no plan
constexpr std::size_t max_parameters = 64;  // of a launch
constexpr std::size_t max_tensors = 64;     // of a call
constexpr std::size_t max_maps = 8;          // tensor maps of a launch
constexpr std::size_t max_memory = 255;      // outputs and workspaces of a plan
constexpr std::size_t max_plans = 4096;      // per operator; then all are dropped
constexpr std::size_t max_values = 64;       // per key whose plan depends on a float's value
constexpr int64_t release_gil_bytes = 1 << 20;  // of a plan: above 1 MiB a CPU kernel runs 20 us

// ---------------------------------------------------------------------------- the CUDA driver

struct Driver {
  using Context = void*;
  int (*get_context)(Context*);
  int (*push_context)(Context);
  int (*pop_context)(Context*);
  int (*get_device)(int*, int);
  int (*retain_primary)(Context*, int);
  int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*,
                void**, void**);
  int (*set_bytes)(unsigned long long, unsigned char, std::size_t, void*);
  // cuTensorMapEncodeTiled; null in drivers older than 12.0.
  int (*encode_map)(void*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*,
                    const uint32_t*, int, int, int, int);
  std::vector<Context> primary;

  static Driver& instance() {
    static Driver driver;
    return driver;
  }

  Context primary_context(int device_index) {
    if (static_cast<std::size_t>(device_index) >= primary.size()) {
      primary.resize(device_index + 1, nullptr);
    }
    if (primary[device_index] == nullptr) {
      int device = 0;
      int status = get_device(&device, device_index);
      if (status == 0) status = retain_primary(&primary[device_index], device);
      TORCH_CHECK(status == 0, "CUDA device ", device_index, " cannot be used (CUresult ", status,
                  ")");
    }
    return primary[device_index];
  }

 private:
  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    TORCH_CHECK(library != nullptr, "libcuda.so.1 was not found; install the NVIDIA driver");
    auto load = [&](auto& symbol, const char* name) {
      symbol = reinterpret_cast<std::remove_reference_t<decltype(symbol)>>(dlsym(library, name));
      TORCH_CHECK(symbol != nullptr, "libcuda.so.1 has no ", name);
    };
    load(get_context, "cuCtxGetCurrent");
    load(push_context, "cuCtxPushCurrent_v2");
    load(pop_context, "cuCtxPopCurrent_v2");
    load(get_device, "cuDeviceGet");
    load(retain_primary, "cuDevicePrimaryCtxRetain");
    load(launch, "cuLaunchKernel");
    load(set_bytes, "cuMemsetD8Async");
    encode_map =
        reinterpret_cast<decltype(encode_map)>(dlsym(library, "cuTensorMapEncodeTiled"));
  }
};

// Makes a device's primary context current for one launch. It is the device guard, and takes 30 ns
// if the context is current already (cudaSetDevice takes ten times that).
class ContextGuard {
 public:
  explicit ContextGuard(int device_index) : driver_(Driver::instance()) {
    Driver::Context wanted = driver_.primary_context(device_index);
    Driver::Context current = nullptr;
    driver_.get_context(&current);
    if (current != wanted) pushed_ = driver_.push_context(wanted) == 0;
  }
  ~ContextGuard() {
    Driver::Context popped = nullptr;
    if (pushed_) driver_.pop_context(&popped);
  }

 private:
  Driver& driver_;
  bool pushed_ = false;
};

// ---------------------------------------------------------------------------- Python callables

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

// ---------------------------------------------------------------------------- tensor maps

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

// ---------------------------------------------------------------------------- plans

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

// The source of a value.
struct Origin {
  enum class Source : uint8_t { constant, argument, memory };
  Source source = Source::constant;
  uint8_t index = 0;  // of the argument or of the memory
  // A constant's bits, the byte offset into the memory, or the item of the argument (-1: itself).
  uint64_t bits = 0;
};

struct Parameter {
  char code;
  Origin origin;
  MapLayout map;                                         // of code 'm'
  std::string content;                                   // of code 's', a struct by value
  std::vector<std::pair<std::size_t, Origin>> addresses;  // in `content`, each with its byte offset
};

// Memory that a call allocates: an output, or a workspace that lives until the last step has been
// enqueued (torch's allocator gives its bytes to later work of the same stream only).
struct Memory {
  bool present;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  c10::TensorOptions options;
};

// A tensor of a product: its source, sizes and strides.
struct Operand {
  Origin origin;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
};

// A product of PyTorch's own library. It follows torch's settings (TF32, deterministic) in every
// call, as in eager PyTorch.
struct Product {
  enum class Kind : uint8_t { none, mm, addmm, relu, gelu };  // the last two _addmm_activation's
  Kind kind = Kind::none;
  std::vector<Operand> operands;  // the result, then the library's operands
};

// A launch, a product, or, with neither, the filling of one memory with zeros.
struct Step {
  Launch launch;
  std::vector<Parameter> parameters;
  Product product;
  bool release_gil = false;
  uint8_t zeroed = 0;
};

struct Plan {
  std::vector<Step> steps;
  std::vector<Memory> memory;  // the outputs, then the workspaces
  std::size_t outputs = 0;
  int device_index = -1;  // of CUDA
  bool is_tuple = false;
};

using Key = std::vector<int64_t>;
using Words = std::span<const int64_t>;

struct Hash {
  using is_transparent = void;
  std::size_t operator()(Words words) const {
    uint64_t hash = words.size();
    for (int64_t word : words) {
      hash = (hash ^ static_cast<uint64_t>(word)) * 0x9E3779B97F4A7C15u;
      hash ^= hash >> 29;
    }
    return hash;
  }
};

struct Equal {
  using is_transparent = void;
  bool operator()(Words left, Words right) const {
    return left.size() == right.size() &&
           std::memcmp(left.data(), right.data(), left.size_bytes()) == 0;
  }
};

template <typename Value>
using Table = std::unordered_map<Key, Value, Hash, Equal>;

// The knowledge of one key: one plan for all values of the floats, one plan per value, or that
// there can be none.
struct Entry {
  bool rejected = false;
  std::shared_ptr<const Plan> plan;
  Table<std::shared_ptr<const Plan>> by_value;
};

struct Operator {
  std::string name;
  uint64_t float_arguments = 0;  // arguments once seen as floats: an int there means its float
  Table<Entry> entries;
  // Calls that were checked and run the reference. The key has the floats' values and the tensors
  // that need a gradient.
  std::unordered_set<Key, Hash, Equal> by_reference;
  PyObject* reference = nullptr;
  // Calls that need a gradient and may use a plan. An operator may choose the reference for those,
  // and an implementation if no gradient is needed.
  std::unordered_set<Key, Hash, Equal> differentiable;

  bool is_empty() const { return entries.empty() && by_reference.empty(); }
  void forget() { entries.clear(), by_reference.clear(), differentiable.clear(); }
};

std::vector<std::unique_ptr<Operator>> operators;

// ---------------------------------------------------------------------------- keys

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
  bool needs_gradient() const { return requires_grad_ != 0 && c10::GradMode::is_enabled(); }

  // The words of `by_reference`; none where they are too many. No other words come after them.
  Words with_values() {
    push(needs_gradient() ? static_cast<int64_t>(requires_grad_) : 0);
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
    if (impl->requires_grad()) requires_grad_ |= uint64_t{1} << address_count_;
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
    if (float_count_ < max_parameters) floats_[float_count_++] = std::bit_cast<int64_t>(value);
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
  int64_t floats_[max_parameters];
  std::size_t float_count_ = 0;
  uintptr_t addresses_[max_tensors];
  std::size_t address_count_ = 0;
  std::optional<c10::Device> device_;
  uint64_t requires_grad_ = 0;  // a bit per tensor
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

// ---------------------------------------------------------------------------- running a plan

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

uint64_t float_bits(char code, double value) {
  return code == 'f' ? std::bit_cast<uint32_t>(static_cast<float>(value))
                     : std::bit_cast<uint64_t>(value);
}

double as_double(PyObject* number) {
  return PyFloat_Check(number) ? PyFloat_AS_DOUBLE(number) : PyLong_AsDouble(number);
}

using Tensors = c10::SmallVector<at::Tensor, 8>;

uint64_t value_of(const Origin& origin, char code, const Plan& plan, PyObject* args,
                  const Tensors& memory) {
  if (origin.source == Origin::Source::constant) return origin.bits;
  if (origin.source == Origin::Source::memory) {
    return reinterpret_cast<uintptr_t>(memory[origin.index].mutable_data_ptr()) + origin.bits;
  }
  PyObject* arg = PyTuple_GET_ITEM(args, origin.index);
  if (code == 'f' || code == 'd') return float_bits(code, as_double(arg));
  const auto item = static_cast<Py_ssize_t>(origin.bits);
  const at::Tensor& tensor = tensor_of(item < 0 ? arg : PyTuple_GET_ITEM(arg, item));
  // For in-place operators: mutable_data_ptr gives a lazily cloned tensor memory of its own first.
  return reinterpret_cast<uintptr_t>(plan.outputs == 0 ? tensor.mutable_data_ptr()
                                                       : tensor.const_data_ptr());
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
  PyObject* arg = in_memory ? nullptr : PyTuple_GET_ITEM(args, origin.index);
  const auto item = static_cast<Py_ssize_t>(origin.bits);
  const at::Tensor& base = in_memory ? memory[origin.index]
                                     : tensor_of(item < 0 ? arg : PyTuple_GET_ITEM(arg, item));
  const int64_t offset = in_memory ? static_cast<int64_t>(origin.bits / base.element_size()) : 0;
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
      if (step.product.kind != Product::Kind::none) {
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

// ---------------------------------------------------------------------------- Python functions

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

// keep(id, implementation, args, steps, memory, outputs, is_tuple, by_value)
//   steps: [(launch, parameters, bytes touched), a product as for `read_product`, or the index of the
//     memory to fill with zeros]
//     launch: (cuda, function, device index, grid, block, shared bytes)
//     parameters: [(code, source, index, constant)]. Source 0 is a constant; 1 an argument, whose
//     item is the constant, -1 for itself; 2 a memory, with the constant as byte offset. A tensor
//     map's layout follows. A struct's bytes are the constant, and the addresses in it follow:
//     [(byte, (source, index, constant))]
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
  if (count != 3 || !PyTuple_Check(args[0]) || !PyUnicode_Check(args[1]) || !PyList_Check(args[2])) {
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

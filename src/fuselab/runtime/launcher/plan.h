// A launch plan as data, and what is known of every operator's calls.

#pragma once

#include <Python.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <c10/core/TensorOptions.h>

#include "launch.h"

namespace {

constexpr std::size_t max_parameters = 2048;  // of a launch: those of 128 tensors of lists
constexpr std::size_t max_maps = 8;         // tensor maps of a launch
constexpr std::size_t max_memory = 255;     // outputs and workspaces of a plan
constexpr std::size_t max_plans = 4096;     // per operator; then all are dropped
constexpr std::size_t max_values = 64;      // per key whose plan depends on a float's value

// The source of a value.
struct Origin {
  enum class Source : uint8_t { constant, argument, memory };
  Source source = Source::constant;
  uint8_t index = 0;  // of the argument or of the memory
  int16_t item = -1;  // of the argument; -1: itself
  uint64_t bits = 0;  // a constant's, or the byte offset from the argument or into the memory
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
  bool present;  // not where an output is not needed, or a call makes it
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

// An argument of a call: a constant, a tensor, or several of either.
struct Given {
  PyObject* constant = nullptr;  // which Call::constants owns
  Operand tensor;
  std::vector<Given> items;
  bool is_items = false;
};

// A call of a PyTorch operator, as an implementation made it. Whoever destroys one has the GIL, or
// Python has ended.
struct Call {
  PyObject* function = nullptr;
  PyObject* keywords = nullptr;   // constants alone
  PyObject* constants = nullptr;  // a list that owns those of `given`
  std::vector<Given> given;
  std::vector<int> results;  // the memory that each result becomes, -1 for none

  Call() = default;
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  ~Call() {
    if (Py_IsInitialized() == 0) return;
    Py_XDECREF(function);
    Py_XDECREF(keywords);
    Py_XDECREF(constants);
  }
};

// A launch, a product, a call, or, with none of them, the filling of one memory with zeros.
struct Step {
  Launch launch;
  std::vector<Parameter> parameters;
  Product product;
  std::shared_ptr<Call> call;
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

}  // namespace

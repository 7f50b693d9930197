// fuselab's kernels of act(input + scale * update + bias) behind plain functions: this is the one
// header that the framework's side (extension.cpp) and the kernels' side (cpu_launches.cpp,
// cuda_launches.cu) share.
#pragma once

#include <cstdint>
#include <string>

namespace fuselab_extension {

enum class Dtype { float32, float16, bfloat16, float64 };
enum class Activation { identity, relu, leaky_relu, gelu, gelu_tanh, silu, sigmoid, tanh };

// What the backward needs beside the upstream gradient: nothing, the output, or the operands.
enum class Needs { nothing, output, operands };

inline Needs needs_of(Activation activation) {
  switch (activation) {
    case Activation::identity:
      return Needs::nothing;
    case Activation::gelu:
    case Activation::gelu_tanh:
    case Activation::silu:
      return Needs::operands;
    default:
      return Needs::output;
  }
}

// Contiguous (rows, columns) tensors of one dtype; bias is (columns,). In the backward `first` is
// the output or the input, whichever is needed; grad_input and grad_update are written.
struct Call {
  Dtype dtype;
  Activation activation;
  int64_t rows, columns;
  double scale;
  const void* first;
  const void* update;
  const void* bias;
  const void* grad;
  void* output;
  void* grad_input;
  void* grad_update;
};

void forward_cpu(const Call& call);
void backward_cpu(const Call& call);

// On `stream` of the current device; they return the launch's error in words, empty if none.
std::string forward_cuda(const Call& call, void* stream);
std::string backward_cuda(const Call& call, void* stream);

// Calls body(Functor{}), an activation's functor of fuselab's activations.h.
#define FUSELAB_WITH_ACTIVATION(activation, body)       \
  switch (activation) {                                 \
    case Activation::identity:                          \
      return body(::Identity{});                        \
    case Activation::relu:                              \
      return body(::Relu{});                            \
    case Activation::leaky_relu:                        \
      return body(::LeakyRelu{});                       \
    case Activation::gelu:                              \
      return body(::Gelu{});                            \
    case Activation::gelu_tanh:                         \
      return body(::GeluTanh{});                        \
    case Activation::silu:                              \
      return body(::Silu{});                            \
    case Activation::sigmoid:                           \
      return body(::Sigmoid{});                         \
    case Activation::tanh:                              \
      return body(::Tanh{});                            \
  }

}  // namespace fuselab_extension

// Kernels of own_cuda_op.py: silu(gate) * up and its gradients.
//
// A thread owns one element of the contiguous tensors; every byte is read and written once. Free of
// framework headers: NVRTC compiles this file as it is.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

// 16-bit types are computed in float; float and double in themselves.
template <typename T>
struct WideOf {
  using type = float;
};
template <>
struct WideOf<double> {
  using type = double;
};

__device__ float exponential(float x) { return expf(x); }
__device__ double exponential(double x) { return exp(x); }

template <typename T>
__global__ void forward(const T* gate, const T* up, T* output, int64_t numel) {
  using Wide = typename WideOf<T>::type;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= numel) return;
  const Wide x = static_cast<Wide>(gate[index]);
  const Wide silu = x / (Wide(1) + exponential(-x));
  output[index] = static_cast<T>(silu * static_cast<Wide>(up[index]));
}

// Either gradient may be absent (a null pointer) where nobody asked for it.
template <typename T>
__global__ void backward(const T* grad_output, const T* gate, const T* up, T* grad_gate,
                         T* grad_up, int64_t numel) {
  using Wide = typename WideOf<T>::type;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= numel) return;
  const Wide grad = static_cast<Wide>(grad_output[index]);
  const Wide x = static_cast<Wide>(gate[index]);
  const Wide sigmoid = Wide(1) / (Wide(1) + exponential(-x));
  if (grad_up != nullptr) grad_up[index] = static_cast<T>(grad * (x * sigmoid));
  if (grad_gate != nullptr) {
    const Wide slope = sigmoid * (Wide(1) + x * (Wide(1) - sigmoid));
    grad_gate[index] = static_cast<T>(grad * static_cast<Wide>(up[index]) * slope);
  }
}

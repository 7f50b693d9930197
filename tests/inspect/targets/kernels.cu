// Three kernels: one that reads a column, one that spills, one that is a template.
__device__ float half_of(float x) {
  return x * 0.5f;
}

extern "C" __global__ void __launch_bounds__(128) halve(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) {
    y[i] = half_of(x[i]);
  }
}

__global__ void column(const float* x, float* y, int rows) {
  __shared__ float tile[32][33];
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  tile[threadIdx.x % 32][threadIdx.x / 32] = x[i * rows];
  __syncthreads();
  y[i] = tile[0][threadIdx.x % 32];
}

template <typename T>
__global__ void __launch_bounds__(1024, 2) spilling(const T* x, T* y) {
  T held[64];
  for (int i = 0; i < 64; ++i) held[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
  for (int i = 0; i < 64; ++i) y[i * 1024 + threadIdx.x] = held[i] * held[63 - i];
}

// act(input + bias) on NVIDIA GPUs: the kernels of add_mul_activation with Terms<false, true>, whose
// update is never read.
#include "../add_mul_activation/cuda_kernels.cu"

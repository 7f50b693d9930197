// act(input + bias) on the CPU: the kernels of add_mul_activation with Terms<false, true>, whose
// update is never read.
#include "../add_mul_activation/cpu_kernels.cpp"

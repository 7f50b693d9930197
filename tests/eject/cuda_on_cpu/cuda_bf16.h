// Stands in for CUDA's header of this name where g++ compiles a kernel.
#include "cuda_on_cpu.h"

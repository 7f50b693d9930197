// A device assert that is always on. NVRTC has no assert.h, but knows the function that assert()
// calls.
#pragma once

// Prints the message and ends the context, as PyTorch's kernels do. It is not inlined, because the
// call would cost every caller registers.
static __device__ __noinline__ void fail(const char* message) {
  __assertfail(message, "a kernel of fuselab", 0, "fail", 1);
}

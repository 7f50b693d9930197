// A device assert that is always on: NVRTC has no assert.h, but knows what assert() calls.
#pragma once

// Prints the message and ends the context, as PyTorch's kernels do. Out of line: the call would
// cost every caller registers.
static __device__ __noinline__ void fail(const char* message) {
  __assertfail(message, "a kernel of fuselab", 0, "fail", 1);
}

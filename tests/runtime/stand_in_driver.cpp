// A stand-in for libcuda.so.1 that prints its calls: what a launch packs, checked without a GPU.
#include <cstdint>
#include <cstdio>

static void* current = nullptr;

static int number(void* handle) { return static_cast<int>(reinterpret_cast<intptr_t>(handle)); }

extern "C" {

int cuInit(unsigned) { return 0; }

int cuGetErrorName(int, const char** name) {
  *name = "CUDA_ERROR_STAND_IN";
  return 0;
}

int cuGetErrorString(int, const char** text) {
  *text = "said no";
  return 0;
}

int cuDeviceGet(int* device, int index) {
  *device = index;
  return 0;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = reinterpret_cast<void*>(static_cast<intptr_t>(100 + device));
  return 0;
}

int cuCtxGetCurrent(void** context) {
  *context = current;
  return 0;
}

int cuCtxPushCurrent_v2(void* context) {
  current = context;
  std::printf("push %d\n", number(context));
  return 0;
}

int cuCtxPopCurrent_v2(void** context) {
  *context = current;
  current = nullptr;
  std::printf("pop\n");
  return 0;
}

int cuThreadExchangeStreamCaptureMode(int* mode) {
  *mode = 0;
  return 0;
}

int cuModuleLoadData(void** module, const char* image) {
  *module = reinterpret_cast<void*>(7);
  return image[0] == 0x7f ? 0 : 1;
}

int cuModuleGetFunction(void** function, void*, const char* name) {
  std::printf("function %s\n", name);
  *function = reinterpret_cast<void*>(9);
  return 0;
}

int cuFuncSetAttribute(void*, int attribute, int value) {
  std::printf("attribute %d %d\n", attribute, value);
  return value > 232448;  // what a block of an H200 can have
}

int cuMemsetD8Async(unsigned long long pointer, unsigned char value, unsigned long bytes, void* stream) {
  std::printf("set %#llx %d %lu on %d\n", pointer, value, bytes, number(stream));
  std::fflush(stdout);
  return bytes == 999;
}

// A kernel of the parameters (pointer, i64, f32, i32, f64, pointer). A block of 999 threads fails.
int cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                   void* stream, void** parameters, void**) {
  std::printf("launch %d (%u %u %u) (%u %u %u) %u on %d: %p %lld %g %d %g %p\n", number(function),
              grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, number(stream),
              *static_cast<void**>(parameters[0]), *static_cast<long long*>(parameters[1]),
              *static_cast<float*>(parameters[2]), *static_cast<int*>(parameters[3]),
              *static_cast<double*>(parameters[4]), *static_cast<void**>(parameters[5]));
  std::fflush(stdout);
  return block_x == 999 ? 1 : 0;
}

}  // extern "C"

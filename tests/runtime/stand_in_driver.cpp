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

// A map is its address, sizes, bytes from row to row and box. A matrix of 99 rows fails.
int cuTensorMapEncodeTiled(void* map, int dtype, unsigned rank, void* address,
                           const uint64_t* sizes, const uint64_t* strides, const unsigned* box,
                           const unsigned* steps, int interleave, int swizzle, int promotion,
                           int fill) {
  std::printf("map %d %u %d%d%d%d %u%u\n", dtype, rank, interleave, swizzle, promotion, fill,
              steps[0], steps[1]);
  std::fflush(stdout);
  const uint64_t words[16] = {reinterpret_cast<uint64_t>(address), sizes[0], sizes[1], strides[0],
                              box[0], box[1], 0, 0, 0, 0, 0, 0, 0, 0, 0, 77};
  __builtin_memcpy(map, words, sizeof(words));
  return sizes[1] == 99;
}

// A kernel of two maps and a struct of two addresses and two numbers.
static void print_maps(void** parameters) {
  for (int place = 0; place < 2; ++place) {
    const auto* words = static_cast<const uint64_t*>(parameters[place]);
    std::printf("launch with %#lx %lu %lu %lu %lu %lu, %lu at %lu\n", words[0], words[1], words[2],
                words[3], words[4], words[5], words[15],
                reinterpret_cast<uintptr_t>(parameters[place]) % 64);
  }
  const auto* words = static_cast<const int64_t*>(parameters[2]);
  std::printf("launch with %#lx %#lx %ld %ld\n", words[0], words[1], words[2], words[3]);
  std::fflush(stdout);
}

// A kernel of the parameters (pointer, i64, f32, i32, f64, pointer), of 384 threads that of
// maps. A block of 999 threads fails.
int cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                   void* stream, void** parameters, void**) {
  if (block_x == 384) {
    print_maps(parameters);
    return 0;
  }
  std::printf("launch %d (%u %u %u) (%u %u %u) %u on %d: %p %lld %g %d %g %p\n", number(function),
              grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, number(stream),
              *static_cast<void**>(parameters[0]), *static_cast<long long*>(parameters[1]),
              *static_cast<float*>(parameters[2]), *static_cast<int*>(parameters[3]),
              *static_cast<double*>(parameters[4]), *static_cast<void**>(parameters[5]));
  std::fflush(stdout);
  return block_x == 999 ? 1 : 0;
}

}  // extern "C"

// The CUDA driver's functions, from libcuda.so.1 by dlsym, and the device guard of a launch.

#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include <c10/util/Exception.h>

namespace {

struct Driver {
  using Context = void*;
  int (*get_context)(Context*);
  int (*push_context)(Context);
  int (*pop_context)(Context*);
  int (*get_device)(int*, int);
  int (*retain_primary)(Context*, int);
  int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*,
                void**, void**);
  int (*set_bytes)(unsigned long long, unsigned char, std::size_t, void*);
  // cuTensorMapEncodeTiled; null in drivers older than 12.0.
  int (*encode_map)(void*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*,
                    const uint32_t*, int, int, int, int);
  std::vector<Context> primary;

  static Driver& instance() {
    static Driver driver;
    return driver;
  }

  Context primary_context(int device_index) {
    if (static_cast<std::size_t>(device_index) >= primary.size()) {
      primary.resize(device_index + 1, nullptr);
    }
    if (primary[device_index] == nullptr) {
      int device = 0;
      int status = get_device(&device, device_index);
      if (status == 0) status = retain_primary(&primary[device_index], device);
      TORCH_CHECK(status == 0, "CUDA device ", device_index, " cannot be used (CUresult ", status,
                  ")");
    }
    return primary[device_index];
  }

 private:
  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    TORCH_CHECK(library != nullptr, "libcuda.so.1 was not found; install the NVIDIA driver");
    auto load = [&](auto& symbol, const char* name) {
      symbol = reinterpret_cast<std::remove_reference_t<decltype(symbol)>>(dlsym(library, name));
      TORCH_CHECK(symbol != nullptr, "libcuda.so.1 has no ", name);
    };
    load(get_context, "cuCtxGetCurrent");
    load(push_context, "cuCtxPushCurrent_v2");
    load(pop_context, "cuCtxPopCurrent_v2");
    load(get_device, "cuDeviceGet");
    load(retain_primary, "cuDevicePrimaryCtxRetain");
    load(launch, "cuLaunchKernel");
    load(set_bytes, "cuMemsetD8Async");
    encode_map =
        reinterpret_cast<decltype(encode_map)>(dlsym(library, "cuTensorMapEncodeTiled"));
  }
};

// Makes a device's primary context current for one launch. It is the device guard, and takes 30 ns
// if the context is current already (cudaSetDevice takes ten times that).
class ContextGuard {
 public:
  explicit ContextGuard(int device_index) : driver_(Driver::instance()) {
    Driver::Context wanted = driver_.primary_context(device_index);
    Driver::Context current = nullptr;
    driver_.get_context(&current);
    if (current != wanted) pushed_ = driver_.push_context(wanted) == 0;
  }
  ~ContextGuard() {
    Driver::Context popped = nullptr;
    if (pushed_) driver_.pop_context(&popped);
  }

 private:
  Driver& driver_;
  bool pushed_ = false;
};

}  // namespace

// Hopper's asynchronous instructions (sm_90a): mbarriers, the copy engine (TMA), clusters,
// warpgroup matrix instructions, and the ring of shared memory between the threads that fill it and
// those that multiply.
//
// PTX ISA 8.0: "Asynchronous Warpgroup Level Matrix Instructions" (fragments, matrix descriptors),
// "cp.async.bulk.tensor", "mbarrier".
#pragma once

#include "cuda_vectors.h"

// CUtensorMap, which the driver's cuTensorMapEncodeTiled fills.
struct alignas(64) TensorMap {
  uint64_t words[16];
};

FUSELAB_INLINE uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// mbarriers. A wait for `parity` returns when the phase with that parity is over.

FUSELAB_INLINE void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

FUSELAB_INLINE void expect_bytes(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

FUSELAB_INLINE bool is_over(uint32_t barrier, uint32_t parity) {
  uint32_t over;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.b32 %0, 1, 0, p;\n}"
      : "=r"(over)
      : "r"(barrier), "r"(parity)
      : "memory");
  return over;
}

FUSELAB_INLINE uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// A wait of 10 seconds means a fault that would otherwise hang forever; it becomes a launch error.
FUSELAB_INLINE void wait(uint32_t barrier, uint32_t parity) {
  if (is_over(barrier, parity)) return;
  const uint64_t begin = nanoseconds();
  while (!is_over(barrier, parity)) {
    if (nanoseconds() - begin > 10'000'000'000ull) __trap();
  }
}

// Arrives at the barrier with the same address in block `rank` of the cluster. It publishes no
// ordinary writes, so it needs no release in the cluster's scope, which SASS implements as a fence
// of the whole GPU.
template <int cluster>
FUSELAB_INLINE void arrive(uint32_t barrier, uint32_t rank) {
  if constexpr (cluster == 1) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
  } else {
    asm volatile(
        "{\n.reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
        "r"(rank)
        : "memory");
  }
}

FUSELAB_INLINE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

FUSELAB_INLINE uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Synchronises the threads of one warp group; barrier 0 is __syncthreads.
FUSELAB_INLINE void group_sync(int group) {
  asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}

// The copy engine. Copies the box whose first element is (row, column) into shared memory.
FUSELAB_INLINE void copy_in(uint32_t to, const TensorMap& map, int column, int row,
                            uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// Copies the box to the same address in all blocks of the cluster, and signals the barrier of each.
template <int cluster>
FUSELAB_INLINE void copy_in_all(uint32_t to, const TensorMap& map, int column, int row,
                                uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(uint16_t((1 << cluster) - 1))
      : "memory");
}

// The matrix unit. A descriptor of rows of 128 bytes with 128-byte swizzle has the address / 16 in
// bits 0 to 13, the leading offset (unused by this layout: 1) in 16 to 29, the distance between
// groups of 8 rows, 1024 / 16, in 32 to 45, and the swizzle, 1, in 62 and 63. A step of 16 in depth
// adds 32 bytes.
FUSELAB_INLINE uint64_t descriptor(uint32_t address) {
  return uint64_t(address >> 4 & 0x3fff) | uint64_t(1) << 16 | uint64_t(64) << 32 |
         uint64_t(1) << 62;
}

// The descriptor of a matrix stored as (depth, columns), in boxes of 64 deep x 64 columns side by
// side. The leading offset is the distance between boxes, and a step of 16 in depth adds 2048
// bytes.
constexpr int box_bytes = 64 * 64 * 2;
FUSELAB_INLINE uint64_t across_descriptor(uint32_t address) {
  return uint64_t(address >> 4 & 0x3fff) | uint64_t(box_bytes >> 4) << 16 | uint64_t(64) << 32 |
         uint64_t(1) << 62;
}

FUSELAB_INLINE void multiply_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
FUSELAB_INLINE void multiply_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int pending>
FUSELAB_INLINE void multiply_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Keeps the compiler from moving accesses to the accumulators across this point.
template <int count>
FUSELAB_INLINE void hold(float (&sum)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(sum[i])::"memory");
}

#define FUSELAB_SUMS_8(at)                                                                    \
  "+f"(sum[at]), "+f"(sum[at + 1]), "+f"(sum[at + 2]), "+f"(sum[at + 3]), "+f"(sum[at + 4]), \
      "+f"(sum[at + 5]), "+f"(sum[at + 6]), "+f"(sum[at + 7])
#define FUSELAB_SUMS_32(at) \
  FUSELAB_SUMS_8(at), FUSELAB_SUMS_8(at + 8), FUSELAB_SUMS_8(at + 16), FUSELAB_SUMS_8(at + 24)
#define FUSELAB_NAMES_32                                                                     \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "    \
  "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FUSELAB_NAMES_64                                                                     \
  FUSELAB_NAMES_32                                                                           \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, "  \
  "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FUSELAB_NAMES_128                                                                    \
  FUSELAB_NAMES_64                                                                           \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, "  \
  "%81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, "    \
  "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, " \
  "%113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// The slots of the ring in turn; `parity` is that of the phase to wait for.
template <int stages>
struct Slot {
  int at = 0;
  uint32_t parity = 0;
  FUSELAB_INLINE void next() {
    if (++at == stages) {
      at = 0;
      parity ^= 1;
    }
  }
};

// Instructions of a warp for which CUDA C++ has no function (PTX ISA 9.7, sm_80 and newer):
// asynchronous copies, products of 16-bit matrices, the transposition of an 8 x 8 matrix.
#pragma once

#include "cuda_vectors.h"

// Copies kBytes (4, 8 or 16) from global to shared memory; both addresses are multiples of kBytes.
template <int kBytes>
FUSELAB_INLINE void copy_async(void* to, const void* from) {
  const auto place = static_cast<unsigned>(__cvta_generic_to_shared(to));
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(place), "l"(from), "n"(kBytes)
                 : "memory");
  }
}

// Waits for the thread's own copies; a barrier must follow before other threads read them.
FUSELAB_INLINE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Computes total += a b for a 16 x 16 and b 16 x 8. With g = lane / 4 and q = 2 (lane % 4), a lane
// has the elements (g, q) (g + 8, q) (g, q + 8) (g + 8, q + 8) of a and (q, g) (q + 8, g) of b,
// each with its right or lower neighbour in the high half; of total it has (g, q) (g, q + 1) (g +
// 8, q) (g + 8, q + 1).
FUSELAB_INLINE void multiply_add(__half, float (&total)[4], const unsigned (&a)[4], unsigned b0,
                                 unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(total[0]), "+f"(total[1]), "+f"(total[2]), "+f"(total[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
FUSELAB_INLINE void multiply_add(__nv_bfloat16, float (&total)[4], const unsigned (&a)[4],
                                 unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(total[0]), "+f"(total[1]), "+f"(total[2]), "+f"(total[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Transposes an 8 x 8 matrix of 16-bit elements, of which a lane has (g, q) and (g, q + 1).
FUSELAB_INLINE unsigned transposed(unsigned pair) {
  unsigned result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

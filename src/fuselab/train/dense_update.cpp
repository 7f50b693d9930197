// An optimizer's step on up to kTensors tensors: blocks of kBlock elements, shared out among
// threads.

#include "dense_update.h"

template <class Grad, Update update>
void update_all(const float* rate, const float* count, int32_t tensors, int64_t blocks, Dense all) {
  const Rates now = rates<update>(*rate, *count);
#pragma omp parallel for if (blocks > 16)
  for (int64_t block = 0; block < blocks; ++block) {
    const int tensor = tensor_of(all, tensors, block);
    const int64_t begin = (block - all.first_block[tensor]) * kBlock;
    const int64_t left = all.numel[tensor] - begin;
    const int64_t end = begin + (left < kBlock ? left : kBlock);
    for (int64_t at = begin; at < end; ++at) {
      update_some<Grad, update, 1>(all, tensor, at, now);
    }
  }
}

// The dot interaction and its gradient, in CUDA C++.
//
// Tiling: a block of 256 threads owns kSamples samples, 256 / kSamples threads each (one warp for
// DLRM's 27 vectors of 16). A sample's vectors Z are read once from memory into shared memory, in
// the arithmetic type. Products are computed in registers, a 4 x 4 tile per thread: 27 vectors are
// 7 blocks of 4, whose 28 tiles on and below the diagonal take a warp one round. Forward: the tiles
// are gathered in shared memory as packed rows. As the rows of a block's samples are contiguous in
// memory, they are stored in 16-byte words whatever the width of a row. Backward: the packed
// upstream gradient is read once into a symmetric matrix S, and S Z is written once.
//
// Shared memory and barriers are the limit: per sample of 27 x 16 float32 on an H200, memory needs
// 177 and 273 cycles of a multiprocessor (forward, backward), but the kernels take 375 and 636.
// warp_kernels.cu needs less shared memory.
//
// Strides count elements and may be 0; a row's elements are contiguous. `output`, `grad_dense` and
// `grad_embeddings` are contiguous.

#include "../_shared/cuda_vectors.h"
#include "cuda_samples.h"

namespace {

constexpr int kThreads = 256;
constexpr int kBlock = 4;  // vectors and elements of a register tile

template <class Element>
struct ArithmeticOf {
  using type = float;
};
template <>
struct ArithmeticOf<double> {
  using type = double;
};
template <class Element>
using Arithmetic = typename ArithmeticOf<Element>::type;

template <class Real>
struct alignas(16) Four {
  Real element[4];
};

// Loads elements 4 chunk to 4 chunk + 3 of a row, 0 past its end. kAligned: rows are whole chunks
// that are loaded in one instruction (two for double).
template <bool kAligned, int kWidth, class Element>
__device__ Pack<Element, 4> load_chunk(const Element* row, int chunk) {
  if constexpr (kAligned) {
    return load<true, 4>(row + 4 * chunk);
  } else {
    Pack<Element, 4> pack;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = 4 * chunk + i;
      if (column < kWidth) {
        pack.element[i] = row[column];
      } else {
        assign(pack.element[i], 0.0f);
      }
    }
    return pack;
  }
}

template <class Element>
__device__ Four<Arithmetic<Element>> widened_chunk(const Pack<Element, 4>& pack) {
  Four<Arithmetic<Element>> four;
#pragma unroll
  for (int i = 0; i < 4; ++i) four.element[i] = widened<Arithmetic<Element>>(pack.element[i]);
  return four;
}

}  // namespace

// Shared memory: kSamples x (chunks of Z, [kChunks][4][kBlocks]), then the packed output rows.
// Vector v lies at [v % 4][v / 4]: the lanes of a warp read neighbouring words of every chunk.
template <class Element, int kVectors, int kWidth, int kSamples, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    forward(const Element* __restrict__ dense, const Element* __restrict__ embeddings,
            Element* __restrict__ output, int64_t batch, int64_t dense_stride,
            int64_t batch_stride, int64_t vector_stride, int columns) {
  using Real = Arithmetic<Element>;
  constexpr int kBlocks = divided_up(kVectors, kBlock), kChunks = divided_up(kWidth, kBlock);
  constexpr int kTiles = kBlocks * (kBlocks + 1) / 2;
  constexpr int kPlaces = kBlocks * kBlock;
  constexpr int kLanes = kThreads / kSamples;
  constexpr int kUnrolled = kChunks < 4 ? kChunks : 4;
  extern __shared__ uint4 memory[];
  auto* vectors = reinterpret_cast<Four<Real>*>(memory);
  auto* rows = reinterpret_cast<Element*>(vectors + kSamples * kChunks * kPlaces);

  const int place = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kSamples, sample = first + place;
  vectors += place * kChunks * kPlaces;
  Element* row = rows + place * columns;
  if (sample < batch) {
#pragma unroll
    for (int item = lane; item < kVectors * kChunks; item += kLanes) {
      const int vector = item / kChunks, chunk = item % kChunks;
      const Pack<Element, 4> pack =
          load_chunk<kAligned, kWidth>(row_of(vector, sample, dense, embeddings, dense_stride,
                                              batch_stride, vector_stride),
                                       chunk);
      vectors[chunk * kPlaces + (vector % kBlock) * kBlocks + vector / kBlock] =
          widened_chunk(pack);
      if (vector == 0) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (4 * chunk + i < kWidth) row[4 * chunk + i] = pack.element[i];
        }
      }
    }
    for (int column = kWidth + pairs_before(kVectors) + lane; column < columns; column += kLanes)
      assign(row[column], 0.0f);
  }
  __syncthreads();
  if (sample < batch) {
    for (int tile = lane; tile < kTiles; tile += kLanes) {
      // tile = upper (upper + 1) / 2 + lower, exact for the fewer than 2^20 tiles there are.
      const int upper = static_cast<int>((sqrtf(8.0f * tile + 1.0f) - 1.0f) * 0.5f);
      const int lower = tile - upper * (upper + 1) / 2;
      Real total[kBlock][kBlock] = {};
#pragma unroll kUnrolled
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        Four<Real> a[kBlock], b[kBlock];
#pragma unroll
        for (int i = 0; i < kBlock; ++i) {
          a[i] = vectors[chunk * kPlaces + i * kBlocks + upper];
          b[i] = vectors[chunk * kPlaces + i * kBlocks + lower];
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
#pragma unroll
          for (int i = 0; i < kBlock; ++i) {
#pragma unroll
            for (int j = 0; j < kBlock; ++j)
              total[i][j] += a[i].element[k] * b[j].element[k];
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kBlock; ++i) {
        const int vector = upper * kBlock + i;
        Element* pairs = row + kWidth + pairs_before(vector);
#pragma unroll
        for (int j = 0; j < kBlock; ++j) {
          const int other = lower * kBlock + j;
          if (vector < kVectors && other < vector) assign(pairs[other], total[i][j]);
        }
      }
    }
  }
  __syncthreads();
  const int64_t left = batch - first;
  const int count = static_cast<int>(left < kSamples ? left : kSamples) * columns;
  Element* to = output + first * columns;
  constexpr int kWord = 16 / sizeof(Element);
  int done = 0;
  if (kSamples * columns % kWord == 0) {  // every block begins on 16 bytes
    for (int word = threadIdx.x; word < count / kWord; word += kThreads)
      reinterpret_cast<uint4*>(to)[word] = reinterpret_cast<const uint4*>(rows)[word];
    done = count / kWord * kWord;
  }
  for (int i = done + threadIdx.x; i < count; i += kThreads) to[i] = rows[i];
}

// Shared memory: kSamples x (Z, [kVectors][kChunks]; S, [kVectors][kBlocks]), in chunks of 4.
// grad_dense or grad_embeddings is null if it is not needed.
template <class Element, int kVectors, int kWidth, int kSamples, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    backward(const Element* __restrict__ grad_output, const Element* __restrict__ dense,
             const Element* __restrict__ embeddings, Element* __restrict__ grad_dense,
             Element* __restrict__ grad_embeddings, int64_t batch, int64_t grad_stride,
             int64_t dense_stride, int64_t batch_stride, int64_t vector_stride) {
  using Real = Arithmetic<Element>;
  constexpr int kBlocks = divided_up(kVectors, kBlock), kChunks = divided_up(kWidth, kBlock);
  constexpr int kLanes = kThreads / kSamples;
  extern __shared__ uint4 memory[];
  const int place = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  auto* vectors = reinterpret_cast<Four<Real>*>(memory) + place * kVectors * (kChunks + kBlocks);
  auto* symmetric = vectors + kVectors * kChunks;
  auto* weights = reinterpret_cast<Real*>(symmetric);  // S, a row every 4 kBlocks numbers

  const int64_t sample = static_cast<int64_t>(blockIdx.x) * kSamples + place;
  const Element* grad = grad_output + sample * grad_stride;
  bool is_odd = false;  // some element is infinite or NaN
  if (sample < batch) {
#pragma unroll
    for (int item = lane; item < kVectors * kChunks; item += kLanes) {
      const Four<Real> four = widened_chunk(load_chunk<kAligned, kWidth>(
          row_of(item / kChunks, sample, dense, embeddings, dense_stride, batch_stride,
                 vector_stride),
          item % kChunks));
      vectors[item] = four;
#pragma unroll
      for (int i = 0; i < 4; ++i) is_odd |= !(four.element[i] * Real(0) == Real(0));
    }
    for (int vector = lane; vector < kVectors; vector += kLanes)
      weights[vector * (kBlocks * kBlock + 1)] = Real(0);
#pragma unroll 4
    for (int vector = 1 + lane / 32; vector < kVectors; vector += kLanes / 32) {
      for (int other = lane % 32; other < vector; other += 32) {
        const Real weight = widened<Real>(grad[kWidth + pairs_before(vector) + other]);
        weights[vector * kBlocks * kBlock + other] = weight;
        weights[other * kBlocks * kBlock + vector] = weight;
      }
    }
  }
  const bool any_odd = __syncthreads_or(is_odd);
  if (sample >= batch) return;
  for (int tile = lane; tile < kBlocks * kChunks; tile += kLanes) {
    const int block = tile / kChunks, chunk = tile % kChunks;
    Real total[kBlock][4] = {};
#pragma unroll 4
    for (int vector = 0; vector < kVectors; ++vector) {
      const Four<Real> weight = symmetric[vector * kBlocks + block];
      const Four<Real> value = vectors[vector * kChunks + chunk];
#pragma unroll
      for (int i = 0; i < kBlock; ++i) {
#pragma unroll
        for (int k = 0; k < 4; ++k) total[i][k] += weight.element[i] * value.element[k];
      }
    }
    if (any_odd) {  // as in eager's G Z, whose G has zeros: 0 * infinity is NaN
      for (int vector = 0; vector < kVectors; ++vector) {
        const Four<Real> value = vectors[vector * kChunks + chunk];
#pragma unroll
        for (int i = 0; i < kBlock; ++i) {
#pragma unroll
          for (int k = 0; k < 4; ++k) total[i][k] += Real(0) * value.element[k];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      const int vector = block * kBlock + i;
      if (vector >= kVectors) break;
      if (vector == 0) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (4 * chunk + k < kWidth) total[i][k] += widened<Real>(grad[4 * chunk + k]);
        }
      }
      Element* to = vector == 0 ? grad_dense : grad_embeddings;
      if (to == nullptr) continue;
      to += (vector == 0 ? sample : sample * (kVectors - 1) + vector - 1) * kWidth + 4 * chunk;
      Pack<Element, 4> pack;
#pragma unroll
      for (int k = 0; k < 4; ++k) assign(pack.element[k], total[i][k]);
      if constexpr (kWidth % 4 == 0) {
        store<true, 4>(to, pack);
      } else {
        for (int k = 0; k < 4 && 4 * chunk + k < kWidth; ++k) to[k] = pack.element[k];
      }
    }
  }
}

// The dot interaction of small samples (up to 32 vectors) and its gradient, in CUDA C++, by warps
// that never wait for other warps.
//
// Tiling: a warp owns a few neighbouring samples, as many as make their packed rows whole words of
// up to 16 bytes. Every byte of memory is read once and written once. Rows (forward: the output,
// backward: the upstream gradient) are in the warp's own part of shared memory.
//
// lanes: float32 vectors of 16. A warp has four samples, eight lanes each. Lane l has vectors l, l
// + 8, l + 16 and l + 24 in registers, and multiplies them with every vector, which all eight lanes
// read from shared memory at once. Forward: a vector's products with those before it, so that
// neighbouring lanes compute neighbouring pairs. Backward: the owned vectors' gradients, weighted
// by the pairs, which are read from the packed row. Memory is the limit at 27 vectors on an H200.
//
// matrix: 16-bit vectors of 16, 32, ... A lane reads 8 bytes of every eighth vector, which are its
// share of both operands of a matrix product. (Elements 4 q to 4 q + 3 stand for columns 2 q, 2 q +
// 1, 2 q + 8 and 2 q + 9; a sum over columns does not depend on their order.) Backward: the pairs
// below the diagonal are gathered as blocks of 8 x 8, which together with their transposes make the
// symmetric matrix; vectors are transposed in registers. A sample of 27 x 16 takes 6 and 12 matrix
// products.
//
// Strides count elements and may be 0; rows of `dense` and `embeddings` begin on 4 elements' bytes.
// `output`, `grad_dense` and `grad_embeddings` are contiguous.

#include "cuda_samples.h"
#include "../_shared/warp_instructions.h"

namespace {

constexpr int kWarps = 4;
constexpr int kLaneWidth = 16;   // elements of a vector of `lanes`
constexpr int kLaneSamples = 4;  // samples of a warp there

template <int kBytes>
struct WordOf;
template <>
struct WordOf<16> {
  using type = uint4;
};
template <>
struct WordOf<8> {
  using type = uint2;
};
template <>
struct WordOf<4> {
  using type = unsigned;
};

// The size of a word such that kSamples rows are whole words, whatever the number of columns.
template <class Element, int kSamples>
constexpr int kWordBytes = kSamples * sizeof(Element) < 16 ? kSamples * sizeof(Element) : 16;

template <int kBytes, class Element>
__device__ void write_rows(Element* to, const Element* rows, int count, int lane) {
  using Word = typename WordOf<kBytes>::type;
  constexpr int kEach = kBytes / sizeof(Element);
  const int words = count / kEach;
  for (int word = lane; word < words; word += 32)
    reinterpret_cast<Word*>(to)[word] = reinterpret_cast<const Word*>(rows)[word];
#pragma unroll 1
  for (int i = words * kEach + lane; i < count; i += 32) to[i] = rows[i];
}

// Copies contiguous rows in words; they have arrived after wait_for_copies and a barrier.
template <int kBytes, class Element>
__device__ void read_rows(Element* rows, const Element* from, int samples, int columns,
                          int64_t stride, int lane) {
  constexpr int kEach = kBytes / sizeof(Element);
  if (stride == columns && reinterpret_cast<uintptr_t>(from) % kBytes == 0) {
    const int count = samples * columns, words = count / kEach;
    for (int word = lane; word < words; word += 32)
      copy_async<kBytes>(rows + word * kEach, from + word * kEach);
#pragma unroll 1
    for (int i = words * kEach + lane; i < count; i += 32) rows[i] = from[i];
  } else {
    for (int sample = 0; sample < samples; ++sample) {
      for (int i = lane; i < columns; i += 32) rows[sample * columns + i] = from[sample * stride + i];
    }
  }
}

// The distance from one sample's vectors to the next, in elements: 4 modulo 32, so that a word of
// each of four samples comes from different banks.
template <int kVectors>
constexpr int kPitch = kVectors * kLaneWidth + (36 - kVectors * kLaneWidth % 32) % 32;

// Returns the offset of chunk 0 to 3 of a vector. Two vectors fill all banks once, and eight lanes
// read a chunk of one vector each, so every second vector's chunks are rotated by one.
__device__ __forceinline__ int chunk_place(int vector, int chunk) {
  return vector * kLaneWidth + (chunk + vector / 2) % 4 * 4;
}

// Copies a sample's vectors by eight lanes, a chunk of each of two vectors at a time.
template <int kVectors>
__device__ __forceinline__ void copy_vectors(float* vectors, int eighth, int64_t sample,
                                             const float* dense, const float* embeddings,
                                             int64_t dense_stride, int64_t batch_stride,
                                             int64_t vector_stride) {
#pragma unroll
  for (int two = 0; two < divided_up(kVectors, 2); ++two) {
    const int vector = 2 * two + eighth / 4, chunk = eighth % 4;
    if (vector < kVectors) {
      const float* row =
          row_of(vector, sample, dense, embeddings, dense_stride, batch_stride, vector_stride);
      copy_async<16>(vectors + chunk_place(vector, chunk), row + 4 * chunk);
    }
  }
}

__device__ __forceinline__ void load_vector(float (&value)[kLaneWidth], const float* vectors,
                                            int vector) {
#pragma unroll
  for (int chunk = 0; chunk < 4; ++chunk) {
    const float4 four =
        *reinterpret_cast<const float4*>(vectors + chunk_place(vector, chunk));
    value[4 * chunk] = four.x;
    value[4 * chunk + 1] = four.y;
    value[4 * chunk + 2] = four.z;
    value[4 * chunk + 3] = four.w;
  }
}

__device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }

}  // namespace

// Shared memory, for each warp: kLaneSamples x kPitch numbers, then as many rows. kUnrolled is the
// unrolling of a loop over eight vectors; 8 makes all offsets constants and the code long (24 and
// 45 KB for 27 vectors).
template <int kVectors, int kUnrolled>
__global__ void __launch_bounds__(32 * kWarps, 4)
    forward_lanes(const float* __restrict__ dense, const float* __restrict__ embeddings,
                  float* __restrict__ output, int64_t batch, int64_t dense_stride,
                  int64_t batch_stride, int64_t vector_stride, int columns) {
  constexpr int kOwned = divided_up(kVectors, 8);
  extern __shared__ uint4 memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int quarter = lane / 8, eighth = lane % 8;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kWarps + warp) * kLaneSamples;
  if (first >= batch) return;
  const int here = first + kLaneSamples <= batch ? kLaneSamples : static_cast<int>(batch - first);
  const int64_t sample = first + smaller(quarter, here - 1);  // the last one again past the end
  auto* rows = reinterpret_cast<float*>(memory) + warp * kLaneSamples * (kPitch<kVectors> + columns);
  const float* vectors = rows + quarter * kPitch<kVectors>;
  copy_vectors<kVectors>(rows + quarter * kPitch<kVectors>, eighth, sample, dense, embeddings,
                         dense_stride, batch_stride, vector_stride);
  rows += kLaneSamples * kPitch<kVectors>;
  float* row = rows + quarter * columns;
  float* pairs = row + kLaneWidth;
#pragma unroll 1
  for (int column = pairs_before(kVectors) + eighth; column < columns - kLaneWidth; column += 8)
    pairs[column] = 0.0f;
  wait_for_copies();
  __syncwarp();

  row[eighth] = vectors[eighth];
  row[eighth + 8] = vectors[eighth + 8];
  float own[kOwned][kLaneWidth];
#pragma unroll
  for (int i = 0; i < kOwned; ++i) {
    // A vector past the end is replaced by the last one, and not stored.
    load_vector(own[i], vectors, 8 * i + 7 < kVectors ? 8 * i + eighth
                                                      : smaller(8 * i + eighth, kVectors - 1));
  }
#pragma unroll
  for (int block = 0; block < kOwned; ++block) {
#pragma unroll kUnrolled
    for (int step = 0; step < smaller(8, kVectors - 8 * block); ++step) {
      const int vector = 8 * block + step;
      float value[kLaneWidth];
      load_vector(value, vectors, vector);
      float* to = pairs + pairs_before(vector) + eighth;
#pragma unroll
      for (int i = 0; i <= block; ++i) {
        float total = own[i][0] * value[0];
#pragma unroll
        for (int k = 1; k < kLaneWidth; ++k) total += own[i][k] * value[k];
        if (i < block || eighth < step) to[8 * i] = total;
      }
    }
  }
  __syncwarp();
  write_rows<16>(output + first * columns, rows, here * columns, lane);
}

// Shared memory is that of forward_lanes. grad_dense or grad_embeddings is null if not needed.
template <int kVectors, int kUnrolled>
__global__ void __launch_bounds__(32 * kWarps, 4)
    backward_lanes(const float* __restrict__ grad_output, const float* __restrict__ dense,
                   const float* __restrict__ embeddings, float* __restrict__ grad_dense,
                   float* __restrict__ grad_embeddings, int64_t batch, int64_t grad_stride,
                   int64_t dense_stride, int64_t batch_stride, int64_t vector_stride, int columns) {
  constexpr int kOwned = divided_up(kVectors, 8), kTwos = divided_up(kVectors, 2);
  extern __shared__ uint4 memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int quarter = lane / 8, eighth = lane % 8;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kWarps + warp) * kLaneSamples;
  if (first >= batch) return;
  const int here = first + kLaneSamples <= batch ? kLaneSamples : static_cast<int>(batch - first);
  const int64_t sample = first + smaller(quarter, here - 1);
  auto* rows = reinterpret_cast<float*>(memory) + warp * kLaneSamples * (kPitch<kVectors> + columns);
  float* vectors = rows + quarter * kPitch<kVectors>;
  rows += kLaneSamples * kPitch<kVectors>;
  copy_vectors<kVectors>(vectors, eighth, sample, dense, embeddings, dense_stride, batch_stride,
                         vector_stride);
  read_rows<16>(rows, grad_output + first * grad_stride, here, columns, grad_stride, lane);
  wait_for_copies();
  __syncwarp();

  float zero = 0.0f;  // becomes NaN if an element is infinite or NaN
#pragma unroll
  for (int two = 0; two < kTwos; ++two) {
    const int vector = smaller(2 * two + eighth / 4, kVectors - 1);
    const float4 four =
        *reinterpret_cast<const float4*>(vectors + chunk_place(vector, eighth % 4));
    zero += four.x * 0.0f + four.y * 0.0f + four.z * 0.0f + four.w * 0.0f;
  }
  const bool any_odd = __any_sync(0xffffffffu, !(zero == 0.0f));

  const float* grad = rows + smaller(quarter, here - 1) * columns;
  const float* pairs = grad + kLaneWidth;
  // The pairs of an owned vector with those before it. A vector past the end reads the last one's
  // pairs, shifted by one, because memory can end behind the row.
  const float* below[kOwned];
  float total[kOwned][kLaneWidth] = {};
#pragma unroll
  for (int i = 0; i < kOwned; ++i) {
    const int vector = 8 * i + eighth;
    below[i] = pairs + (vector < kVectors ? pairs_before(vector) : pairs_before(kVectors - 1) - 1);
  }
#pragma unroll
  for (int block = 0; block < kOwned; ++block) {
#pragma unroll kUnrolled
    for (int step = 0; step < smaller(8, kVectors - 8 * block); ++step) {
      const int vector = 8 * block + step;
      float value[kLaneWidth];
      load_vector(value, vectors, vector);
      const float* above = pairs + pairs_before(vector) + eighth;  // its own pairs
#pragma unroll
      for (int i = 0; i < kOwned; ++i) {
        float weight = 0.0f;
        if (i < block) {
          weight = above[8 * i];
        } else if (i > block) {
          weight = below[i][vector];
        } else if (eighth != step) {
          weight = *(eighth < step ? above + 8 * i : below[i] + vector);
        }
#pragma unroll
        for (int k = 0; k < kLaneWidth; ++k) total[i][k] += weight * value[k];
      }
    }
  }
  if (any_odd) {  // as in eager's G Z, whose G has zeros: 0 * infinity is NaN
#pragma unroll 1
    for (int vector = 0; vector < kVectors; ++vector) {
      float value[kLaneWidth];
      load_vector(value, vectors, vector);
#pragma unroll
      for (int i = 0; i < kOwned; ++i) {
#pragma unroll
        for (int k = 0; k < kLaneWidth; ++k) total[i][k] += 0.0f * value[k];
      }
    }
  }
  if (eighth == 0) {
#pragma unroll
    for (int k = 0; k < kLaneWidth; ++k) total[0][k] += grad[k];
  }
  __syncwarp();
  // The gradients replace the vectors in shared memory, and are stored as the vectors were loaded.
#pragma unroll
  for (int i = 0; i < kOwned; ++i) {
    const int vector = 8 * i + eighth;
    if (vector >= kVectors) continue;
#pragma unroll
    for (int chunk = 0; chunk < 4; ++chunk) {
      *reinterpret_cast<float4*>(vectors + chunk_place(vector, chunk)) =
          make_float4(total[i][4 * chunk], total[i][4 * chunk + 1], total[i][4 * chunk + 2],
                      total[i][4 * chunk + 3]);
    }
  }
  __syncwarp();
  if (quarter >= here) return;
#pragma unroll
  for (int two = 0; two < kTwos; ++two) {
    const int vector = 2 * two + eighth / 4, chunk = eighth % 4;
    float* to = vector == 0 ? grad_dense : grad_embeddings;
    if (vector >= kVectors || to == nullptr) continue;
    to += (vector == 0 ? sample : sample * (kVectors - 1) + vector - 1) * kLaneWidth;
    reinterpret_cast<float4*>(to)[chunk] =
        *reinterpret_cast<const float4*>(vectors + chunk_place(vector, chunk));
  }
}

namespace {

// A lane's part of a warp's samples: elements 4 q to 4 q + 3 of every 16 of vectors g, g + 8, ...
template <class Element, int kVectors, int kWidth>
struct Share {
  static constexpr int kBlocks = divided_up(kVectors, 8), kSteps = kWidth / 16;
  const Element* row[kBlocks];  // of the first sample
  int64_t first_stride, stride;
  bool has_last;  // whether the last block has a vector for this lane

  __device__ __forceinline__ Share(int64_t first, int lane, const Element* dense,
                                   const Element* embeddings, int64_t dense_stride,
                                   int64_t batch_stride, int64_t vector_stride)
      : first_stride(lane < 4 ? dense_stride : batch_stride),
        stride(batch_stride),
        has_last(8 * (kBlocks - 1) + lane / 4 < kVectors) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
      row[block] = row_of(8 * block + lane / 4, first, dense, embeddings, dense_stride,
                          batch_stride, vector_stride) +
                   lane % 4 * 4;
  }

  __device__ __forceinline__ void load(uint2 (&value)[kBlocks][kSteps], int sample) const {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const Element* from = row[block] + sample * (block == 0 ? first_stride : stride);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        value[block][step] = block + 1 < kBlocks || has_last
                                 ? __ldg(reinterpret_cast<const uint2*>(from + 16 * step))
                                 : make_uint2(0, 0);
      }
    }
  }
};

// The number of samples whose vectors a lane loads before it needs the first.
template <int kWidth, int kSamples>
constexpr int kAhead = kWidth == 16 && kSamples % 4 == 0 ? 4 : kWidth <= 32 ? 2 : 1;

}  // namespace

// Shared memory, for each warp: kSamples rows.
template <class Element, int kVectors, int kWidth, int kSamples>
__global__ void __launch_bounds__(32 * kWarps)
    forward_matrix(const Element* __restrict__ dense, const Element* __restrict__ embeddings,
                   Element* __restrict__ output, int64_t batch, int64_t dense_stride,
                   int64_t batch_stride, int64_t vector_stride, int columns) {
  constexpr int kBlocks = divided_up(kVectors, 8), kSteps = kWidth / 16;
  constexpr int kOnce = kAhead<kWidth, kSamples>;
  extern __shared__ uint4 memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4 * 2;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kWarps + warp) * kSamples;
  if (first >= batch) return;
  const int here = first + kSamples <= batch ? kSamples : static_cast<int>(batch - first);
  Element* rows = reinterpret_cast<Element*>(memory) + warp * kSamples * columns;
  const Share<Element, kVectors, kWidth> share(first, lane, dense, embeddings, dense_stride,
                                               batch_stride, vector_stride);
  int place[kBlocks];  // of a lane's first pair in every eighth row of pairs
#pragma unroll
  for (int block = 0; block < kBlocks; ++block)
    place[block] = kWidth + pairs_before(8 * block + g) + q;
#pragma unroll 1
  for (int start = 0; start < here; start += kOnce) {
    uint2 values[kOnce][kBlocks][kSteps];
#pragma unroll
    for (int next = 0; next < kOnce; ++next) share.load(values[next], smaller(start + next, here - 1));
#pragma unroll
    for (int next = 0; next < kOnce; ++next) {
      const auto& value = values[next];
      Element* row = rows + (start + next) * columns;
      if (g == 0) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          const auto* four = reinterpret_cast<const Element*>(&value[0][step]);
#pragma unroll
          for (int k = 0; k < 4; ++k) row[16 * step + 2 * q + k] = four[k];
        }
      }
#pragma unroll 1
      for (int column = kWidth + pairs_before(kVectors) + lane; column < columns; column += 32)
        assign(row[column], 0.0f);
#pragma unroll
      for (int upper = 0; upper < kBlocks; upper += 2) {
#pragma unroll
        for (int other = 0; other < smaller(upper + 2, kBlocks); ++other) {
          float total[4] = {};
#pragma unroll
          for (int step = 0; step < kSteps; ++step) {
            const uint2 second = upper + 1 < kBlocks ? value[upper + 1 < kBlocks ? upper + 1 : 0][step]
                                                     : make_uint2(0, 0);
            const unsigned a[4] = {value[upper][step].x, second.x, value[upper][step].y, second.y};
            multiply_add(Element(), total, a, value[other][step].x, value[other][step].y);
          }
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int block = upper + half, vector = 8 * block + g;
            if (block < other || block >= kBlocks) continue;
            Element* to = row + place[block < kBlocks ? block : 0] + 8 * other;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              if (vector < kVectors && (other < block || q + i < g))
                assign(to[i], total[2 * half + i]);
            }
          }
        }
      }
    }
  }
  __syncwarp();
  write_rows<kWordBytes<Element, kSamples>>(output + first * columns, rows, here * columns, lane);
}

// Shared memory is that of forward_matrix. grad_dense or grad_embeddings is null if not needed.
template <class Element, int kVectors, int kWidth, int kSamples>
__global__ void __launch_bounds__(32 * kWarps)
    backward_matrix(const Element* __restrict__ grad_output, const Element* __restrict__ dense,
                    const Element* __restrict__ embeddings, Element* __restrict__ grad_dense,
                    Element* __restrict__ grad_embeddings, int64_t batch, int64_t grad_stride,
                    int64_t dense_stride, int64_t batch_stride, int64_t vector_stride,
                    int columns) {
  constexpr int kBlocks = divided_up(kVectors, 8), kSteps = kWidth / 16;
  constexpr int kPadded = divided_up(kBlocks, 2) * 2;  // 16 x 16 matrices
  constexpr int kOnce = kAhead<kWidth, 2>;
  extern __shared__ uint4 memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4 * 2;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kWarps + warp) * kSamples;
  if (first >= batch) return;
  const int here = first + kSamples <= batch ? kSamples : static_cast<int>(batch - first);
  Element* rows = reinterpret_cast<Element*>(memory) + warp * kSamples * columns;
  read_rows<kWordBytes<Element, kSamples>>(rows, grad_output + first * grad_stride, here, columns,
                                           grad_stride, lane);
  const Share<Element, kVectors, kWidth> share(first, lane, dense, embeddings, dense_stride,
                                               batch_stride, vector_stride);
#pragma unroll 1
  for (int start = 0; start < here; start += kOnce) {
    uint2 values[kOnce][kBlocks][kSteps];
#pragma unroll
    for (int next = 0; next < kOnce; ++next) share.load(values[next], smaller(start + next, here - 1));
    if (start == 0) {
      wait_for_copies();
      __syncwarp();
    }
#pragma unroll
    for (int next = 0; next < kOnce; ++next) {
      if (start + next >= here) break;
      const auto& value = values[next];
      const int64_t sample = first + start + next;
      const Element* grad = rows + (start + next) * columns;
      const auto* pairs = reinterpret_cast<const unsigned short*>(grad + kWidth);
      // weight[i][j]: block (i, j) of G + G transposed, (g, q) and (g, q + 1).
      unsigned weight[kPadded][kPadded] = {};
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        const int vector = 8 * i + g;
        if (vector < kVectors) {
          const unsigned short* from = pairs + pairs_before(vector) + q;
#pragma unroll
          for (int j = 0; j < i; ++j) weight[i][j] = from[8 * j] | from[8 * j + 1] << 16;
        }
#pragma unroll
        for (int high = 0; high < 2; ++high) {
          const int other = 8 * i + q + high;
          const int larger = vector > other ? vector : other;
          if (vector != other && larger < kVectors)
            weight[i][i] |= pairs[pairs_before(larger) + vector + other - larger] << 16 * high;
        }
      }
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
        for (int j = i + 1; j < kBlocks; ++j) weight[i][j] = transposed(weight[j][i]);
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        unsigned columns_of[2][kPadded] = {};
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
          columns_of[0][j] = transposed(value[j][step].x);
          columns_of[1][j] = transposed(value[j][step].y);
        }
        // As in eager's G Z, an infinity or NaN makes its column NaN: G has zeros to multiply it.
        float zero[2][4] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int j = 0; j < kPadded; j += 2) {
            const unsigned zeros[4] = {};
            multiply_add(Element(), zero[half], zeros, columns_of[half][j],
                         columns_of[half][j + 1]);
          }
        }
#pragma unroll
        for (int i = 0; i < kPadded; i += 2) {
          float total[2][4];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int k = 0; k < 4; ++k) total[half][k] = zero[half][k];
#pragma unroll
            for (int j = 0; j < kPadded; j += 2) {
              const unsigned a[4] = {weight[i][j], weight[i + 1][j], weight[i][j + 1],
                                     weight[i + 1][j + 1]};
              multiply_add(Element(), total[half], a, columns_of[half][j],
                           columns_of[half][j + 1]);
            }
          }
#pragma unroll
          for (int below = 0; below < 2; ++below) {
            const int vector = 8 * (i + below) + g;
            Element* to = vector == 0 ? grad_dense : grad_embeddings;
            if (vector >= kVectors || to == nullptr) continue;
            Pack<Element, 4> pack;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              float own = total[k / 2][2 * below + k % 2];
              if (vector == 0) own += widened<float>(grad[16 * step + 2 * q + k]);
              assign(pack.element[k], own);
            }
            to += (vector == 0 ? sample : sample * (kVectors - 1) + vector - 1) * kWidth;
            store<true, 4>(to + 16 * step + 2 * q, pack);
          }
        }
      }
    }
  }
}

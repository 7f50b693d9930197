// Softmax over one dimension and its gradient, for rows and for columns, in CUDA C++.
//
// A "row" is one softmax: `width` elements. Three ways to own a row, chosen by the launcher:
//   *_resident  rows along the last dimension that fit on chip: each element is read once, its exp
//               is computed once, kept in registers, scaled and written once. A row belongs to 1 to
//               32 lanes of a warp, to a block, or to a cluster of blocks (sm_90 and newer).
//   *_looped    rows of any width: two passes, the second one backwards so that it meets in L2 what
//               the first pass read last.
//   *_columns   the dimension is not the last one: lanes lie across columns (coalesced), warps along
//               the dimension.
// The reduction is one exchange, not two: every warp takes exp against its own maximum, and what
// crosses the block is the pair (maximum, sum); 2^(warp maximum - row maximum) is then a part of the
// one factor that every element is multiplied with anyway. So a row costs one barrier.
//
// A row's place: row = outer * inner_count + inner, and its first element lies at
// outer * outer_stride + inner * inner_stride. Strides count elements and may be 0.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>

#if __CUDA_ARCH__ >= 900
#define FUSELAB_CLUSTER(blocks) __cluster_dims__(blocks, 1, 1)
#else
#define FUSELAB_CLUSTER(blocks)
#endif

namespace {

constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int kNarrowBlock = 128;  // threads of a block whose rows belong to lanes of a warp

template <typename T>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<double> {
  using type = double;
};

template <typename T>
constexpr bool IsBfloat16 = false;
template <>
constexpr bool IsBfloat16<__nv_bfloat16> = true;

template <typename To>
struct Convert {  // float, double
  static __device__ To from(float value) { return static_cast<To>(value); }
  static __device__ To from(double value) { return static_cast<To>(value); }
  static __device__ To from(__half value) { return static_cast<To>(__half2float(value)); }
  static __device__ To from(__nv_bfloat16 value) { return static_cast<To>(__bfloat162float(value)); }
};
template <>
struct Convert<__half> {
  static __device__ __half from(float value) { return __float2half_rn(value); }
  static __device__ __half from(double value) { return __double2half(value); }
  static __device__ __half from(__half value) { return value; }
  static __device__ __half from(__nv_bfloat16 value) {
    return __float2half_rn(__bfloat162float(value));
  }
};
template <>
struct Convert<__nv_bfloat16> {
  static __device__ __nv_bfloat16 from(float value) { return __float2bfloat16_rn(value); }
  static __device__ __nv_bfloat16 from(double value) { return __double2bfloat16(value); }
  static __device__ __nv_bfloat16 from(__half value) {
    return __float2bfloat16_rn(__half2float(value));
  }
  static __device__ __nv_bfloat16 from(__nv_bfloat16 value) { return value; }
};

// softmax(input, dtype=...) casts first: an input wider than the output is rounded before exp.
template <typename Output, typename Input>
__device__ typename AccumulatorOf<Output>::type widened(Input value) {
  using Accumulator = typename AccumulatorOf<Output>::type;
  return Convert<Accumulator>::from(Convert<Output>::from(value));
}

template <typename Accumulator>
__device__ Accumulator negative_infinity() {
  return static_cast<Accumulator>(-__int_as_float(0x7f800000));
}

// exp(difference) for difference <= 0. ex2.approx errs by 2 ulp, and without .ftz keeps results below
// 2^-126, as eager does: a slice across the softmax may hold nothing larger.
__device__ __forceinline__ float exponential(float difference) {
  float result;
  asm("ex2.approx.f32 %0, %1;" : "=f"(result) : "f"(difference * 1.4426950408889634f));
  return result;
}
__device__ __forceinline__ double exponential(double difference) { return exp(difference); }

// exp of an element's difference, times a power of two that Output fixes and the division by the sum
// takes away again. Without .ftz an ex2 costs 4 instructions instead of 1, and 16-bit rows run close to
// the issue limit (31 per element at 70 us for 4096 x 16384 on an H200). float16 ends at 2^-25, far
// above 2^-126; bfloat16 ends at 2^-134, so 2^8 keeps its terms normal.
template <typename Output>
__device__ __forceinline__ typename AccumulatorOf<Output>::type exponential_term(
    typename AccumulatorOf<Output>::type difference) {
  if constexpr (sizeof(Output) != 2) {
    return exponential(difference);
  } else {
    constexpr float kScale = IsBfloat16<Output> ? 8.0f : 0.0f;
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;"
        : "=f"(result)
        : "f"(fmaf(difference, 1.4426950408889634f, kScale)));
    return result;
  }
}

// A maximum of -inf (nothing but -inf, or nothing at all) must not make inf - inf of the terms.
template <typename Accumulator>
__device__ Accumulator shift_for(Accumulator maximum) {
  return maximum == negative_infinity<Accumulator>() ? Accumulator(0) : maximum;
}

__device__ float larger(float first, float second) { return fmaxf(first, second); }
__device__ double larger(double first, double second) { return fmax(first, second); }

// Loads and stores move kCount elements in words of up to 16 bytes.
template <int kBytes>
struct Word;
template <>
struct Word<2> {
  using type = unsigned short;
};
template <>
struct Word<4> {
  using type = unsigned int;
};
template <>
struct Word<8> {
  using type = uint2;
};
template <>
struct Word<16> {
  using type = uint4;
};

template <typename T, int kCount>
union Pack {
  static constexpr int kWordBytes = kCount * sizeof(T) < 16 ? kCount * sizeof(T) : 16;
  static constexpr int kWords = kCount * sizeof(T) / kWordBytes;
  using WordType = typename Word<kWordBytes>::type;

  WordType word[kWords];
  T element[kCount];

  __device__ Pack() {}
  __device__ void load(const T* __restrict__ from) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = __ldg(reinterpret_cast<const WordType*>(from) + i);
  }
  __device__ void gather(const T* __restrict__ from, int64_t stride) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) element[i] = __ldg(from + i * stride);
  }
  __device__ void store(T* to) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) reinterpret_cast<WordType*>(to)[i] = word[i];
  }
  __device__ void fill(T value) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) element[i] = value;
  }
};

// Loads one vector of a row: kFrom elements per load, contiguous; or each by its stride (kFrom 1).
template <int kFrom, typename T, int kCount>
__device__ void load_vector(Pack<T, kCount>& pack, const T* __restrict__ row, int64_t element,
                            int64_t stride) {
  if constexpr (kFrom == kCount && kCount > 1) {
    pack.load(row + element);
  } else {
    pack.gather(row + element * stride, stride);
  }
}

// Where a row begins. The 64-bit division costs 70 instructions, so it runs only where needed.
__device__ int64_t row_offset(int64_t row, int64_t inner_count, int64_t outer_stride,
                              int64_t inner_stride) {
  if (inner_count == 1) return row * outer_stride;
  int64_t outer;
  if ((row | inner_count) >> 32) {
    outer = row / inner_count;
  } else {
    outer = static_cast<uint32_t>(row) / static_cast<uint32_t>(inner_count);
  }
  return outer * outer_stride + (row - outer * inner_count) * inner_stride;
}

template <int kFirst, int kLast, typename Accumulator>
__device__ Accumulator lanes_maximum(Accumulator value) {
#pragma unroll
  for (int distance = kLast; distance >= kFirst; distance /= 2)
    value = larger(value, __shfl_xor_sync(kFullWarp, value, distance));
  return value;
}

template <int kFirst, int kLast, typename Accumulator>
__device__ Accumulator lanes_sum(Accumulator value) {
#pragma unroll
  for (int distance = kLast; distance >= kFirst; distance /= 2)
    value += __shfl_xor_sync(kFullWarp, value, distance);
  return value;
}

template <typename Accumulator>
struct alignas(2 * sizeof(Accumulator)) Partial {  // of a softmax over some of a row's elements
  Accumulator maximum;
  Accumulator sum;  // of exp(element - maximum)
};

// A compensated sum (Kahan): a thread of a long row adds the same small terms up to 10^5 times, and
// float alone then rounds each of them the same way (1.6 % off after 10^6 terms of 0.02).
template <typename Accumulator>
struct LongSum {
  Accumulator sum = 0;
  Accumulator lost = 0;  // of the terms, below the sum's last bit

  __device__ void scale(Accumulator factor) {
    sum *= factor;
    lost *= factor;
  }
  __device__ void add(Accumulator term) {
    const Accumulator whole = term + lost;
    const Accumulator next = sum + whole;
    lost = whole - (next - sum);
    sum = next;
  }
};

// The cluster's barrier, rank and remote shared memory (sm_90): PTX, since NVRTC's
// cooperative_groups.h takes longer to compile than these kernels.
__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void store_remote(const void* local, unsigned rank, uint64_t value) {
#if __CUDA_ARCH__ >= 900
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(local));
  unsigned remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(remote), "l"(value) : "memory");
#endif
}

// Every warp of the block, or of all blocks of the cluster, gives one Message (lane 0's), and every
// warp then reads all of them. The one barrier of a row. Shared memory is written once per launch,
// so no second barrier guards its reuse.
template <int kWarps, int kCluster, typename Message>
__device__ const Message* exchange(Message* slots, Message message) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if constexpr (kCluster == 1) {
    if (lane == 0) slots[warp] = message;
    __syncthreads();
  } else {
    static_assert(sizeof(Message) == 8, "a remote store moves 8 bytes");
    uint64_t bits;
    memcpy(&bits, &message, 8);
    cluster_wait();  // all blocks of the cluster run: their shared memory exists
    if (lane < kCluster) store_remote(slots + cluster_rank() * kWarps + warp, lane, bits);
    __syncwarp();  // the cluster's barrier wants whole warps
    cluster_arrive();
    cluster_wait();
  }
  return slots;
}

// From each warp's partial result to the factor for this warp's exp(element - its own maximum).
template <int kWarps, int kCluster, typename Accumulator>
__device__ Accumulator softmax_factor(Partial<Accumulator> own) {
  constexpr int kSlots = kWarps * kCluster;
  constexpr int kLanes = kSlots < 32 ? kSlots : 32;
  __shared__ Partial<Accumulator> shared[kSlots];
  const Partial<Accumulator>* slots = exchange<kWarps, kCluster>(shared, own);
  const int lane = threadIdx.x % kLanes;
  Accumulator maximum = negative_infinity<Accumulator>();
#pragma unroll
  for (int i = 0; i < kSlots; i += kLanes) maximum = larger(maximum, slots[i + lane].maximum);
  maximum = lanes_maximum<1, kLanes / 2>(maximum);
  Accumulator sum = 0;
#pragma unroll
  for (int i = 0; i < kSlots; i += kLanes)
    sum += slots[i + lane].sum * exponential(slots[i + lane].maximum - maximum);
  sum = lanes_sum<1, kLanes / 2>(sum);
  return exponential(own.maximum - maximum) / sum;
}

template <int kWarps, int kCluster, typename Accumulator>
__device__ Accumulator row_sum(Accumulator own) {
  constexpr int kSlots = kWarps * kCluster;
  constexpr int kLanes = kSlots < 32 ? kSlots : 32;
  using Message = Partial<Accumulator>;  // of 8 bytes for float, as remote stores want it
  __shared__ Message shared[kSlots];
  const Message* slots = exchange<kWarps, kCluster>(shared, Message{Accumulator(0), own});
  Accumulator sum = 0;
#pragma unroll
  for (int i = 0; i < kSlots; i += kLanes) sum += slots[i + threadIdx.x % kLanes].sum;
  return lanes_sum<1, kLanes / 2>(sum);
}

// What a thread owns of a resident row: vectors `first + i * kStep`, for i below kVectors.
template <int kThreads, int kCluster>
struct Place {
  static constexpr int kLanes = kThreads < 32 ? kThreads : 32;
  static constexpr int kWarps = kThreads < 32 ? 1 : kThreads / 32;
  static constexpr int kStep = kThreads * kCluster;
  int64_t row;
  int first;

  __device__ Place() {
    if constexpr (kThreads <= 32) {
      row = int64_t(blockIdx.x) * (kNarrowBlock / kThreads) + threadIdx.x / kThreads;
      first = threadIdx.x % kThreads;
    } else {
      row = blockIdx.x / kCluster;
      first = kCluster == 1 ? threadIdx.x : cluster_rank() * kThreads + threadIdx.x;
    }
  }
};

// The sum and maximum of a thread become those of its warp. A maximum of -inf minus anything finite
// is a factor of 0, for a sum that is 0 or NaN.
template <typename Accumulator>
__device__ Partial<Accumulator> merge_lanes(Accumulator maximum, Accumulator sum) {
  const Accumulator all = lanes_maximum<1, 16>(maximum);
  return {all, lanes_sum<1, 16>(sum * exponential(maximum - shift_for(all)))};
}

template <typename Input, typename Output, int kVector, int kVectors, int kThreads, int kCluster>
__device__ __forceinline__ void forward_on_chip(
    const Input* __restrict__ input, Output* __restrict__ output, int64_t rows, int32_t width,
    int64_t inner_count, int64_t outer_stride, int64_t inner_stride, int64_t dim_stride) {
  using Accumulator = typename AccumulatorOf<Output>::type;
  using Where = Place<kThreads, kCluster>;
  if constexpr (kCluster > 1) cluster_arrive();
  const Where place;
  const bool in_range = place.row < rows;
  const Input* from =
      input + (in_range ? row_offset(place.row, inner_count, outer_stride, inner_stride) : 0);
  const int32_t end = in_range ? width : 0;

  Pack<Input, kVector> raw[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int32_t element = (place.first + i * Where::kStep) * kVector;
    raw[i].fill(Convert<Input>::from(negative_infinity<float>()));
    if (element < end) load_vector<kVector>(raw[i], from, element, dim_stride);
  }
  Accumulator term[kVectors * kVector];
  Accumulator maximum = negative_infinity<Accumulator>();
#pragma unroll
  for (int i = 0; i < kVectors * kVector; ++i) {
    term[i] = widened<Output>(raw[i / kVector].element[i % kVector]);
    maximum = larger(maximum, term[i]);
  }
  maximum = lanes_maximum<1, Where::kLanes / 2>(maximum);
  const Accumulator shift = shift_for(maximum);
  Accumulator sum = 0;
#pragma unroll
  for (int i = 0; i < kVectors * kVector; ++i) {
    term[i] = exponential_term<Output>(term[i] - shift);
    sum += term[i];
  }
  sum = lanes_sum<1, Where::kLanes / 2>(sum);
  Accumulator factor;
  if constexpr (kThreads <= 32) {
    factor = Accumulator(1) / sum;
  } else {
    factor = softmax_factor<Where::kWarps, kCluster>(Partial<Accumulator>{maximum, sum});
  }
  Output* to = output + place.row * width;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int32_t element = (place.first + i * Where::kStep) * kVector;
    Pack<Output, kVector> result;
#pragma unroll
    for (int j = 0; j < kVector; ++j)
      result.element[j] = Convert<Output>::from(term[i * kVector + j] * factor);
    if (element < end) result.store(to + element);
  }
}

template <typename Grad, typename GradInput, int kVector, int kGradVector, int kVectors,
          int kThreads, int kCluster>
__device__ __forceinline__ void backward_on_chip(
    const Grad* __restrict__ grad_output, const Grad* __restrict__ output,
    GradInput* __restrict__ grad_input, int64_t rows, int32_t width, int64_t inner_count,
    int64_t outer_stride, int64_t inner_stride, int64_t dim_stride) {
  using Accumulator = typename AccumulatorOf<Grad>::type;
  using Where = Place<kThreads, kCluster>;
  if constexpr (kCluster > 1) cluster_arrive();
  const Where place;
  const bool in_range = place.row < rows;
  const Grad* grad_row =
      grad_output + (in_range ? row_offset(place.row, inner_count, outer_stride, inner_stride) : 0);
  const Grad* output_row = output + place.row * width;
  const int32_t end = in_range ? width : 0;

  Pack<Grad, kVector> grad[kVectors], y[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int32_t element = (place.first + i * Where::kStep) * kVector;
    grad[i].fill(Convert<Grad>::from(0.0f));
    y[i].fill(Convert<Grad>::from(0.0f));
    if (element < end) {
      load_vector<kGradVector>(grad[i], grad_row, element, dim_stride);
      load_vector<kVector>(y[i], output_row, element, 1);
    }
  }
  Accumulator sum = 0;
#pragma unroll
  for (int i = 0; i < kVectors * kVector; ++i)
    sum += widened<Grad>(grad[i / kVector].element[i % kVector]) *
           widened<Grad>(y[i / kVector].element[i % kVector]);
  sum = lanes_sum<1, Where::kLanes / 2>(sum);
  if constexpr (kThreads > 32) sum = row_sum<Where::kWarps, kCluster>(sum);
  GradInput* to = grad_input + place.row * width;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int32_t element = (place.first + i * Where::kStep) * kVector;
    Pack<GradInput, kVector> result;
#pragma unroll
    for (int j = 0; j < kVector; ++j)
      result.element[j] = Convert<GradInput>::from(
          widened<Grad>(y[i].element[j]) * (widened<Grad>(grad[i].element[j]) - sum));
    if (element < end) result.store(to + element);
  }
}

template <typename Input, typename Output, int kVector, int kUnroll, int kThreads, int kCluster,
          typename Index>
__device__ __forceinline__ void forward_in_two_passes(
    const Input* __restrict__ input, Output* __restrict__ output, int64_t width,
    int64_t inner_count, int64_t outer_stride, int64_t inner_stride, int64_t dim_stride) {
  using Accumulator = typename AccumulatorOf<Output>::type;
  constexpr Index kStep = Index(kThreads) * kCluster * kVector;
  if constexpr (kCluster > 1) cluster_arrive();
  const int64_t row = blockIdx.x / kCluster;
  const Input* from = input + row_offset(row, inner_count, outer_stride, inner_stride);
  Output* to = output + row * width;
  const Index end = static_cast<Index>(width);
  const unsigned rank = kCluster == 1 ? 0 : cluster_rank();
  const Index first = static_cast<Index>(kVector) * (rank * kThreads + threadIdx.x);

  Accumulator maximum = negative_infinity<Accumulator>();
  LongSum<Accumulator> sum;
  Index begin = 0;  // of the tile of kUnroll steps that the threads read together
  for (; begin < end; begin += kUnroll * kStep) {
    Pack<Input, kVector> raw[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const Index element = begin + first + i * kStep;
      raw[i].fill(Convert<Input>::from(negative_infinity<float>()));
      if (element < end) load_vector<kVector>(raw[i], from, element, dim_stride);
    }
    Accumulator new_maximum = maximum;
#pragma unroll
    for (int i = 0; i < kUnroll * kVector; ++i)
      new_maximum = larger(new_maximum, widened<Output>(raw[i / kVector].element[i % kVector]));
    const Accumulator shift = shift_for(new_maximum);
    sum.scale(exponential(maximum - shift));
    maximum = new_maximum;
    Accumulator of_tile = 0;
#pragma unroll
    for (int i = 0; i < kUnroll * kVector; ++i)
      of_tile += exponential_term<Output>(
          widened<Output>(raw[i / kVector].element[i % kVector]) - shift);
    sum.add(of_tile);
  }
  const Partial<Accumulator> own = merge_lanes(maximum, sum.sum);
  const Accumulator factor = softmax_factor<kThreads / 32, kCluster>(own);
  const Accumulator shift = shift_for(own.maximum);
  while (begin > 0) {
    begin -= kUnroll * kStep;
    Pack<Input, kVector> raw[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const Index element = begin + first + i * kStep;
      if (element < end) load_vector<kVector>(raw[i], from, element, dim_stride);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const Index element = begin + first + i * kStep;
      Pack<Output, kVector> result;
#pragma unroll
      for (int j = 0; j < kVector; ++j)
        result.element[j] = Convert<Output>::from(
            exponential_term<Output>(widened<Output>(raw[i].element[j]) - shift) * factor);
      if (element < end) result.store(to + element);
    }
  }
}

template <typename Grad, typename GradInput, int kVector, int kGradVector, int kUnroll,
          int kThreads, int kCluster, typename Index>
__device__ __forceinline__ void backward_in_two_passes(
    const Grad* __restrict__ grad_output, const Grad* __restrict__ output,
    GradInput* __restrict__ grad_input, int64_t width, int64_t inner_count, int64_t outer_stride,
    int64_t inner_stride, int64_t dim_stride) {
  using Accumulator = typename AccumulatorOf<Grad>::type;
  constexpr Index kStep = Index(kThreads) * kCluster * kVector;
  if constexpr (kCluster > 1) cluster_arrive();
  const int64_t row = blockIdx.x / kCluster;
  const Grad* grad_row = grad_output + row_offset(row, inner_count, outer_stride, inner_stride);
  const Grad* output_row = output + row * width;
  GradInput* to = grad_input + row * width;
  const Index end = static_cast<Index>(width);
  const unsigned rank = kCluster == 1 ? 0 : cluster_rank();
  const Index first = static_cast<Index>(kVector) * (rank * kThreads + threadIdx.x);

  Pack<Grad, kVector> grad[kUnroll], y[kUnroll];
  const auto load = [&](Index begin) {
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const Index element = begin + first + i * kStep;
      grad[i].fill(Convert<Grad>::from(0.0f));
      y[i].fill(Convert<Grad>::from(0.0f));
      if (element < end) {
        load_vector<kGradVector>(grad[i], grad_row, element, dim_stride);
        load_vector<kVector>(y[i], output_row, element, 1);
      }
    }
  };
  LongSum<Accumulator> products;
  Index begin = 0;
  for (; begin < end; begin += kUnroll * kStep) {
    load(begin);
    Accumulator of_tile = 0;
#pragma unroll
    for (int i = 0; i < kUnroll * kVector; ++i)
      of_tile += widened<Grad>(grad[i / kVector].element[i % kVector]) *
                 widened<Grad>(y[i / kVector].element[i % kVector]);
    products.add(of_tile);
  }
  const Accumulator sum = row_sum<kThreads / 32, kCluster>(lanes_sum<1, 16>(products.sum));
  while (begin > 0) {
    begin -= kUnroll * kStep;
    load(begin);
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const Index element = begin + first + i * kStep;
      Pack<GradInput, kVector> result;
#pragma unroll
      for (int j = 0; j < kVector; ++j)
        result.element[j] = Convert<GradInput>::from(
            widened<Grad>(y[i].element[j]) * (widened<Grad>(grad[i].element[j]) - sum));
      if (element < end) result.store(to + element);
    }
  }
}

}  // namespace

// output[row, :] = softmax(input[row, :]), each element read once and written once.
//
// kThreads threads own a row, in forward_cluster of each of kCluster blocks, and hold kVectors
// vectors of kVector elements, so width <= kThreads * kCluster * kVectors * kVector. kVector > 1
// wants dim_stride 1 and rows of input and output aligned to vectors. The output is contiguous.
// kBlocks blocks shall fit one SM: that bounds the registers. Block: kThreads, or kNarrowBlock where
// kThreads <= 32. Grid: ceil(rows / rows per block), or rows * kCluster.
template <typename Input, typename Output, int kVector, int kVectors, int kThreads, int kBlocks>
__global__ void __launch_bounds__(kThreads <= 32 ? kNarrowBlock : kThreads, kBlocks)
    forward_resident(const Input* __restrict__ input, Output* __restrict__ output, int64_t rows,
                     int32_t width, int64_t inner_count, int64_t outer_stride,
                     int64_t inner_stride, int64_t dim_stride) {
  forward_on_chip<Input, Output, kVector, kVectors, kThreads, 1>(
      input, output, rows, width, inner_count, outer_stride, inner_stride, dim_stride);
}

template <typename Input, typename Output, int kVector, int kVectors, int kThreads, int kBlocks,
          int kCluster>
__global__ void FUSELAB_CLUSTER(kCluster) __launch_bounds__(kThreads, kBlocks)
    forward_cluster(const Input* __restrict__ input, Output* __restrict__ output, int64_t rows,
                    int32_t width, int64_t inner_count, int64_t outer_stride, int64_t inner_stride,
                    int64_t dim_stride) {
  forward_on_chip<Input, Output, kVector, kVectors, kThreads, kCluster>(
      input, output, rows, width, inner_count, outer_stride, inner_stride, dim_stride);
}

// grad_input[row, :] = output * (grad_output - sum(grad_output * output)), each read once.
//
// Parameters as above; output and grad_input are contiguous, grad_output has the strides given and
// is read kGradVector (kVector, or 1: by stride) elements at a time. Both operands stay in registers
// as they came (16-bit types packed in pairs).
template <typename Grad, typename GradInput, int kVector, int kGradVector, int kVectors,
          int kThreads, int kBlocks>
__global__ void __launch_bounds__(kThreads <= 32 ? kNarrowBlock : kThreads, kBlocks)
    backward_resident(const Grad* __restrict__ grad_output, const Grad* __restrict__ output,
                      GradInput* __restrict__ grad_input, int64_t rows, int32_t width,
                      int64_t inner_count, int64_t outer_stride, int64_t inner_stride,
                      int64_t dim_stride) {
  backward_on_chip<Grad, GradInput, kVector, kGradVector, kVectors, kThreads, 1>(
      grad_output, output, grad_input, rows, width, inner_count, outer_stride, inner_stride,
      dim_stride);
}

template <typename Grad, typename GradInput, int kVector, int kGradVector, int kVectors,
          int kThreads, int kBlocks, int kCluster>
__global__ void FUSELAB_CLUSTER(kCluster) __launch_bounds__(kThreads, kBlocks)
    backward_cluster(const Grad* __restrict__ grad_output, const Grad* __restrict__ output,
                     GradInput* __restrict__ grad_input, int64_t rows, int32_t width,
                     int64_t inner_count, int64_t outer_stride, int64_t inner_stride,
                     int64_t dim_stride) {
  backward_on_chip<Grad, GradInput, kVector, kGradVector, kVectors, kThreads, kCluster>(
      grad_output, output, grad_input, rows, width, inner_count, outer_stride, inner_stride,
      dim_stride);
}

// The same for a row of any width, which is read twice: kUnroll vectors per thread are in flight.
// Index counts elements of a row. Grid: rows * kCluster.
template <typename Input, typename Output, int kVector, int kUnroll, int kThreads, typename Index>
__global__ void __launch_bounds__(kThreads)
    forward_looped(const Input* __restrict__ input, Output* __restrict__ output, int64_t width,
                   int64_t inner_count, int64_t outer_stride, int64_t inner_stride,
                   int64_t dim_stride) {
  forward_in_two_passes<Input, Output, kVector, kUnroll, kThreads, 1, Index>(
      input, output, width, inner_count, outer_stride, inner_stride, dim_stride);
}

template <typename Input, typename Output, int kVector, int kUnroll, int kThreads, typename Index,
          int kCluster>
__global__ void FUSELAB_CLUSTER(kCluster) __launch_bounds__(kThreads)
    forward_looped_cluster(const Input* __restrict__ input, Output* __restrict__ output,
                           int64_t width, int64_t inner_count, int64_t outer_stride,
                           int64_t inner_stride, int64_t dim_stride) {
  forward_in_two_passes<Input, Output, kVector, kUnroll, kThreads, kCluster, Index>(
      input, output, width, inner_count, outer_stride, inner_stride, dim_stride);
}

template <typename Grad, typename GradInput, int kVector, int kGradVector, int kUnroll,
          int kThreads, typename Index>
__global__ void __launch_bounds__(kThreads)
    backward_looped(const Grad* __restrict__ grad_output, const Grad* __restrict__ output,
                    GradInput* __restrict__ grad_input, int64_t width, int64_t inner_count,
                    int64_t outer_stride, int64_t inner_stride, int64_t dim_stride) {
  backward_in_two_passes<Grad, GradInput, kVector, kGradVector, kUnroll, kThreads, 1, Index>(
      grad_output, output, grad_input, width, inner_count, outer_stride, inner_stride, dim_stride);
}

template <typename Grad, typename GradInput, int kVector, int kGradVector, int kUnroll,
          int kThreads, typename Index, int kCluster>
__global__ void FUSELAB_CLUSTER(kCluster) __launch_bounds__(kThreads)
    backward_looped_cluster(const Grad* __restrict__ grad_output, const Grad* __restrict__ output,
                            GradInput* __restrict__ grad_input, int64_t width, int64_t inner_count,
                            int64_t outer_stride, int64_t inner_stride, int64_t dim_stride) {
  backward_in_two_passes<Grad, GradInput, kVector, kGradVector, kUnroll, kThreads, kCluster,
                         Index>(grad_output, output, grad_input, width, inner_count, outer_stride,
                                inner_stride, dim_stride);
}

namespace {

// Columns: kLanes neighbouring columns across the lanes of every warp; the other lanes of a warp and
// all warps of the block lie along the dimension, kPhases of them, so that kPhases consecutive
// elements of a column are read together. kWarps == 0: one thread owns a column alone.
template <int kLanes, int kWarps>
struct Tile {
  static constexpr bool kAlone = kWarps == 0;
  static constexpr int kBlock = kAlone ? kNarrowBlock : kWarps * 32;
  static constexpr int kColumns = kAlone ? kNarrowBlock : kLanes;
  static constexpr int kPhases = kAlone ? 1 : kWarps * (32 / kLanes);
  int64_t column;
  int phase;

  __device__ Tile() {
    column = int64_t(blockIdx.x) * kColumns + threadIdx.x % kColumns;
    phase = threadIdx.x / kColumns;
  }
};

// Over the threads that share a column: first the lanes of the warp, then the warps.
template <int kLanes, int kWarps, typename Accumulator>
__device__ Accumulator column_factor(Accumulator maximum, Accumulator sum) {
  if constexpr (kWarps == 0) return Accumulator(1) / sum;
  __shared__ Partial<Accumulator> slots[kWarps == 0 ? 1 : kWarps][kLanes];
  const Accumulator own = maximum;
  maximum = lanes_maximum<kLanes, 16>(maximum);
  sum = lanes_sum<kLanes, 16>(sum * exponential(own - shift_for(maximum)));
  const int column = threadIdx.x % kLanes;
  if (threadIdx.x % 32 < kLanes) slots[threadIdx.x / 32][column] = {maximum, sum};
  __syncthreads();
  // Unrolled by 4: all 32 at once would spill what the thread holds of its column.
  maximum = negative_infinity<Accumulator>();
#pragma unroll 4
  for (int i = 0; i < kWarps; ++i) maximum = larger(maximum, slots[i][column].maximum);
  sum = 0;
#pragma unroll 4
  for (int i = 0; i < kWarps; ++i)
    sum += slots[i][column].sum * exponential(slots[i][column].maximum - maximum);
  return exponential(own - maximum) / sum;
}

template <int kLanes, int kWarps, typename Accumulator>
__device__ Accumulator column_sum(Accumulator sum) {
  if constexpr (kWarps == 0) return sum;
  __shared__ Accumulator slots[kWarps == 0 ? 1 : kWarps][kLanes];
  sum = lanes_sum<kLanes, 16>(sum);
  const int column = threadIdx.x % kLanes;
  if (threadIdx.x % 32 < kLanes) slots[threadIdx.x / 32][column] = sum;
  __syncthreads();
  sum = 0;
#pragma unroll 4
  for (int i = 0; i < kWarps; ++i) sum += slots[i][column];
  return sum;
}

}  // namespace

// Softmax along `width` for `columns` columns: column c has its place by inner_count as rows have,
// consecutive elements lie dim_stride apart in input and inner_count apart in the contiguous output.
// kRows > 0: width <= kRows * kPhases, terms stay in registers; kRows == 0: any width, read twice.
// grid = ceil(columns / kColumns).
template <typename Input, typename Output, int kRows, int kLanes, int kWarps, typename Index>
__global__ void __launch_bounds__(Tile<kLanes, kWarps>::kBlock)
    forward_columns(const Input* __restrict__ input, Output* __restrict__ output, int64_t columns,
                    int64_t width, int64_t inner_count, int64_t outer_stride, int64_t inner_stride,
                    int64_t dim_stride) {
  using Accumulator = typename AccumulatorOf<Output>::type;
  using Where = Tile<kLanes, kWarps>;
  const Where tile;
  const bool in_range = tile.column < columns;
  const int64_t column = in_range ? tile.column : 0;
  const Input* from = input + row_offset(column, inner_count, outer_stride, inner_stride);
  Output* to = output + row_offset(column, inner_count, width * inner_count, 1);
  const Index end = in_range ? static_cast<Index>(width) : 0;
  const Index from_stride = static_cast<Index>(dim_stride);
  const Index to_stride = static_cast<Index>(inner_count);

  Accumulator maximum = negative_infinity<Accumulator>();
  if constexpr (kRows > 0) {
    Accumulator term[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Index element = tile.phase + i * Where::kPhases;
      term[i] = negative_infinity<Accumulator>();
      if (element < end) term[i] = widened<Output>(__ldg(from + element * from_stride));
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) maximum = larger(maximum, term[i]);
    const Accumulator shift = shift_for(maximum);
    Accumulator sum = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      term[i] = exponential_term<Output>(term[i] - shift);
      sum += term[i];
    }
    const Accumulator factor = column_factor<kLanes, kWarps>(maximum, sum);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Index element = tile.phase + i * Where::kPhases;
      if (element < end) to[element * to_stride] = Convert<Output>::from(term[i] * factor);
    }
  } else {
    constexpr int kUnroll = 8;
    LongSum<Accumulator> terms;
    for (Index begin = tile.phase; begin < end; begin += kUnroll * Where::kPhases) {
      Accumulator value[kUnroll];
      Accumulator larger_maximum = maximum;
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const Index element = begin + i * Where::kPhases;
        value[i] = negative_infinity<Accumulator>();
        if (element < end) value[i] = widened<Output>(__ldg(from + element * from_stride));
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) larger_maximum = larger(larger_maximum, value[i]);
      const Accumulator shift = shift_for(larger_maximum);
      terms.scale(exponential(maximum - shift));
      maximum = larger_maximum;
      Accumulator of_tile = 0;
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) of_tile += exponential_term<Output>(value[i] - shift);
      terms.add(of_tile);
    }
    const Accumulator factor = column_factor<kLanes, kWarps>(maximum, terms.sum);
    const Accumulator shift = shift_for(maximum);
#pragma unroll 8
    for (Index element = tile.phase; element < end; element += Where::kPhases)
      to[element * to_stride] = Convert<Output>::from(
          exponential_term<Output>(
              widened<Output>(__ldg(from + element * from_stride)) - shift) * factor);
  }
}

// The gradient along `width` for columns; output and grad_input are contiguous.
template <typename Grad, typename GradInput, int kRows, int kLanes, int kWarps, typename Index>
__global__ void __launch_bounds__(Tile<kLanes, kWarps>::kBlock)
    backward_columns(const Grad* __restrict__ grad_output, const Grad* __restrict__ output,
                     GradInput* __restrict__ grad_input, int64_t columns, int64_t width,
                     int64_t inner_count, int64_t outer_stride, int64_t inner_stride,
                     int64_t dim_stride) {
  using Accumulator = typename AccumulatorOf<Grad>::type;
  using Where = Tile<kLanes, kWarps>;
  const Where tile;
  const bool in_range = tile.column < columns;
  const int64_t column = in_range ? tile.column : 0;
  const int64_t contiguous = row_offset(column, inner_count, width * inner_count, 1);
  const Grad* grad_column =
      grad_output + row_offset(column, inner_count, outer_stride, inner_stride);
  const Grad* output_column = output + contiguous;
  GradInput* to = grad_input + contiguous;
  const Index end = in_range ? static_cast<Index>(width) : 0;
  const Index grad_stride = static_cast<Index>(dim_stride);
  const Index stride = static_cast<Index>(inner_count);

  Accumulator sum = 0;
  if constexpr (kRows > 0) {
    Accumulator grad[kRows], y[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Index element = tile.phase + i * Where::kPhases;
      grad[i] = y[i] = 0;
      if (element < end) {
        grad[i] = widened<Grad>(__ldg(grad_column + element * grad_stride));
        y[i] = widened<Grad>(__ldg(output_column + element * stride));
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) sum += grad[i] * y[i];
    sum = column_sum<kLanes, kWarps>(sum);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Index element = tile.phase + i * Where::kPhases;
      if (element < end) to[element * stride] = Convert<GradInput>::from(y[i] * (grad[i] - sum));
    }
  } else {
    LongSum<Accumulator> products;
#pragma unroll 8
    for (Index element = tile.phase; element < end; element += Where::kPhases)
      products.add(widened<Grad>(__ldg(grad_column + element * grad_stride)) *
                   widened<Grad>(__ldg(output_column + element * stride)));
    sum = column_sum<kLanes, kWarps>(products.sum);
#pragma unroll 8
    for (Index element = tile.phase; element < end; element += Where::kPhases)
      to[element * stride] = Convert<GradInput>::from(
          widened<Grad>(__ldg(output_column + element * stride)) *
          (widened<Grad>(__ldg(grad_column + element * grad_stride)) - sum));
  }
}

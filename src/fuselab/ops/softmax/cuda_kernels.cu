// Softmax and log_softmax over one dimension and their gradients, in CUDA C++.
//
// A "row" is one softmax: `width` elements. The launcher chooses one of three ways to own a row:
//   *_resident  rows along the last dimension that fit on chip (*_cluster: on several blocks). Each
//               element is read once and written once, and its exp is computed once and kept in
//               registers. A row belongs to 1 to 32 lanes of a warp, to a block, or to a cluster of
//               blocks (sm_90 and newer). For long 16-bit rows the elements are kept, and exp is
//               computed twice: half the bytes allow twice as many rows at a time.
//   *_pieces    rows of any width, cut into pieces of one block each. One launch reads every piece
//               for its maximum and sum (backward: sum). The next launch, *_apply, merges the
//               results of a row in a fixed order, reads the elements again and writes. So a
//               single row can occupy the whole GPU.
//   *_columns   the dimension is not the last one: lanes run across columns (coalesced), warps
//               along the dimension.
// The reduction needs one exchange instead of two: every warp computes exp against its own maximum
// and passes the pair (maximum, sum) to the block. The factor 2^(warp maximum - row maximum) then
// becomes a part of the factor by which every element is multiplied anyway. So a row costs one
// barrier.
//
// In place (kInPlace: output is input, of equal layout): an element of the output is written by the
// thread that read it, after its last read, and no thread uses an element that another one writes (a
// vector of a shifted row may hold some, of the rows beside it). So pointers are not __restrict__, and loads use the read-only path (which may be moved past a
// store) only if input and output are kApart.
//
// The layout of a row: row = outer * inner_count + inner, and its first element is at
// outer * outer_stride + inner * inner_stride. Strides count elements and may be 0.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>

#if __CUDA_ARCH__ >= 900
#define FUSELAB_CLUSTER(blocks) __cluster_dims__(blocks, 1, 1)
#else
#define FUSELAB_CLUSTER(blocks)
#endif

enum Form { kSoftmax, kLogSoftmax };
enum Aliasing { kApart, kInPlace };  // of output and input

template <typename T>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<double> {
  using type = double;
};

template <typename Accumulator>
struct alignas(2 * sizeof(Accumulator)) Partial {  // of a softmax over some of a row's elements
  Accumulator maximum;
  Accumulator sum;  // of exp(element - maximum)
};

namespace {

constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int kNarrowBlock = 128;  // threads of a block whose rows belong to lanes of a warp

template <typename T>
constexpr bool IsBfloat16 = false;
template <>
constexpr bool IsBfloat16<__nv_bfloat16> = true;
template <typename First, typename Second>
constexpr bool IsSame = false;
template <typename T>
constexpr bool IsSame<T, T> = true;

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

// Returns exp(difference) for difference <= 0, within 2 ulp, as 2^n * 2^r. n is the nearest integer
// to difference * log2(e), found by adding 1.5 * 2^23 (+ 127, so that the low bits of the sum are
// 2^n's exponent field). r includes what rounding n * ln(2) would lose: ex2(difference * log2(e))
// alone is off by 7e-6 of the result near e^-90, and a slice across the softmax may have nothing
// larger. n is at least -126, so that ex2 never flushes (.ftz is 1 instruction, without it 4) and
// the product rounds to a subnormal number once, as eager's does. NaN gives NaN, -inf gives 0. It
// takes 8 instructions; ex2 without .ftz takes 5.
__device__ __forceinline__ float exponential(float difference) {
  constexpr float kLog2e = 1.4426950216293335f, kLog2eRest = 1.9259629911e-8f;
  constexpr float kMagic = 12582912.0f + 127.0f;
  const float shifted = fmaxf(fmaf(difference, kLog2e, kMagic), kMagic - 126.0f);
  const float n = shifted - kMagic;
  const float r = fmaf(difference, kLog2eRest, fmaf(difference, kLog2e, -n));
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(r));
  return result * __int_as_float(__float_as_int(shifted) << 23);
}
__device__ __forceinline__ double exponential(double difference) { return exp(difference); }

// Returns exp of an element's difference. In softmax it is multiplied by a power of two that
// depends only on Output, and the division by the sum removes it. 16-bit rows are close to the
// issue limit (28 instructions per element at the ceiling of an H200), and float32's accuracy would
// be lost on their output. float16's smallest result is 2^-25, far above 2^-126; bfloat16's is
// 2^-134, so 2^8 keeps its terms normal. log_softmax only adds such terms to a sum of at least 1,
// where 2^-126 is negligible.
template <Form kForm, typename Output>
__device__ __forceinline__ typename AccumulatorOf<Output>::type exponential_term(
    typename AccumulatorOf<Output>::type difference) {
  if constexpr (sizeof(Output) != 2) {
    return exponential(difference);
  } else {
    constexpr float kScale = kForm == kSoftmax && IsBfloat16<Output> ? 8.0f : 0.0f;
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;"
        : "=f"(result)
        : "f"(fmaf(difference, 1.4426950408889634f, kScale)));
    return result;
  }
}

// Returns the maximum, or 0 in place of -inf (only -inf, or nothing at all), so that no term
// becomes inf - inf.
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

// Loads by the read-only path if nothing that is read is written (kReadOnly).
template <bool kReadOnly, typename T>
__device__ T read(const T* from) {
  if constexpr (kReadOnly) return __ldg(from);
  return *from;
}

template <typename T, int kCount>
union Pack {
  static constexpr int kWordBytes = kCount * sizeof(T) < 16 ? kCount * sizeof(T) : 16;
  static constexpr int kWords = kCount * sizeof(T) / kWordBytes;
  using WordType = typename Word<kWordBytes>::type;

  WordType word[kWords];
  T element[kCount];
  unsigned pair[(kCount * sizeof(T) + 3) / 4];  // of 16-bit elements

  __device__ Pack() {}
  template <bool kReadOnly>
  __device__ void load(const T* from) {
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      word[i] = read<kReadOnly>(reinterpret_cast<const WordType*>(from) + i);
  }
  template <bool kReadOnly>
  __device__ void gather(const T* from, int64_t stride) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) element[i] = read<kReadOnly>(from + i * stride);
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

// Returns element i of a vector. The upper bfloat16 of a pair is a float32 except for the 16 bits
// below its own, which takes one instruction; its conversion takes two. If a row is widened twice,
// the second time must use widened(pack.element[i]), or the compiler keeps the first floats, and
// spills.
template <typename Output, typename T, int kCount>
__device__ typename AccumulatorOf<Output>::type widened(const Pack<T, kCount>& pack, int i) {
  if constexpr (IsBfloat16<T> && IsBfloat16<Output> && kCount > 1) {
    const unsigned pair = pack.pair[i / 2];
    return __uint_as_float(i % 2 ? pair & 0xffff0000u : pair << 16);
  } else {
    return widened<Output>(pack.element[i]);
  }
}

// Loads one vector of a row: kFrom elements per load, contiguous; or each by its stride (kFrom 1).
template <int kFrom, bool kReadOnly = true, typename T, int kCount>
__device__ void load_vector(Pack<T, kCount>& pack, const T* row, int64_t element,
                            int64_t stride) {
  if constexpr (kFrom == kCount && kCount > 1) {
    pack.template load<kReadOnly>(row + element);
  } else {
    pack.template gather<kReadOnly>(row + element * stride, stride);
  }
}

// A row of contiguous elements that begins anywhere, in vectors that begin on 16 bytes (kShifted):
// the first vector begins `lead` elements before the row, and the last may end behind it. Both hold
// elements of the rows beside this one, which become `outside` when they are loaded, and are left
// alone when they are stored. Behind the last row of the tensor nothing is loaded.
template <bool kReadOnly, typename T, int kCount>
__device__ void load_shifted(Pack<T, kCount>& pack, const T* from, int32_t element, int32_t lead,
                             int32_t end, bool is_last, T outside) {
  if (element + kCount <= end || !is_last) {
    pack.template load<kReadOnly>(from + element);
  } else {
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      if (element + j < end) pack.element[j] = read<kReadOnly>(from + element + j);
  }
  if (element >= lead && element + kCount <= end) return;
#pragma unroll
  for (int j = 0; j < kCount; ++j)
    if (element + j < lead || element + j >= end) pack.element[j] = outside;
}
template <typename T, int kCount>
__device__ void store_shifted(const Pack<T, kCount>& pack, T* to, int32_t element, int32_t lead,
                              int32_t end) {
  if (element >= lead && element + kCount <= end) {
    pack.store(to + element);
    return;
  }
#pragma unroll
  for (int j = 0; j < kCount; ++j)
    if (element + j >= lead && element + j < end) to[element + j] = pack.element[j];
}

// Returns the offset of a row. The 64-bit division costs 70 instructions, so it runs only if
// needed.
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

// A compensated sum (Kahan). A thread of a long row adds up to 10^5 similar small terms, and float
// alone rounds each of them in the same direction (1.6 % off after 10^6 terms of 0.02).
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

// Turns a row's kept values, exp(element - maximum of some threads) or the elements, into the
// output.
template <Form kForm, typename Accumulator>
struct Finish {
  Accumulator shift;
  Accumulator factor;

  // `own` is exp(maximum of this thread's terms - maximum of the row).
  __device__ Finish(Partial<Accumulator> row, Accumulator own) {
    shift = row.maximum;
    factor = kForm == kSoftmax ? own / row.sum : log(row.sum);
  }
  __device__ Accumulator operator()(Accumulator kept) const {
    if constexpr (kForm == kSoftmax) return kept * factor;
    return (kept - shift) - factor;
  }
};

// Returns the term that the backward sums over a row, and the gradient of one element.
template <Form kForm, typename Accumulator>
__device__ Accumulator summand(Accumulator grad, Accumulator output) {
  return kForm == kSoftmax ? grad * output : grad;
}
template <Form kForm, typename Grad, typename Accumulator>
__device__ Accumulator gradient(Accumulator grad, Accumulator output, Accumulator sum) {
  if constexpr (kForm == kSoftmax) return output * (grad - sum);
  return grad - exponential_term<kLogSoftmax, Grad>(output) * sum;
}

// The shared memory to which the warps of a block, and the blocks of a cluster, write a Message
// each.
template <int kWarps, int kCluster, typename Message>
struct Mailbox {
  Message of_warp[kWarps];
  Message of_block[kCluster];
  uint64_t arrived;  // mbarrier: a phase of it ends when of_block is full
};
template <int kWarps, int kCluster, typename Message>
__device__ Mailbox<kWarps, kCluster, Message>& mailbox() {
  __shared__ Mailbox<kWarps, kCluster, Message> box;
  return box;
}
__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Clusters (sm_90), in PTX, because NVRTC's cooperative_groups.h takes longer to compile than these
// kernels. Messages are sent by st.async, which counts itself on the receiver's mbarrier. A cluster
// barrier that releases stores would be a MEMBAR.ALL.GPU; a relaxed one for "all blocks run" is
// not.
__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

// Opens this block's mailbox before the loads, and tells the other blocks so.
template <int kWarps, int kCluster, typename Message>
__device__ __forceinline__ void open_mailbox() {
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x == 0) {
    const unsigned arrived = shared_address(&mailbox<kWarps, kCluster, Message>().arrived);
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(arrived) : "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(arrived),
                 "n"(kCluster * sizeof(Message))
                 : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_until_all_are_open() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void send(const void* slot, const void* arrived, unsigned rank,
                                     uint64_t message) {
#if __CUDA_ARCH__ >= 900
  unsigned to, barrier;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(to)
               : "r"(shared_address(slot)), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(barrier)
               : "r"(shared_address(arrived)), "r"(rank));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(to),
               "l"(message), "r"(barrier)
               : "memory");
#endif
}
// acquire.cta is enough, because messages arrive in this block's own shared memory, which has no
// cache in front. acquire.cluster adds a CCTL.IVALL, which empties L1, in every warp for every row
// (sm_90).
__device__ __forceinline__ void wait_until_filled(const void* arrived) {
#if __CUDA_ARCH__ >= 900
  unsigned filled = 0;
  while (!filled)
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], 0; "
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(filled)
        : "r"(shared_address(arrived))
        : "memory");
  __syncwarp();
#endif
}

// Merges kCount partial results, one per lane, in a fixed order. A block or piece of only -inf sums
// to 0, because the row may continue elsewhere: see shift_for.
struct MergePartials {
  template <int kCount, typename Accumulator>
  static __device__ Partial<Accumulator> of(const Partial<Accumulator>* partials) {
    const Partial<Accumulator> own = partials[threadIdx.x % kCount];
    const Accumulator maximum = lanes_maximum<1, kCount / 2>(own.maximum);
    const Accumulator scale = exponential(own.maximum - shift_for(maximum));
    return {maximum, lanes_sum<1, kCount / 2>(own.sum * scale)};
  }
};
struct AddSums {
  template <int kCount, typename Accumulator>
  static __device__ Partial<Accumulator> of(const Partial<Accumulator>* partials) {
    return {Accumulator(0), lanes_sum<1, kCount / 2>(partials[threadIdx.x % kCount].sum)};
  }
};

// Every warp gives lane 0's partial result and gets that of the row, with one barrier in a block.
// In a cluster the first warp of each block then sends the block's result to all blocks. A block
// has all its messages before it ends. Shared memory is written once per launch, so nothing guards
// its reuse.
template <int kWarps, int kCluster, typename Merge, typename Accumulator>
__device__ Partial<Accumulator> exchange(Partial<Accumulator> own) {
  auto& box = mailbox<kWarps, kCluster, Partial<Accumulator>>();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane == 0) box.of_warp[warp] = own;
  __syncthreads();
  if constexpr (kCluster == 1) {
    return Merge::template of<kWarps>(box.of_warp);
  } else {
    static_assert(sizeof(own) == 8, "a message to another block moves 8 bytes");
    wait_until_all_are_open();
    if (warp == 0) {
      const auto of_block = Merge::template of<kWarps>(box.of_warp);
      uint64_t message;
      memcpy(&message, &of_block, 8);
      if (lane < kCluster) send(box.of_block + cluster_rank(), &box.arrived, lane, message);
    }
    wait_until_filled(&box.arrived);
    return Merge::template of<kCluster>(box.of_block);
  }
}

// A thread's part of a resident row: vectors `first + i * kStep`, for i below kVectors.
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

// Merges the sums and maxima of a warp's threads. A maximum of -inf minus any finite number gives a
// factor of 0, for a sum that is 0 or NaN.
template <typename Accumulator>
__device__ Partial<Accumulator> merge_lanes(Accumulator maximum, Accumulator sum) {
  const Accumulator all = lanes_maximum<1, 16>(maximum);
  return {all, lanes_sum<1, 16>(sum * exponential(maximum - shift_for(all)))};
}

// Returns whether a thread's registers have room for its 16-bit elements, but not for a float32
// term of each and 16 other registers. Then terms are computed once for the sum and again for the
// output. `resident` threads must fit a multiprocessor. This is only for pairs of Output's own
// type: elements that are read one by one, or cast, take a register each.
template <typename Output>
__device__ constexpr bool has_terms_twice(int elements, int resident) {
  return sizeof(Output) == 2 && 65536 / resident < elements + 16;
}

// The larger elements of two pairs, and the larger element of a pair.
__device__ __forceinline__ unsigned larger_pair(unsigned first, unsigned second, __half) {
  const __half2 result =
      __hmax2(reinterpret_cast<__half2&>(first), reinterpret_cast<__half2&>(second));
  return reinterpret_cast<const unsigned&>(result);
}
__device__ __forceinline__ unsigned larger_pair(unsigned first, unsigned second, __nv_bfloat16) {
  const __nv_bfloat162 result = __hmax2(reinterpret_cast<__nv_bfloat162&>(first),
                                        reinterpret_cast<__nv_bfloat162&>(second));
  return reinterpret_cast<const unsigned&>(result);
}

// Returns the maximum of vectors of pairs without widening them, because ptxas would keep the
// floats for the terms, and spill. A pair of NaN gives NaN, which no maximum over threads takes.
template <typename T, int kCount, int kVectors>
__device__ float maximum_of_pairs(const Pack<T, kCount> (&packs)[kVectors]) {
  Pack<T, 2> largest;
  largest.pair[0] = packs[0].pair[0];
#pragma unroll
  for (int i = 1; i < kVectors * kCount / 2; ++i)
    largest.pair[0] =
        larger_pair(largest.pair[0], packs[2 * i / kCount].pair[i % (kCount / 2)], T{});
  return larger(widened<T>(largest, 0), widened<T>(largest, 1));
}

template <Form kForm, Aliasing kAliasing, typename Input, typename Output, int kVector,
          int kVectors, int kThreads, int kCluster, bool kTwice, bool kShifted>
__device__ __forceinline__ void forward_on_chip(
    const Input* input, Output* output, int64_t rows, int32_t width,
    int64_t inner_count, int64_t outer_stride, int64_t inner_stride, int64_t dim_stride) {
  using Accumulator = typename AccumulatorOf<Output>::type;
  using Where = Place<kThreads, kCluster>;
  static_assert(!kTwice || (kVector > 1 && IsSame<Input, Output>), "terms twice: of pairs");
  // ptxas may move a read-only load below the wait for the other blocks (it did, CUDA 13.0).
  constexpr bool kReadOnly = kAliasing == kApart && kCluster == 1;
  if constexpr (kCluster > 1) open_mailbox<Where::kWarps, kCluster, Partial<Accumulator>>();
  const Where place;
  const bool in_range = place.row < rows;
  const int64_t begin =
      in_range ? row_offset(place.row, inner_count, outer_stride, inner_stride) : 0;
  const int32_t lead = kShifted ? static_cast<int32_t>(begin & (kVector - 1)) : 0;
  const Input* from = input + begin - lead;
  const int32_t end = in_range ? lead + width : 0;

  Pack<Input, kVector> raw[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int32_t element = (place.first + i * Where::kStep) * kVector;
    const Input outside = Convert<Input>::from(negative_infinity<float>());
    raw[i].fill(outside);
    if constexpr (kShifted) {
      if (element < end)
        load_shifted<kReadOnly>(raw[i], from, element, lead, end, place.row == rows - 1, outside);
    } else {
      if (element < end) load_vector<kVector, kReadOnly>(raw[i], from, element, dim_stride);
    }
  }
  Accumulator term[kVectors * kVector];
  Accumulator maximum = negative_infinity<Accumulator>();
  if constexpr (kTwice) {
    maximum = maximum_of_pairs(raw);
  } else {
#pragma unroll
    for (int i = 0; i < kVectors * kVector; ++i) {
      term[i] = widened<Output>(raw[i / kVector], i % kVector);
      maximum = larger(maximum, term[i]);
    }
  }
  maximum = lanes_maximum<1, Where::kLanes / 2>(maximum);
  const Accumulator shift = shift_for(maximum);
  Accumulator sum = 0;
#pragma unroll
  for (int i = 0; i < kVectors * kVector; ++i) {
    if constexpr (kTwice) term[i] = widened<Output>(raw[i / kVector], i % kVector);
    term[i] = exponential_term<kForm, Output>(term[i] - shift);
    sum += term[i];
  }
  sum = lanes_sum<1, Where::kLanes / 2>(sum);
  Partial<Accumulator> of_row{maximum, sum};
  Accumulator own = 1;
  if constexpr (kThreads > 32) {
    of_row = exchange<Where::kWarps, kCluster, MergePartials>(of_row);
    if constexpr (!kTwice) own = exponential(maximum - of_row.maximum);
  }
  const Finish<kForm, Accumulator> finish(of_row, own);
  Output* to = output + place.row * width - lead;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int32_t element = (place.first + i * Where::kStep) * kVector;
    Pack<Output, kVector> result;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      Accumulator kept = term[i * kVector + j];
      if constexpr (kTwice || kForm == kLogSoftmax) kept = widened<Output>(raw[i].element[j]);
      if constexpr (kTwice && kForm == kSoftmax)
        kept = exponential_term<kForm, Output>(kept - of_row.maximum);
      result.element[j] = Convert<Output>::from(finish(kept));
    }
    if constexpr (kShifted) {
      if (element < end) store_shifted(result, to, element, lead, end);
    } else {
      if (element < end) result.store(to + element);
    }
  }
}

template <Form kForm, typename Grad, typename GradInput, int kVector, int kGradVector, int kVectors,
          int kThreads, int kCluster, bool kShifted>
__device__ __forceinline__ void backward_on_chip(
    const Grad* grad_output, const Grad* output,
    GradInput* grad_input, int64_t rows, int32_t width, int64_t inner_count,
    int64_t outer_stride, int64_t inner_stride, int64_t dim_stride) {
  using Accumulator = typename AccumulatorOf<Grad>::type;
  using Where = Place<kThreads, kCluster>;
  constexpr bool kReadOnly = kCluster == 1;
  if constexpr (kCluster > 1) open_mailbox<Where::kWarps, kCluster, Partial<Accumulator>>();
  const Where place;
  const bool in_range = place.row < rows;
  const int64_t begin =
      in_range ? row_offset(place.row, inner_count, outer_stride, inner_stride) : 0;
  const int32_t lead = kShifted ? static_cast<int32_t>(begin & (kVector - 1)) : 0;
  const Grad* grad_row = grad_output + begin - lead;
  const Grad* output_row = output + place.row * width - lead;
  const int32_t end = in_range ? lead + width : 0;

  Pack<Grad, kVector> grad[kVectors], y[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int32_t element = (place.first + i * Where::kStep) * kVector;
    const Grad outside = Convert<Grad>::from(0.0f);
    grad[i].fill(outside);
    y[i].fill(outside);
    if (element < end) {
      if constexpr (kShifted) {
        const bool is_last = place.row == rows - 1;
        load_shifted<kReadOnly>(grad[i], grad_row, element, lead, end, is_last, outside);
        load_shifted<kReadOnly>(y[i], output_row, element, lead, end, is_last, outside);
      } else {
        load_vector<kGradVector, kReadOnly>(grad[i], grad_row, element, dim_stride);
        load_vector<kVector, kReadOnly>(y[i], output_row, element, 1);
      }
    }
  }
  Accumulator sum = 0;
#pragma unroll
  for (int i = 0; i < kVectors * kVector; ++i)
    sum += summand<kForm>(widened<Grad>(grad[i / kVector], i % kVector),
                          widened<Grad>(y[i / kVector], i % kVector));
  sum = lanes_sum<1, Where::kLanes / 2>(sum);
  if constexpr (kThreads > 32)
    sum = exchange<Where::kWarps, kCluster, AddSums>(Partial<Accumulator>{0, sum}).sum;
  GradInput* to = grad_input + place.row * width - lead;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int32_t element = (place.first + i * Where::kStep) * kVector;
    Pack<GradInput, kVector> result;
#pragma unroll
    for (int j = 0; j < kVector; ++j)
      result.element[j] = Convert<GradInput>::from(
          gradient<kForm, Grad>(widened<Grad>(grad[i].element[j]), widened<Grad>(y[i].element[j]), sum));
    if constexpr (kShifted) {
      if (element < end) store_shifted(result, to, element, lead, end);
    } else {
      if (element < end) result.store(to + element);
    }
  }
}

// Partial results of `pieces` pieces of one row; every warp that calls it reads all of them.
template <typename Accumulator>
__device__ Partial<Accumulator> merge_pieces(const Partial<Accumulator>* of_piece, int pieces) {
  const int lane = threadIdx.x % 32;
  Accumulator maximum = negative_infinity<Accumulator>();
  for (int i = lane; i < pieces; i += 32) maximum = larger(maximum, of_piece[i].maximum);
  maximum = lanes_maximum<1, 16>(maximum);
  const Accumulator shift = shift_for(maximum);
  Accumulator sum = 0;
  for (int i = lane; i < pieces; i += 32)
    sum += of_piece[i].sum * exponential(of_piece[i].maximum - shift);
  return {maximum, lanes_sum<1, 16>(sum)};
}

// A block's piece of a row: elements begin + kVector * thread + i * kStep, below end.
template <int kVector, int kThreads, typename Index>
struct Piece {
  static constexpr Index kStep = Index(kThreads) * kVector;
  int64_t row;
  Index begin, end;

  __device__ Piece(unsigned block, int64_t width, int pieces, int64_t piece) {
    row = block / pieces;
    begin = static_cast<Index>((block % pieces) * piece);
    end = static_cast<Index>(begin + piece < width ? begin + piece : width);
    begin += kVector * static_cast<int>(threadIdx.x);
  }
};

}  // namespace

// output[row, :] = softmax(input[row, :]) or log_softmax, each element read once and written once.
//
// kThreads threads own a row (in forward_cluster, of each of kCluster blocks) and have kVectors
// vectors of kVector elements each, so width <= kThreads * kCluster * kVectors * kVector. kVector >
// 1 needs dim_stride 1 and rows of input and output aligned to vectors. The output is contiguous.
// kShifted: input and output are contiguous and begin on 16 bytes, and their rows need not; then the
// threads have room for kVector - 1 elements more. kBlocks blocks must fit a multiprocessor, which
// limits the registers. Block: kThreads, or kNarrowBlock if kThreads <= 32. Grid: ceil(rows / rows per block), or rows * kCluster.
template <Form kForm, Aliasing kAliasing, typename Input, typename Output, int kVector,
          int kVectors, int kThreads, int kBlocks, bool kShifted = false>
__global__ void __launch_bounds__(kThreads <= 32 ? kNarrowBlock : kThreads, kBlocks)
    forward_resident(const Input* input, Output* output, int64_t rows,
                     int32_t width, int64_t inner_count, int64_t outer_stride,
                     int64_t inner_stride, int64_t dim_stride) {
  constexpr int kResident = kBlocks * (kThreads <= 32 ? kNarrowBlock : kThreads);
  forward_on_chip<kForm, kAliasing, Input, Output, kVector, kVectors, kThreads, 1,
                  has_terms_twice<Output>(kVectors * kVector, kResident), kShifted>(
      input, output, rows, width, inner_count, outer_stride, inner_stride, dim_stride);
}

template <Form kForm, Aliasing kAliasing, typename Input, typename Output, int kVector,
          int kVectors, int kThreads, int kBlocks, int kCluster, bool kShifted = false>
__global__ void FUSELAB_CLUSTER(kCluster) __launch_bounds__(kThreads, kBlocks)
    forward_cluster(const Input* input, Output* output, int64_t rows,
                    int32_t width, int64_t inner_count, int64_t outer_stride, int64_t inner_stride,
                    int64_t dim_stride) {
  forward_on_chip<kForm, kAliasing, Input, Output, kVector, kVectors, kThreads, kCluster,
                  has_terms_twice<Output>(kVectors * kVector, kBlocks * kThreads), kShifted>(
      input, output, rows, width, inner_count, outer_stride, inner_stride, dim_stride);
}

// grad_input[row, :] = output * (grad_output - sum(grad_output * output)), or for log_softmax
// grad_output - exp(output) * sum(grad_output); each is read once.
//
// Parameters are as above. output and grad_input are contiguous; grad_output has the strides given
// and is read kGradVector (kVector, or 1: by stride) elements at a time. Both operands stay in
// registers in their own types (16-bit types packed in pairs).
template <Form kForm, typename Grad, typename GradInput, int kVector, int kGradVector, int kVectors,
          int kThreads, int kBlocks, bool kShifted = false>
__global__ void __launch_bounds__(kThreads <= 32 ? kNarrowBlock : kThreads, kBlocks)
    backward_resident(const Grad* grad_output, const Grad* output,
                      GradInput* grad_input, int64_t rows, int32_t width,
                      int64_t inner_count, int64_t outer_stride, int64_t inner_stride,
                      int64_t dim_stride) {
  backward_on_chip<kForm, Grad, GradInput, kVector, kGradVector, kVectors, kThreads, 1, kShifted>(
      grad_output, output, grad_input, rows, width, inner_count, outer_stride, inner_stride,
      dim_stride);
}

template <Form kForm, typename Grad, typename GradInput, int kVector, int kGradVector, int kVectors,
          int kThreads, int kBlocks, int kCluster, bool kShifted = false>
__global__ void FUSELAB_CLUSTER(kCluster) __launch_bounds__(kThreads, kBlocks)
    backward_cluster(const Grad* grad_output, const Grad* output,
                     GradInput* grad_input, int64_t rows, int32_t width,
                     int64_t inner_count, int64_t outer_stride, int64_t inner_stride,
                     int64_t dim_stride) {
  backward_on_chip<kForm, Grad, GradInput, kVector, kGradVector, kVectors, kThreads, kCluster,
                   kShifted>(
      grad_output, output, grad_input, rows, width, inner_count, outer_stride, inner_stride,
      dim_stride);
}

// Rows of any width, each in `pieces` pieces of `piece` elements (a multiple of
// kUnroll * kThreads * kVector), one per block; kUnroll vectors per thread are in flight. Index counts
// elements of a row. Grid: rows * pieces. First the maximum and the sum of every piece.
template <Form kForm, typename Input, typename Output, int kVector, int kUnroll, int kThreads,
          typename Index>
__global__ void __launch_bounds__(kThreads)
    forward_pieces(const Input* input,
                   Partial<typename AccumulatorOf<Output>::type>* of_piece, int64_t width,
                   int32_t pieces, int64_t piece, int64_t inner_count, int64_t outer_stride,
                   int64_t inner_stride, int64_t dim_stride) {
  using Accumulator = typename AccumulatorOf<Output>::type;
  using Where = Piece<kVector, kThreads, Index>;
  const Where place(blockIdx.x, width, pieces, piece);
  const Input* from = input + row_offset(place.row, inner_count, outer_stride, inner_stride);
  Accumulator maximum = negative_infinity<Accumulator>();
  LongSum<Accumulator> sum;
  for (Index begin = place.begin; begin < place.end; begin += kUnroll * Where::kStep) {
    Pack<Input, kVector> raw[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const Index element = begin + i * Where::kStep;
      raw[i].fill(Convert<Input>::from(negative_infinity<float>()));
      if (element < place.end) load_vector<kVector>(raw[i], from, element, dim_stride);
    }
    Accumulator new_maximum = maximum;
#pragma unroll
    for (int i = 0; i < kUnroll * kVector; ++i)
      new_maximum = larger(new_maximum, widened<Output>(raw[i / kVector], i % kVector));
    const Accumulator shift = shift_for(new_maximum);
    sum.scale(exponential(maximum - shift));
    maximum = new_maximum;
    Accumulator of_tile = 0;
#pragma unroll
    for (int i = 0; i < kUnroll * kVector; ++i)
      of_tile += exponential_term<kForm, Output>(
          widened<Output>(raw[i / kVector], i % kVector) - shift);
    sum.add(of_tile);
  }
  const auto of_block = exchange<kThreads / 32, 1, MergePartials>(merge_lanes(maximum, sum.sum));
  if (threadIdx.x == 0) of_piece[blockIdx.x] = of_block;
}

// Writes the output. Blocks run in reverse order, so that they find in L2 what was read last.
template <Form kForm, Aliasing kAliasing, typename Input, typename Output, int kVector, int kUnroll,
          int kThreads, typename Index>
__global__ void __launch_bounds__(kThreads)
    forward_apply(const Input* input, Output* output,
                  const Partial<typename AccumulatorOf<Output>::type>* of_piece, int64_t width,
                  int32_t pieces, int64_t piece, int64_t inner_count, int64_t outer_stride,
                  int64_t inner_stride, int64_t dim_stride) {
  using Accumulator = typename AccumulatorOf<Output>::type;
  using Where = Piece<kVector, kThreads, Index>;
  const Where place(gridDim.x - 1 - blockIdx.x, width, pieces, piece);
  const Input* from = input + row_offset(place.row, inner_count, outer_stride, inner_stride);
  Output* to = output + place.row * width;
  const auto of_row = merge_pieces(of_piece + place.row * pieces, pieces);
  const Finish<kForm, Accumulator> finish(of_row, Accumulator(1));
  for (Index begin = place.begin; begin < place.end; begin += kUnroll * Where::kStep) {
    Pack<Input, kVector> raw[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const Index element = begin + i * Where::kStep;
      if (element < place.end)
        load_vector<kVector, kAliasing == kApart>(raw[i], from, element, dim_stride);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const Index element = begin + i * Where::kStep;
      Pack<Output, kVector> result;
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        Accumulator kept = widened<Output>(raw[i], j);
        if (kForm == kSoftmax) kept = exponential_term<kForm, Output>(kept - of_row.maximum);
        result.element[j] = Convert<Output>::from(finish(kept));
      }
      if (element < place.end) result.store(to + element);
    }
  }
}

// The gradient likewise: first the sum of every piece (for log_softmax that of grad_output alone).
template <Form kForm, typename Grad, int kVector, int kGradVector, int kUnroll, int kThreads,
          typename Index>
__global__ void __launch_bounds__(kThreads)
    backward_pieces(const Grad* grad_output, const Grad* output,
                    typename AccumulatorOf<Grad>::type* of_piece, int64_t width, int32_t pieces,
                    int64_t piece, int64_t inner_count, int64_t outer_stride,
                    int64_t inner_stride, int64_t dim_stride) {
  using Accumulator = typename AccumulatorOf<Grad>::type;
  using Where = Piece<kVector, kThreads, Index>;
  const Where place(blockIdx.x, width, pieces, piece);
  const Grad* grad_row =
      grad_output + row_offset(place.row, inner_count, outer_stride, inner_stride);
  const Grad* output_row = output + place.row * width;
  LongSum<Accumulator> sum;
  for (Index begin = place.begin; begin < place.end; begin += kUnroll * Where::kStep) {
    Pack<Grad, kVector> grad[kUnroll], y[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const Index element = begin + i * Where::kStep;
      grad[i].fill(Convert<Grad>::from(0.0f));
      y[i].fill(Convert<Grad>::from(0.0f));
      if (element < place.end) {
        load_vector<kGradVector>(grad[i], grad_row, element, dim_stride);
        if constexpr (kForm == kSoftmax) load_vector<kVector>(y[i], output_row, element, 1);
      }
    }
    Accumulator of_tile = 0;
#pragma unroll
    for (int i = 0; i < kUnroll * kVector; ++i)
      of_tile += summand<kForm>(widened<Grad>(grad[i / kVector], i % kVector),
                                widened<Grad>(y[i / kVector], i % kVector));
    sum.add(of_tile);
  }
  const Partial<Accumulator> of_warp{0, lanes_sum<1, 16>(sum.sum)};
  const auto of_block = exchange<kThreads / 32, 1, AddSums>(of_warp);
  if (threadIdx.x == 0) of_piece[blockIdx.x] = of_block.sum;
}

template <Form kForm, typename Grad, typename GradInput, int kVector, int kGradVector, int kUnroll,
          int kThreads, typename Index>
__global__ void __launch_bounds__(kThreads)
    backward_apply(const Grad* grad_output, const Grad* output, GradInput* grad_input,
                   const typename AccumulatorOf<Grad>::type* of_piece, int64_t width,
                   int32_t pieces, int64_t piece, int64_t inner_count, int64_t outer_stride,
                   int64_t inner_stride, int64_t dim_stride) {
  using Accumulator = typename AccumulatorOf<Grad>::type;
  using Where = Piece<kVector, kThreads, Index>;
  const Where place(gridDim.x - 1 - blockIdx.x, width, pieces, piece);
  const Grad* grad_row =
      grad_output + row_offset(place.row, inner_count, outer_stride, inner_stride);
  const Grad* output_row = output + place.row * width;
  GradInput* to = grad_input + place.row * width;
  Accumulator sum = 0;
  for (int i = threadIdx.x % 32; i < pieces; i += 32) sum += of_piece[place.row * pieces + i];
  sum = lanes_sum<1, 16>(sum);
  for (Index begin = place.begin; begin < place.end; begin += kUnroll * Where::kStep) {
    Pack<Grad, kVector> grad[kUnroll], y[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const Index element = begin + i * Where::kStep;
      if (element < place.end) {
        load_vector<kGradVector>(grad[i], grad_row, element, dim_stride);
        load_vector<kVector>(y[i], output_row, element, 1);
      }
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const Index element = begin + i * Where::kStep;
      Pack<GradInput, kVector> result;
#pragma unroll
      for (int j = 0; j < kVector; ++j)
        result.element[j] = Convert<GradInput>::from(
            gradient<kForm, Grad>(widened<Grad>(grad[i], j), widened<Grad>(y[i], j), sum));
      if (element < place.end) result.store(to + element);
    }
  }
}

namespace {

// Columns: kLanes neighbouring columns are across the lanes of every warp. The other lanes of a
// warp and all warps of the block are along the dimension, kPhases of them, so that kPhases
// consecutive elements of a column are read together. kWarps == 0: one thread owns a column alone,
// or kAcross neighbouring columns, whose elements one access moves.
template <int kLanes, int kWarps, int kAcross>
struct Tile {
  static constexpr bool kAlone = kWarps == 0;
  static constexpr int kBlock = kAlone ? kNarrowBlock : kWarps * 32;
  static constexpr int kColumns = kAlone ? kNarrowBlock : kLanes;
  static constexpr int kPhases = kAlone ? 1 : kWarps * (32 / kLanes);
  int64_t column;
  int phase;

  static_assert(kAlone || kAcross == 1, "threads that share columns share them one by one");

  __device__ Tile() {
    column = (int64_t(blockIdx.x) * kColumns + threadIdx.x % kColumns) * kAcross;
    phase = threadIdx.x / kColumns;
  }
};

// Reduces over the threads that share a column: first the lanes of the warp, then the warps.
template <Form kForm, int kLanes, int kWarps, typename Accumulator>
__device__ Finish<kForm, Accumulator> finish_column(Accumulator maximum, Accumulator sum) {
  if constexpr (kWarps == 0) return {{maximum, sum}, Accumulator(1)};
  __shared__ Partial<Accumulator> slots[kWarps == 0 ? 1 : kWarps][kLanes];
  const Accumulator own = maximum;
  maximum = lanes_maximum<kLanes, 16>(maximum);
  sum = lanes_sum<kLanes, 16>(sum * exponential(own - shift_for(maximum)));
  const int column = threadIdx.x % kLanes;
  if (threadIdx.x % 32 < kLanes) slots[threadIdx.x / 32][column] = {maximum, sum};
  __syncthreads();
  // Unrolled by 4: all 32 at once would spill the thread's part of its column.
  maximum = negative_infinity<Accumulator>();
#pragma unroll 4
  for (int i = 0; i < kWarps; ++i) maximum = larger(maximum, slots[i][column].maximum);
  sum = 0;
#pragma unroll 4
  for (int i = 0; i < kWarps; ++i)
    sum += slots[i][column].sum * exponential(slots[i][column].maximum - maximum);
  return {{maximum, sum}, exponential(own - maximum)};
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

// Softmax or log_softmax along `width` for `columns` columns. Column c is located by inner_count as
// rows are; consecutive elements are dim_stride apart in input and inner_count apart in the
// contiguous output.
// kRows > 0: width <= kRows * kPhases, terms stay in registers; kRows == 0: any width, read twice.
// grid = ceil(columns / (kColumns * kAcross)). kAcross > 1 needs inner_stride 1, and inner_count,
// the other strides and the tensors aligned to kAcross elements. With 16 elements of one column,
// 1536 threads must fit a multiprocessor, with 40 registers; of blocks of 1024 threads two must
// fit, which spills two to four words (float32 and bfloat16, 32-bit Index).
template <Form kForm, Aliasing kAliasing, typename Input, typename Output, int kRows, int kLanes,
          int kWarps, int kAcross, typename Index>
__global__ void __launch_bounds__(Tile<kLanes, kWarps, kAcross>::kBlock,
                                  kRows != 16 || sizeof(Output) == 8 || kAcross > 1 ? 1
                                  : kWarps == 32 ? 2 : 1536 / Tile<kLanes, kWarps, kAcross>::kBlock)
    forward_columns(const Input* input, Output* output, int64_t columns,
                    int64_t width, int64_t inner_count, int64_t outer_stride, int64_t inner_stride,
                    int64_t dim_stride) {
  using Accumulator = typename AccumulatorOf<Output>::type;
  using Where = Tile<kLanes, kWarps, kAcross>;
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
    Accumulator kept[kRows][kAcross];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Index element = tile.phase + i * Where::kPhases;
      Pack<Input, kAcross> value;
      value.fill(Convert<Input>::from(negative_infinity<float>()));
      if (element < end) value.template load<kAliasing == kApart>(from + element * from_stride);
#pragma unroll
      for (int j = 0; j < kAcross; ++j) kept[i][j] = widened<Output>(value, j);
    }
#pragma unroll
    for (int j = 0; j < kAcross; ++j) {
      maximum = negative_infinity<Accumulator>();
#pragma unroll
      for (int i = 0; i < kRows; ++i) maximum = larger(maximum, kept[i][j]);
      const Accumulator shift = shift_for(maximum);
      Accumulator sum = 0;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const Accumulator term = exponential_term<kForm, Output>(kept[i][j] - shift);
        if (kForm == kSoftmax) kept[i][j] = term;
        sum += term;
      }
      const auto finish = finish_column<kForm, kLanes, kWarps>(maximum, sum);
#pragma unroll
      for (int i = 0; i < kRows; ++i) kept[i][j] = finish(kept[i][j]);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Index element = tile.phase + i * Where::kPhases;
      Pack<Output, kAcross> result;
#pragma unroll
      for (int j = 0; j < kAcross; ++j) result.element[j] = Convert<Output>::from(kept[i][j]);
      if (element < end) result.store(to + element * to_stride);
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
        if (element < end)
          value[i] = widened<Output>(read<kAliasing == kApart>(from + element * from_stride));
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) larger_maximum = larger(larger_maximum, value[i]);
      const Accumulator shift = shift_for(larger_maximum);
      terms.scale(exponential(maximum - shift));
      maximum = larger_maximum;
      Accumulator of_tile = 0;
#pragma unroll
      for (int i = 0; i < kUnroll; ++i)
        of_tile += exponential_term<kForm, Output>(value[i] - shift);
      terms.add(of_tile);
    }
    const auto finish = finish_column<kForm, kLanes, kWarps>(maximum, terms.sum);
    const Accumulator shift = shift_for(maximum);
#pragma unroll 8
    for (Index element = tile.phase; element < end; element += Where::kPhases) {
      Accumulator kept = widened<Output>(read<kAliasing == kApart>(from + element * from_stride));
      if (kForm == kSoftmax) kept = exponential_term<kForm, Output>(kept - shift);
      to[element * to_stride] = Convert<Output>::from(finish(kept));
    }
  }
}

// The gradient along `width` for columns; output and grad_input are contiguous.
template <Form kForm, typename Grad, typename GradInput, int kRows, int kLanes, int kWarps,
          int kAcross, typename Index>
__global__ void __launch_bounds__(Tile<kLanes, kWarps, kAcross>::kBlock)
    backward_columns(const Grad* grad_output, const Grad* output,
                     GradInput* grad_input, int64_t columns, int64_t width,
                     int64_t inner_count, int64_t outer_stride, int64_t inner_stride,
                     int64_t dim_stride) {
  using Accumulator = typename AccumulatorOf<Grad>::type;
  using Where = Tile<kLanes, kWarps, kAcross>;
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
    Accumulator grad[kRows][kAcross], y[kRows][kAcross];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Index element = tile.phase + i * Where::kPhases;
      Pack<Grad, kAcross> of_grad, of_output;
      of_grad.fill(Convert<Grad>::from(0.0f));
      of_output.fill(Convert<Grad>::from(0.0f));
      if (element < end) {
        of_grad.template load<true>(grad_column + element * grad_stride);
        of_output.template load<true>(output_column + element * stride);
      }
#pragma unroll
      for (int j = 0; j < kAcross; ++j) {
        grad[i][j] = widened<Grad>(of_grad, j);
        y[i][j] = widened<Grad>(of_output, j);
      }
    }
#pragma unroll
    for (int j = 0; j < kAcross; ++j) {
      sum = 0;
#pragma unroll
      for (int i = 0; i < kRows; ++i) sum += summand<kForm>(grad[i][j], y[i][j]);
      sum = column_sum<kLanes, kWarps>(sum);
#pragma unroll
      for (int i = 0; i < kRows; ++i) grad[i][j] = gradient<kForm, Grad>(grad[i][j], y[i][j], sum);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Index element = tile.phase + i * Where::kPhases;
      Pack<GradInput, kAcross> result;
#pragma unroll
      for (int j = 0; j < kAcross; ++j) result.element[j] = Convert<GradInput>::from(grad[i][j]);
      if (element < end) result.store(to + element * stride);
    }
  } else {
    LongSum<Accumulator> products;
#pragma unroll 8
    for (Index element = tile.phase; element < end; element += Where::kPhases)
      products.add(summand<kForm>(widened<Grad>(__ldg(grad_column + element * grad_stride)),
                                  widened<Grad>(__ldg(output_column + element * stride))));
    sum = column_sum<kLanes, kWarps>(products.sum);
#pragma unroll 8
    for (Index element = tile.phase; element < end; element += Where::kPhases)
      to[element * stride] = Convert<GradInput>::from(
          gradient<kForm, Grad>(widened<Grad>(__ldg(grad_column + element * grad_stride)),
                          widened<Grad>(__ldg(output_column + element * stride)), sum));
  }
}

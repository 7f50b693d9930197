// Messages made of rows and rows of messages, each in one launch: a thread moves kMany elements, or
// one id. Every element is read once and written once; descriptions come from the cache.

#include "exchange_layout.h"

constexpr int kThreads = 256;

// Thread i of a row owns chunk i % chunks of target i / chunks, so that writes are coalesced.
template <class From, class To, int kMany>
__global__ void __launch_bounds__(kThreads)
gather(const From* from, To* to, const Target* targets, const Piece* pieces, int64_t rows,
       int count, int chunks, int64_t row_elements) {
  const int64_t at = int64_t(blockIdx.x) * kThreads + threadIdx.x, per_row = int64_t(count) * chunks;
  const int64_t row = at / per_row;
  if (row >= rows) return;
  const int item = int(at - row * per_row), target = item / chunks;
  gather_some<From, To, kMany>(from, to, targets[target], pieces, rows, row, row_elements,
                               (item - target * chunks) * kMany);
}

template <class From, class To, int kMany>
__global__ void __launch_bounds__(kThreads)
scatter(const From* from, To* to, const int64_t* columns, const Piece* pieces, int64_t rows,
        int count, int chunks, int64_t row_elements) {
  const int64_t at = int64_t(blockIdx.x) * kThreads + threadIdx.x, per_row = int64_t(count) * chunks;
  const int64_t row = at / per_row;
  if (row >= rows) return;
  const int item = int(at - row * per_row), piece = item / chunks;
  scatter_some<From, To, kMany>(from, to, pieces[piece], columns[piece], rows, row, row_elements,
                                (item - piece * chunks) * kMany);
}

template <class Id>
__global__ void __launch_bounds__(kThreads)
pack_ids(const Id* ids, uint16_t* to, const int64_t* columns, const int64_t* are_long,
         const Piece* pieces, int64_t rows, int count, int64_t row_elements) {
  const int64_t at = int64_t(blockIdx.x) * kThreads + threadIdx.x, row = at / count;
  if (row >= rows) return;
  const int piece = int(at - row * count);
  pack_id(ids[row * row_elements + columns[piece]], to + begin_of(pieces[piece], rows, row),
          are_long[piece]);
}

__global__ void __launch_bounds__(kThreads)
unpack_ids(const uint16_t* from, int32_t* ids, const int64_t* places, const int64_t* are_long,
           const int64_t* first_rows, int64_t rows, int count, int64_t units) {
  const int64_t at = int64_t(blockIdx.x) * kThreads + threadIdx.x, row = at / count;
  if (row >= rows) return;
  const int block = int(at - row * count);
  ids[at] = unpacked_id(from + row * units + places[block], are_long[block]) -
            int32_t(first_rows[block]);
}

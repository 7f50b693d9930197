// Messages made of rows and rows of messages: rows are divided among threads.

#include "exchange_layout.h"

template <class From, class To, int kMany>
void gather(const From* from, To* to, const Target* targets, const Piece* pieces, int64_t rows,
            int32_t count, int32_t chunks, int64_t row_elements) {
#pragma omp parallel for if (rows * count > 4096)
  for (int64_t row = 0; row < rows; ++row) {
    for (int target = 0; target < count; ++target) {
      for (int chunk = 0; chunk < chunks; ++chunk)
        gather_some<From, To, kMany>(from, to, targets[target], pieces, rows, row, row_elements,
                                     chunk * kMany);
    }
  }
}

template <class From, class To, int kMany>
void scatter(const From* from, To* to, const int64_t* columns, const Piece* pieces, int64_t rows,
             int32_t count, int32_t chunks, int64_t row_elements) {
#pragma omp parallel for if (rows * count > 4096)
  for (int64_t row = 0; row < rows; ++row) {
    for (int piece = 0; piece < count; ++piece) {
      for (int chunk = 0; chunk < chunks; ++chunk)
        scatter_some<From, To, kMany>(from, to, pieces[piece], columns[piece], rows, row,
                                      row_elements, chunk * kMany);
    }
  }
}

template <class Id>
void pack_ids(const Id* ids, uint16_t* to, const int64_t* columns, const int64_t* are_long,
              const Piece* pieces, int64_t rows, int32_t count, int64_t row_elements) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int piece = 0; piece < count; ++piece)
      pack_id(ids[row * row_elements + columns[piece]], to + begin_of(pieces[piece], rows, row),
              are_long[piece]);
  }
}

void unpack_ids(const uint16_t* from, int32_t* ids, const int64_t* places, const int64_t* are_long,
                const int64_t* first_rows, int64_t rows, int32_t count, int64_t units) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int block = 0; block < count; ++block)
      ids[row * count + block] =
          unpacked_id(from + row * units + places[block], are_long[block]) -
          int32_t(first_rows[block]);
  }
}

// Vocabulary look-up: a binary search in each column's sorted keys. Rows are divided among threads.

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

template <class Id>
void look_up(const Id* ids, const int64_t* keys, const int64_t* slots, const int64_t* offsets,
             int64_t* output, int64_t rows, int64_t columns, int64_t row_stride,
             int64_t column_stride, int64_t key_count) {
  for (int64_t column = 0; column <= columns; ++column) {
    const int64_t begin = offsets[column], end = column < columns ? offsets[column + 1] : key_count;
    if (begin >= 0 && begin <= end) continue;
    throw std::invalid_argument("vocabulary_indices: 'offsets' has " + std::to_string(begin) +
                                " in place " + std::to_string(column) + " before " +
                                std::to_string(end) + "; expected places that rise from 0 to the " +
                                std::to_string(key_count) + " keys.");
  }
#pragma omp parallel for if (rows * columns > 4096)
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; ++column) {
      const int64_t id = ids[row * row_stride + column * column_stride];
      const int64_t* end = keys + offsets[column + 1];
      const int64_t* found = std::lower_bound(keys + offsets[column], end, id);
      output[row * columns + column] = found != end && *found == id
                                           ? slots[found - keys]
                                           : offsets[column + 1] - offsets[column];
    }
  }
}

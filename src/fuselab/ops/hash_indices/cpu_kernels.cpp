// Hashes ids by their modulus: rows are divided among threads.

#include <cstdint>
#include <stdexcept>
#include <string>

#include "../_shared/modulus.h"

template <class Id>
void hash(const Id* ids, const int64_t* cardinalities, int64_t* output, int64_t rows,
          int64_t columns, int64_t row_stride, int64_t column_stride) {
  for (int64_t column = 0; column < columns; ++column) {
    if (cardinalities[column] < 1) {
      throw std::invalid_argument("hash_indices: 'cardinalities' has " +
                                  std::to_string(cardinalities[column]) + " for column " +
                                  std::to_string(column) + "; expected 1 or more.");
    }
  }
#pragma omp parallel for if (rows * columns > 16384)
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; ++column) {
      output[row * columns + column] =
          modulus(ids[row * row_stride + column * column_stride], cardinalities[column]);
    }
  }
}

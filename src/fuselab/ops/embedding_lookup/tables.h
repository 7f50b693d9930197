// Embedding tables for the kernels: a struct that is passed by value, so nothing is copied before.
#pragma once

#include <cstdint>

#include "../_shared/modulus.h"

// The meaning of an id that is no row. The first three are out_of_range, the last hash="modulus".
enum class Rule { error, clamp, ignore, modulus };

template <int capacity>
struct Tables {
  int64_t address[capacity];  // of the first row; 0: do not touch this table
  int64_t pitch[capacity];    // bytes from row to row
  int64_t rows[capacity];
  int64_t first[capacity];    // rows of all tables before: the key of row 0
  int64_t state[capacity];    // address of one number per row, for row-wise Adagrad
};

// Returns the row that an id selects, -1 for none (an error if the rule says so).
template <Rule rule>
FUSELAB_BOTH int64_t row_of(int64_t id, int64_t rows) {
  if constexpr (rule == Rule::modulus) return modulus(id, rows);
  if constexpr (rule == Rule::clamp) return id < 0 ? 0 : id < rows ? id : rows - 1;
  return static_cast<uint64_t>(id) < static_cast<uint64_t>(rows) ? id : -1;
}

// Embedding look-up over many tables, and the change that its gradient makes to them, on the CPU.
//
// Look-up: samples are divided among threads. Change: a task is one part of one table's rows. It
// collects the samples whose ids are in its part, sorts them by row, and adds every row's gradients
// in the samples' order, so that results depend neither on threads nor on parts. Nothing is written
// before every id is known to be valid.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "tables.h"

constexpr int kCapacity = 256;
enum class Update { gradient, sgd, rowwise_adagrad };

struct bfloat16 {
  uint16_t bits;
};

namespace {

template <class Element>
struct ComputeOf {
  using type = float;
};
template <>
struct ComputeOf<double> {
  using type = double;
};
template <class Element>
using Compute = typename ComputeOf<Element>::type;

inline float widened(float x) { return x; }
inline double widened(double x) { return x; }
inline float widened(_Float16 x) { return static_cast<float>(x); }
inline float widened(bfloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline void assign(float& to, float x) { to = x; }
inline void assign(double& to, double x) { to = x; }
inline void assign(_Float16& to, float x) { to = static_cast<_Float16>(x); }
inline void assign(bfloat16& to, float x) {  // to nearest even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  to.bits = x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
}

// Throws the user's error for the first id that is no row.
template <Rule rule, class Id>
void check(const Id* ids, int64_t batch, int64_t tables, int64_t sample_stride,
           int64_t table_stride, int64_t first_table, const Tables<kCapacity>& description) {
  if constexpr (rule != Rule::error) return;
  std::atomic<int64_t> first = batch * tables;
#pragma omp parallel for if (batch * tables > 65536)
  for (int64_t sample = 0; sample < batch; ++sample) {
    for (int64_t table = 0; table < tables; ++table) {
      const int64_t id = ids[sample * sample_stride + table * table_stride];
      if (row_of<rule>(id, description.rows[table]) >= 0) continue;
      const int64_t position = sample * tables + table;
      int64_t known = first;
      while (position < known && !first.compare_exchange_weak(known, position)) {
      }
    }
  }
  if (first == batch * tables) return;
  const int64_t sample = first / tables, table = first % tables;
  throw std::out_of_range(
      "embedding: 'ids' has " +
      std::to_string(static_cast<int64_t>(ids[sample * sample_stride + table * table_stride])) +
      " in sample " + std::to_string(sample) + " for table " + std::to_string(first_table + table) +
      ", which has " + std::to_string(description.rows[table]) +
      " rows; out_of_range='clamp', 'ignore' and hash='modulus' take such ids.");
}

struct Entry {
  int64_t row;
  int64_t sample;
};

// Sorts by row and keeps the samples' order: a radix sort by as many digits as `most` has.
void sort_by_row(std::vector<Entry>& entries, std::vector<Entry>& other, int64_t most) {
  if (entries.size() < 512) {
    std::stable_sort(entries.begin(), entries.end(),
                     [](const Entry& a, const Entry& b) { return a.row < b.row; });
    return;
  }
  constexpr int kBits = 11;
  other.resize(entries.size());
  for (int shift = 0; shift < 63 && most >> shift > 0; shift += kBits) {
    int64_t places[(1 << kBits) + 1] = {};
    for (const Entry& entry : entries) ++places[(entry.row >> shift & ((1 << kBits) - 1)) + 1];
    for (int digit = 0; digit < 1 << kBits; ++digit) places[digit + 1] += places[digit];
    for (const Entry& entry : entries) {
      other[places[entry.row >> shift & ((1 << kBits) - 1)]++] = entry;
    }
    entries.swap(other);
  }
}

}  // namespace

// Checks the ids before the first of several groups of tables changes.
template <class Id, Rule rule>
void check_group(const Id* ids, int64_t batch, int64_t tables, int64_t id_sample_stride,
                 int64_t id_table_stride, int64_t first_table, Tables<kCapacity> description) {
  check<rule>(ids, batch, tables, id_sample_stride, id_table_stride, first_table, description);
}

template <class Element, class Output, class Id, Rule rule>
void look_up(const Id* ids, Output* output, int64_t batch, int64_t tables, int64_t width,
             int64_t id_sample_stride, int64_t id_table_stride, int64_t output_sample_stride,
             int64_t first_table, Tables<kCapacity> description) {
  check<rule>(ids, batch, tables, id_sample_stride, id_table_stride, first_table, description);
#pragma omp parallel for if (batch * tables * width * sizeof(Output) > 65536)
  for (int64_t sample = 0; sample < batch; ++sample) {
    Output* target = output + sample * output_sample_stride;
    for (int64_t table = 0; table < tables; ++table, target += width) {
      const int64_t id = ids[sample * id_sample_stride + table * id_table_stride];
      const int64_t row = row_of<rule>(id, description.rows[table]);
      if (row < 0) {
        std::memset(target, 0, width * sizeof(Output));
        continue;
      }
      const auto* source = reinterpret_cast<const Element*>(description.address[table] +
                                                            row * description.pitch[table]);
      if constexpr (std::is_same_v<Element, Output>) {
        std::memcpy(target, source, width * sizeof(Output));
      } else {
        for (int64_t i = 0; i < width; ++i) assign(target[i], widened(source[i]));
      }
    }
  }
}

template <class Element, class Gradient, class Id, Rule rule, Update update>
void change(const Id* ids, const Gradient* grad_output, int64_t batch, int64_t tables, int64_t width,
            int64_t id_sample_stride, int64_t id_table_stride, int64_t grad_sample_stride,
            int64_t grad_table_stride, Compute<Element> learning_rate, Compute<Element> eps,
            int64_t parts, int64_t first_table, Tables<kCapacity> description) {
  using Number = Compute<Element>;
  check<rule>(ids, batch, tables, id_sample_stride, id_table_stride, first_table, description);
#pragma omp parallel if (batch * tables * width > 16384)
  {
    std::vector<Entry> entries, other;
    std::vector<double> sum(width);  // in float, 2048 times 1.1 would be 57 ulp off
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < tables * parts; ++task) {
      const int64_t table = task / parts, part = task % parts;
      const int64_t rows = description.rows[table];
      if (description.address[table] == 0) continue;
      const int64_t each = (rows + parts - 1) / parts, low = part * each;
      entries.clear();
      for (int64_t sample = 0; sample < batch; ++sample) {
        const int64_t id = ids[sample * id_sample_stride + table * id_table_stride];
        const int64_t row = row_of<rule>(id, rows);
        if (row >= low && row < low + each) entries.push_back({row - low, sample});
      }
      sort_by_row(entries, other, each);
      for (std::size_t begin = 0; begin < entries.size();) {
        const int64_t row = low + entries[begin].row;
        std::fill(sum.begin(), sum.end(), 0.0);
        for (; begin < entries.size() && low + entries[begin].row == row; ++begin) {
          const Gradient* grad = grad_output + entries[begin].sample * grad_sample_stride +
                                table * grad_table_stride;
          for (int64_t i = 0; i < width; ++i) sum[i] += widened(grad[i]);
        }
        auto* weights = reinterpret_cast<Element*>(description.address[table] +
                                                   row * description.pitch[table]);
        if constexpr (update == Update::gradient) {
          for (int64_t i = 0; i < width; ++i) assign(weights[i], Number(sum[i]));
          continue;
        }
        Number factor = learning_rate;
        if constexpr (update == Update::rowwise_adagrad) {
          auto* state = reinterpret_cast<Number*>(description.state[table]) + row;
          // Added one by one in float, 513 squares would be 8 ulp off.
          double squares[8] = {};
          for (int64_t i = 0; i < width; ++i) squares[i % 8] += sum[i] * sum[i];
          *state += Number(std::accumulate(squares, squares + 8, 0.0) / width);
          factor /= std::sqrt(*state) + eps;
        }
        for (int64_t i = 0; i < width; ++i) {
          assign(weights[i], widened(weights[i]) - factor * Number(sum[i]));
        }
      }
    }
  }
}

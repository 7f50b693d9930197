// The loops of a sweep in C++, as fuselab/runtime/sweep.py and cpp_sweep.py lay them out in Python.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

namespace fuselab::native {

constexpr int kRowLoops = 4, kColumnLoops = 3;  // the most loops that a kernel has
constexpr int64_t kNarrow = 32, kFew = 8;       // NARROW and FEW of cpp_sweep.py
constexpr int kChosen = -1;  // in place of an axis: the kernel computes the position itself

using Sizes = std::vector<int64_t>;
using Axes = std::vector<std::vector<int>>;  // for each dimension its axes, outermost first

// An operand: its tensor, undefined for one that stands for the position, and its dimensions.
struct Operand {
  at::Tensor tensor;
  Axes dims;
};

// Loop sizes, outermost first, and for each operand its strides in elements.
struct Nest {
  Sizes sizes;
  std::vector<Sizes> strides;

  int64_t numel() const {
    return std::accumulate(sizes.begin(), sizes.end(), int64_t(1), std::multiplies<>());
  }
};

// Merges neighbouring loops that every operand walks with one step; steps[loop][operand].
inline Nest merged(const Sizes& sizes, const std::vector<Sizes>& steps, size_t operands) {
  Sizes loops;
  std::vector<Sizes> kept;
  for (size_t at = 0; at < sizes.size(); ++at) {
    bool joins = !kept.empty();
    for (size_t place = 0; joins && place < operands; ++place) {
      joins = kept.back()[place] == steps[at][place] * sizes[at];
    }
    if (joins) {
      loops.back() *= sizes[at];
      kept.back() = steps[at];
    } else {
      loops.push_back(sizes[at]);
      kept.push_back(steps[at]);
    }
  }
  if (loops.empty()) {
    loops = {1};
    kept = {Sizes(operands, 0)};
  }
  Nest nest{loops, std::vector<Sizes>(operands)};
  for (size_t place = 0; place < operands; ++place) {
    for (const Sizes& step : kept) nest.strides[place].push_back(step[place]);
  }
  return nest;
}

class Sweep {
 public:
  // The first `rows` axes are those of the rows; the first `read` operands are read.
  Sweep(const Sizes& sizes, int rows, std::vector<Operand> operands, int read, bool in_order)
      : sizes_(sizes), row_axes_(rows), read_(read), in_order_(in_order), order_(sizes.size()) {
    std::iota(order_.begin(), order_.end(), 0);
    lay_out(operands);
    if (is_too_deep()) {
      for (int place = 0; place < read; ++place) {
        if (operands[place].tensor.defined()) {
          operands[place].tensor = operands[place].tensor.contiguous();
        }
      }
      lay_out(operands);
    }
    if (is_too_deep()) {
      put_positions_together(operands);
      for (int place = 0; place < read; ++place) operands[place] = repeated(operands[place]);
      lay_out(operands);
    }
    TORCH_CHECK(!is_too_deep(), "the operands' layouts need ", rows_.sizes.size(),
                " loops over rows and ", columns_.sizes.size(), " over columns; a kernel has ",
                kRowLoops, " and ", kColumnLoops, ".");
    for (const Operand& operand : operands) {
      if (operand.tensor.defined()) tensors_.push_back(operand.tensor);
    }
    order_rows_by_result();
  }

  // Calls launch(lanes_are_rows, data, steps, loops): the operands' addresses, the strides of the
  // dimensions along which the kernel computes the position, and the numbers of its Loops.
  template <class Launch>
  void run(Launch launch) const {
    std::vector<void*> data;
    for (const at::Tensor& tensor : tensors_) data.push_back(tensor.data_ptr());
    const Sizes loops = numbers();
    launch(lanes_are_rows(), data.data(), steps_.data(), loops.data());
  }

 private:
  void lay_out(const std::vector<Operand>& operands) {
    const size_t axes = sizes_.size();
    // A step of -1 says that an operand does not have the axis.
    std::vector<Sizes> steps(operands.size(), Sizes(axes, -1));
    steps_.clear();
    for (size_t place = 0; place < operands.size(); ++place) {
      const auto& [tensor, dims] = operands[place];
      if (!tensor.defined()) {
        int64_t step = 1;
        for (auto dim = dims.rbegin(); dim != dims.rend(); ++dim) {
          for (auto axis = dim->rbegin(); axis != dim->rend(); ++axis) {
            steps[place][*axis] = step;
            step *= sizes_[*axis];
          }
        }
        continue;
      }
      TORCH_CHECK(static_cast<size_t>(tensor.dim()) == dims.size(), "an operand has ",
                  tensor.dim(), " dimensions, the kernel takes ", dims.size(), ".");
      for (size_t dim = 0; dim < dims.size(); ++dim) {
        if (dims[dim] == std::vector<int>{kChosen}) {
          steps_.push_back(tensor.stride(dim));
          continue;
        }
        int64_t step = tensor.stride(dim), expected = 1;
        for (auto axis = dims[dim].rbegin(); axis != dims[dim].rend(); ++axis) {
          int64_t& held = steps[place][*axis];
          held = (held < 0 ? 0 : held) + step;
          step *= sizes_[*axis];
          expected *= sizes_[*axis];
        }
        TORCH_CHECK(tensor.size(dim) == expected, "dimension ", dim, " of an operand is ",
                    tensor.size(dim), ", the kernel takes ", expected, ".");
      }
    }
    rows_ = collapsed(0, row_axes_, steps);
    columns_ = collapsed(row_axes_, axes, steps);
    if (static_cast<size_t>(row_axes_) == axes) innermost_apart(operands.size());
  }

  bool is_too_deep() const {
    return rows_.sizes.size() > kRowLoops || columns_.sizes.size() > kColumnLoops;
  }

  Nest collapsed(size_t first, size_t last, const std::vector<Sizes>& steps) const {
    std::vector<size_t> order;
    for (size_t at = first; at < last; ++at) {
      const size_t axis = order_[at];
      if (sizes_[axis] == 0) return {{0}, std::vector<Sizes>(steps.size(), {0})};
      if (sizes_[axis] != 1) order.push_back(axis);
    }
    const bool sorts = !in_order_ || first == 0;
    if (sorts && !steps.empty()) {
      const auto count = [&](const Sizes& own) {
        return std::count_if(own.begin() + first, own.begin() + last,
                             [](int64_t step) { return step >= 0; });
      };
      const auto guide = std::max_element(
          steps.begin(), steps.end(),
          [&](const Sizes& one, const Sizes& other) { return count(one) < count(other); });
      std::stable_sort(order.begin(), order.end(), [&](size_t one, size_t other) {
        return std::max<int64_t>((*guide)[one], 0) > std::max<int64_t>((*guide)[other], 0);
      });
    }
    Sizes loops;
    std::vector<Sizes> loop_steps;
    for (size_t axis : order) {
      loops.push_back(sizes_[axis]);
      Sizes& own = loop_steps.emplace_back();
      for (const Sizes& operand : steps) own.push_back(std::max<int64_t>(operand[axis], 0));
    }
    return merged(loops, loop_steps, steps.size());
  }

  // Makes the innermost loop over rows the columns, for a kernel that names rows only; several where
  // the others would be more than a kernel has over rows.
  void innermost_apart(size_t operands) {
    const size_t more = rows_.sizes.size() > kRowLoops ? rows_.sizes.size() - kRowLoops : 1;
    const size_t kept = rows_.sizes.size() - std::min<size_t>(more, kColumnLoops);
    columns_ = {{rows_.sizes.begin() + kept, rows_.sizes.end()}, {}};
    for (Sizes& strides : rows_.strides) {
      columns_.strides.emplace_back(strides.begin() + kept, strides.end());
      strides.resize(kept);
    }
    rows_.sizes.resize(kept);
    if (rows_.sizes.empty()) rows_ = {{1}, std::vector<Sizes>(operands, {0})};
  }

  // Orders the axes such that those of each position are neighbours, as far as no axis belongs to
  // two: there is no copy of a position that could have other loops.
  void put_positions_together(const std::vector<Operand>& operands) {
    const int axes = static_cast<int>(sizes_.size());
    std::vector<int> order;
    const auto add = [&](int axis) {
      if (std::count(order.begin(), order.end(), axis) == 0) order.push_back(axis);
    };
    for (const auto& [first, last] : {std::pair(0, row_axes_), std::pair(row_axes_, axes)}) {
      for (int axis = first; axis < last; ++axis) {
        if (!in_order_ || first == 0) {
          for (int place = 0; place < read_; ++place) {
            std::vector<int> own;
            for (const auto& dim : operands[place].dims) {
              own.insert(own.end(), dim.begin(), dim.end());
            }
            if (operands[place].tensor.defined() || !std::count(own.begin(), own.end(), axis)) {
              continue;
            }
            if (std::count(order.begin(), order.end(), axis) == 0) {
              for (int one : own) {
                if (first <= one && one < last) add(one);
              }
            }
            break;
          }
        }
        add(axis);
      }
    }
    order_ = order;
  }

  // Returns a copy with all axes of the loops, over rows or over columns, of which it has one.
  Operand repeated(const Operand& operand) const {
    if (!operand.tensor.defined()) return operand;
    std::vector<int> own;
    for (const auto& dim : operand.dims) own.insert(own.end(), dim.begin(), dim.end());
    const auto has = [&](int axis) { return std::count(own.begin(), own.end(), axis) > 0; };
    if (has(kChosen)) return operand;
    const int axes = static_cast<int>(sizes_.size());
    std::vector<int> all;
    for (const auto& [first, last] : {std::pair(0, row_axes_), std::pair(row_axes_, axes)}) {
      bool any = false;
      for (int axis = first; axis < last; ++axis) any = any || has(axis);
      for (int at = first; any && at < last; ++at) all.push_back(order_[at]);
    }
    Sizes split, ordered, shape, whole;
    for (int axis : own) split.push_back(sizes_[axis]);
    for (int axis : all) {
      if (has(axis)) ordered.push_back(std::find(own.begin(), own.end(), axis) - own.begin());
      shape.push_back(has(axis) ? sizes_[axis] : 1);
      whole.push_back(sizes_[axis]);
    }
    Operand result{operand.tensor.reshape(split).permute(ordered).reshape(shape).expand(whole)
                       .contiguous(),
                   {}};
    for (int axis : all) result.dims.push_back({axis});
    return result;
  }

  // Orders the loops over rows as the first result with an element per column lies in memory.
  void order_rows_by_result() {
    for (size_t place = read_; place < rows_.strides.size(); ++place) {
      const Sizes& across = columns_.strides[place];
      if (std::none_of(across.begin(), across.end(), [](int64_t step) { return step != 0; })) {
        continue;
      }
      std::vector<size_t> order(rows_.sizes.size());
      std::iota(order.begin(), order.end(), 0);
      const Sizes guide = rows_.strides[place];
      std::stable_sort(order.begin(), order.end(),
                       [&](size_t one, size_t other) { return guide[one] > guide[other]; });
      const auto ordered = [&](const Sizes& from) {
        Sizes result;
        for (size_t loop : order) result.push_back(from[loop]);
        return result;
      };
      rows_.sizes = ordered(rows_.sizes);
      for (Sizes& strides : rows_.strides) strides = ordered(strides);
      return;
    }
  }

  bool lanes_are_rows() const {
    if (rows_.sizes.back() < kFew && kFew <= columns_.sizes.back()) return false;
    if (columns_.numel() <= kNarrow && kNarrow <= rows_.sizes.back()) return true;
    for (size_t place = 0; place < rows_.strides.size(); ++place) {
      if (rows_.strides[place].back() == 1 && columns_.strides[place].back() > 1) return true;
    }
    return false;
  }

  static Sizes padded(const Sizes& from, int count, int64_t filler) {
    Sizes result(count - from.size(), filler);
    result.insert(result.end(), from.begin(), from.end());
    return result;
  }

  Sizes numbers() const {
    const Sizes rows = padded(rows_.sizes, kRowLoops, 1);
    const Sizes columns = padded(columns_.sizes, kColumnLoops, 1);
    Sizes result{rows_.numel()};
    result.insert(result.end(), rows.begin() + 1, rows.end());
    result.push_back(columns_.numel());
    result.insert(result.end(), columns.begin() + 1, columns.end());
    for (size_t place = 0; place < rows_.strides.size(); ++place) {
      for (int64_t step : padded(rows_.strides[place], kRowLoops, 0)) result.push_back(step);
      for (int64_t step : padded(columns_.strides[place], kColumnLoops, 0)) result.push_back(step);
    }
    return result;
  }

  Sizes sizes_;
  int row_axes_, read_;
  bool in_order_;
  std::vector<int> order_;  // of the axes
  Nest rows_, columns_;
  std::vector<at::Tensor> tensors_;
  Sizes steps_;
};

}  // namespace fuselab::native

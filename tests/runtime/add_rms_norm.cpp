// A residual and its RMS norm, forward and backward, for tests of operators with several outputs.
// Every row is `width` contiguous elements. `eps` is *eps_pointer where that is given.
#include <cmath>
#include <cstdint>

template <typename T>
double reciprocal_rms(const T* row, int64_t width, double eps) {
  double squares = 0;
  for (int64_t i = 0; i < width; ++i) squares += static_cast<double>(row[i]) * row[i];
  return 1 / std::sqrt(squares / width + eps);
}

template <typename T>
void forward(const T* input, const T* residual, const T* weight, T* hidden, T* normed, bool* large,
             int64_t rows, int64_t width, const T* eps_pointer, double eps) {
  if (eps_pointer != nullptr) eps = *eps_pointer;
  for (int64_t begin = 0; begin < rows * width; begin += width) {
    for (int64_t i = begin; i < begin + width; ++i) hidden[i] = input[i] + residual[i];
    const double scale = reciprocal_rms(hidden + begin, width, eps);
    for (int64_t i = 0; i < width; ++i) {
      normed[begin + i] = static_cast<T>(hidden[begin + i] * scale * weight[i]);
      large[begin + i] = hidden[begin + i] > 1;
    }
  }
}

// A null pointer where a gradient is not needed. grad_weight is zero at first.
template <typename T>
void backward(const T* grad_hidden, const T* grad_normed, const T* hidden, const T* weight,
              T* grad_input, T* grad_residual, T* grad_weight, int64_t rows, int64_t width,
              const T* eps_pointer, double eps) {
  if (eps_pointer != nullptr) eps = *eps_pointer;
  if (grad_weight != nullptr) {
    for (int64_t column = 0; column < width; ++column) {
      double sum = 0;
      for (int64_t row = 0; row < rows; ++row) {
        const int64_t place = row * width + column;
        const double scale = reciprocal_rms(hidden + row * width, width, eps);
        sum += static_cast<double>(grad_normed[place]) * hidden[place] * scale;
      }
      grad_weight[column] = static_cast<T>(sum);
    }
  }
  for (int64_t begin = 0; begin < rows * width; begin += width) {
    const double scale = reciprocal_rms(hidden + begin, width, eps);
    double product = 0;
    for (int64_t i = 0; i < width; ++i) {
      product += static_cast<double>(grad_normed[begin + i]) * weight[i] * hidden[begin + i];
    }
    for (int64_t i = 0; i < width; ++i) {
      const double through = scale * grad_normed[begin + i] * weight[i] -
                             hidden[begin + i] * scale * scale * scale * product / width;
      const T total = static_cast<T>(grad_hidden[begin + i] + through);
      if (grad_input != nullptr) grad_input[begin + i] = total;
      if (grad_residual != nullptr) grad_residual[begin + i] = total;
    }
  }
}

// The operator against PyTorch's own operators, from C++: 8 x 10, edges, and sizes past every block.
//
//     native_test            every size, on the CPU, and on the GPU where there is one
#include <torch/torch.h>

#include <iostream>

namespace {

at::Tensor ours(const at::Tensor& input, const at::Tensor& update,
                const std::optional<at::Tensor>& bias, double scale, const std::string& activation) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("fuselab_extension::add_mul_activation", "")
          .typed<at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                            double, std::string_view)>();
  return op.call(input, update, bias, scale, activation);
}

// Largest error of one row in units of the last place of that row's largest magnitude.
double worst_ulp(const at::Tensor& actual, const at::Tensor& exact) {
  if (actual.numel() == 0) return 0.0;
  const double epsilon = actual.scalar_type() == at::kDouble     ? 2.3e-16
                         : actual.scalar_type() == at::kFloat    ? 1.2e-7
                         : actual.scalar_type() == at::kHalf     ? 9.8e-4
                                                                 : 7.9e-3;
  const at::Tensor error = (actual.to(at::kDouble) - exact).abs().amax(-1);
  return (error / (exact.abs().amax(-1).clamp_min(1e-30) * epsilon)).max().item<double>();
}

bool check(int64_t rows, int64_t columns, at::Device device, at::ScalarType dtype) {
  const auto options = at::TensorOptions().dtype(dtype).device(device);
  auto leaf = [&](at::IntArrayRef shape) {
    return at::randn(shape, at::kDouble).to(options).requires_grad_();
  };
  const at::Tensor input = leaf({rows, columns}), update = leaf({rows, columns});
  const at::Tensor bias = leaf({columns});
  const at::Tensor output = ours(input, update, bias, 0.5, "relu");
  const at::Tensor upstream = at::randn({rows, columns}, at::kDouble).to(options);
  const auto grads = torch::autograd::grad({output}, {input, update, bias}, {upstream});

  const auto wide = [](const at::Tensor& tensor) {
    return tensor.detach().to(at::kDouble).requires_grad_();
  };
  const at::Tensor x = wide(input), d = wide(update), b = wide(bias);
  const at::Tensor exact = at::relu(x + 0.5 * d + b);
  const auto exact_grads =
      torch::autograd::grad({exact}, {x, d, b}, {upstream.to(at::kDouble)});

  bool right = worst_ulp(output, exact) <= 3.0;
  // A pre-activation within rounding of 0 may fall on either side of ReLU's kink.
  const at::Tensor decided = ((x + 0.5 * d + b).abs() > 1e-2).to(at::kDouble);
  for (int place = 0; place < 2; ++place) {
    right &= worst_ulp(grads[place] * decided.to(dtype), exact_grads[place] * decided) <= 2.0;
  }
  const double sum_error = (grads[2].to(at::kDouble) - grads[0].to(at::kDouble).sum(0)).abs()
                               .sum().item<double>();
  const double bound = grads[0].to(at::kDouble).abs().sum().item<double>() *
                       (dtype == at::kDouble ? 1e-13 : dtype == at::kFloat ? 1e-5 : 1e-2);
  right &= sum_error <= bound + 1e-12;
  std::cout << (right ? "ok    " : "WRONG ") << rows << " x " << columns << " " << dtype << " "
            << device << "\n";
  return right;
}

}  // namespace

int main() {
  torch::manual_seed(0);
  std::vector<at::Device> devices = {at::kCPU};
  if (torch::cuda::is_available()) devices.emplace_back(at::kCUDA, 0);
  bool right = true;
  for (const at::Device& device : devices) {
    for (const auto& [rows, columns] : std::initializer_list<std::pair<int64_t, int64_t>>{
             {0, 8}, {3, 0}, {1, 1}, {8, 10}, {128, 8}, {33, 1025}, {4096, 1023}, {65536, 64}}) {
      for (const auto dtype : {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble}) {
        right &= check(rows, columns, device, dtype);
      }
    }
    if (device.is_cuda()) right &= check(262144, 1024, device, at::kFloat);
  }
  std::cout << (right ? "all right\n" : "something is wrong\n");
  return right ? 0 : 1;
}

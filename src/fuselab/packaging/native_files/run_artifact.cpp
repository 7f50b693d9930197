// Runs an AOTInductor artifact of a model with these operators, without Python:
//
//     run_artifact model.pt2 inputs.pt outputs.pt
//
// inputs.pt is a list of tensors that torch.save wrote; outputs.pt is a tuple for torch.load.
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <ATen/core/Tensor.h>

#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

std::vector<char> read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path + " cannot be read");
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

void run(const std::string& artifact, const std::string& from, const std::string& to) {
  torch::inductor::AOTIModelPackageLoader loader(artifact);
  const c10::IValue given = torch::jit::pickle_load(read(from));
  std::vector<at::Tensor> inputs;
  for (const c10::IValue& value : given.toListRef()) {
    inputs.push_back(value.toTensor());
  }
  const std::vector<at::Tensor> outputs = loader.run(inputs);
  std::vector<c10::IValue> values;  // as a tuple, which torch.load reads with weights_only
  for (const at::Tensor& output : outputs) {
    std::cout << output.scalar_type() << " " << output.sizes() << "\n";
    values.emplace_back(output);
  }
  const std::vector<char> bytes = torch::jit::pickle_save(c10::ivalue::Tuple::create(values));
  std::ofstream file(to, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (!file) throw std::runtime_error(to + " cannot be written");
}

}  // namespace

int main(int count, char** words) {
  if (count != 4) {
    std::cerr << "run_artifact model.pt2 inputs.pt outputs.pt\n";
    return 2;
  }
  try {
    run(words[1], words[2], words[3]);
  } catch (const c10::Error& error) {
    std::cerr << "run_artifact: " << error.what_without_backtrace() << "\n";
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "run_artifact: " << error.what() << "\n";
    return 1;
  }
  return 0;
}

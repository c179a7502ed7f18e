// Sweeps the weights of the file argv[2] with the server at argv[1] over two
// specs. Prints the error of each on each tensor, and what a budget of 6 bits
// for each element chooses.
// Then lists the tensors of argv[3], which quantctl quantized.

#include <quantd/client.h>
#include <quantd/models.h>

#include <iostream>
#include <vector>

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  quantd::ClientOptions options;
  options.target = argv[1];
  const auto client = quantd::Client::Connect(options);
  const auto input = quantd::TensorInput::Open(argv[2]);
  if (!client.ok() || !input.ok()) return 1;
  const std::vector<quantd::SpecTemplate> specs = {
      *quantd::ParseSpec("int8:per-channel"),
      *quantd::ParseSpec("int4:group:32")};
  const auto sweep = quantd::SweepTensors(
      quantd::WeightsOf(*input), specs,
      {{quantd::Budget::Kind::kMaxBitsPerElement, 6}}, client->get());
  if (!sweep.ok()) {
    std::cerr << sweep.status() << "\n";
    return 1;
  }
  for (const quantd::MeasuredTensor& tensor : sweep->tensors) {
    std::cout << tensor.tensor->name;
    for (const quantd::MeasuredCandidate& candidate : tensor.candidates) {
      std::cout << " " << candidate.size_bytes << " "
                << candidate.metrics.sqnr_db();
    }
    std::cout << "\n";
  }
  for (const auto& choice : sweep->mixtures[0].choices()) {
    std::cout << choice.tensor() << "=" << choice.spec_index() << "\n";
  }
  const auto quantized = quantd::TensorInput::Open(argv[3]);
  if (!quantized.ok()) return 1;
  const auto tensors = quantd::ReadAllQuantized(*quantized, argv[3]);
  if (!tensors.ok()) return 1;
  for (const quantd::QuantizedTensor& tensor : *tensors) {
    std::cout << tensor.name << ": "
              << quantd::FormatName(tensor.encoding.format()) << " "
              << tensor.codes.size() << " " << tensor.Whole().scale_size()
              << "\n";
  }
  return 0;
}

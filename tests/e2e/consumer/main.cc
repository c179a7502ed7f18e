// Quantizes four numbers with the server at argv[1] and prints their codes.

#include <quantd/client.h>

#include <cstdint>
#include <iostream>
#include <vector>

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  quantd::ClientOptions options;
  options.target = argv[1];
  const auto client = quantd::Client::Connect(options);
  if (!client.ok()) {
    std::cerr << client.status() << "\n";
    return 1;
  }
  const std::vector<float> tensor = {-1, 0, 0.25F, 1};
  quantd::EncodingSpec spec;
  spec.set_format(quantd::v1::NUMBER_FORMAT_INT8);
  quantd::QuantizeJob job;
  job.tensor.shape = {4};
  job.tensor.data = {reinterpret_cast<const uint8_t*>(tensor.data()),
                     tensor.size() * sizeof(float)};
  job.source = spec;
  const auto result = (*client)->Quantize(job);
  if (!result.ok()) {
    std::cerr << result.status() << "\n";
    return 1;
  }
  for (const uint8_t code : result->codes) {
    std::cout << static_cast<int>(static_cast<int8_t>(code)) << "\n";
  }
  return 0;
}

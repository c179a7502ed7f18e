// Writes a tensor to the safetensors file argv[1], reads it again and prints
// its name and size.

#include <quantd/files.h>

#include <cstdint>
#include <iostream>
#include <vector>

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  namespace files = quantd::files;
  auto writer =
      files::SafetensorsWriter::Create(argv[1], files::IfExists::kRefuse);
  if (!writer.ok()) return 1;
  const std::vector<uint8_t> bytes = {1, 2, 3};
  if (!writer->Add("w", files::Dtype::kU8, {3}, bytes).ok()) return 1;
  if (!writer->Finish().ok()) return 1;
  const auto reader = files::SafetensorsReader::Open(argv[1]);
  if (!reader.ok()) {
    std::cerr << reader.status() << "\n";
    return 1;
  }
  for (const files::FileTensor& tensor : reader->tensors()) {
    std::cout << tensor.name << " " << tensor.data.size() << "\n";
  }
  return 0;
}

#include "client/files/imatrix.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "client/files/atomic_file.h"
#include "client/files/dtype.h"
#include "client/files/errors.h"
#include "client/files/gguf.h"
#include "client/files/gguf_builder.h"
#include "client/files/gguf_types.h"
#include "client/files/mapped_file.h"

namespace quantd::files {
namespace {

constexpr absl::string_view kSums = ".in_sum2";
constexpr absl::string_view kCounts = ".counts";

std::vector<float> FloatsOf(absl::Span<const uint8_t> bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  if (!values.empty()) {
    std::memcpy(values.data(), bytes.data(), values.size() * sizeof(float));
  }
  return values;
}

bool AreSquares(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(), [](float value) {
    return std::isfinite(value) && value >= 0;
  });
}

// Errors: FILE_MALFORMED.
absl::Status Add(const std::string& path, absl::string_view weight,
                 InputSquares squares, Imatrix* imatrix) {
  if (!AreSquares(squares.sums) || !AreSquares(squares.counts)) {
    return FileMalformedError(path, absl::StrCat(QuotedName(weight),
                                                 " has a sum or count that is "
                                                 "negative or not finite"));
  }
  if (!imatrix->emplace(weight, std::move(squares)).second) {
    return FileMalformedError(
        path, absl::StrCat(QuotedName(weight), ": the name occurs twice"));
  }
  return absl::OkStatus();
}

bool IsFloat32(const GgufTensor& tensor) {
  return tensor.type != nullptr && tensor.type->dtype == Dtype::kF32;
}

absl::StatusOr<Imatrix> ReadGguf(const std::string& path) {
  const absl::StatusOr<GgufReader> file = GgufReader::Open(path);
  if (!file.ok()) return file.status();
  std::map<absl::string_view, const GgufTensor*> tensors;
  for (const GgufTensor& tensor : file->tensors()) {
    tensors[tensor.name] = &tensor;
  }
  Imatrix imatrix;
  for (const GgufTensor& tensor : file->tensors()) {
    absl::string_view weight = tensor.name;
    if (!absl::ConsumeSuffix(&weight, kSums)) continue;
    const auto counts = tensors.find(absl::StrCat(weight, kCounts));
    InputSquares squares;
    squares.columns = tensor.shape.empty() ? 1 : tensor.shape.back();
    if (IsFloat32(tensor)) squares.sums = FloatsOf(tensor.data);
    if (counts != tensors.end() && IsFloat32(*counts->second)) {
      squares.counts = FloatsOf(counts->second->data);
    }
    if (squares.sums.empty() ||
        squares.counts.size() * static_cast<size_t>(squares.columns) !=
            squares.sums.size()) {
      return FileUnsupportedError(
          path, absl::StrCat("expected float32 sums of ", QuotedName(weight),
                             " and a count for each of its matrices"));
    }
    absl::Status status = Add(path, weight, std::move(squares), &imatrix);
    if (!status.ok()) return status;
  }
  if (imatrix.empty()) {
    return FileUnsupportedError(path,
                                absl::StrCat("expected tensors NAME", kSums,
                                             " of an importance "
                                             "matrix"));
  }
  return imatrix;
}

// Takes bytes off the front of a file.
class ImatrixCursor {
 public:
  ImatrixCursor(const std::string& path, absl::Span<const uint8_t> rest)
      : path_(path), rest_(rest), size_(rest.size()) {}

  absl::StatusOr<absl::Span<const uint8_t>> Take(int64_t size,
                                                 absl::string_view what) {
    if (size < 0 || static_cast<uint64_t>(size) > rest_.size()) {
      return FileMalformedError(
          path_,
          absl::StrCat("expected an importance matrix, but ", what, " at byte ",
                       size_ - rest_.size(), " goes beyond the end"));
    }
    const absl::Span<const uint8_t> taken =
        rest_.subspan(0, static_cast<size_t>(size));
    rest_.remove_prefix(static_cast<size_t>(size));
    return taken;
  }

  absl::StatusOr<int32_t> Number(absl::string_view what) {
    const absl::StatusOr<absl::Span<const uint8_t>> bytes =
        Take(sizeof(int32_t), what);
    if (!bytes.ok()) return bytes.status();
    int32_t number;
    std::memcpy(&number, bytes->data(), sizeof(number));
    return number;
  }

 private:
  const std::string& path_;
  absl::Span<const uint8_t> rest_;
  const size_t size_;
};

// One weight of the older format.
absl::Status ReadWeight(const std::string& path, ImatrixCursor* cursor,
                        Imatrix* imatrix) {
  // Far more than llama.cpp writes.
  constexpr int32_t kMostNameBytes = 4096;
  const absl::StatusOr<int32_t> name_size =
      cursor->Number("the size of a name");
  if (!name_size.ok()) return name_size.status();
  if (*name_size > kMostNameBytes) {
    return FileMalformedError(
        path, absl::StrCat("expected an importance matrix, got a name of ",
                           *name_size, " bytes"));
  }
  const absl::StatusOr<absl::Span<const uint8_t>> name =
      cursor->Take(*name_size, "a name");
  if (!name.ok()) return name.status();
  const absl::StatusOr<int32_t> calls = cursor->Number("a number of calls");
  if (!calls.ok()) return calls.status();
  const absl::StatusOr<int32_t> count = cursor->Number("a number of values");
  if (!count.ok()) return count.status();
  const std::string weight(name->begin(), name->end());
  if (*count <= 0) {
    return FileMalformedError(
        path, absl::StrCat("no values of ", QuotedName(weight)));
  }
  const absl::StatusOr<absl::Span<const uint8_t>> values = cursor->Take(
      int64_t{*count} * static_cast<int64_t>(sizeof(float)), "the values");
  if (!values.ok()) return values.status();
  InputSquares squares;
  squares.columns = *count;
  squares.sums = FloatsOf(*values);
  squares.counts = {static_cast<float>(*calls)};
  return Add(path, weight, std::move(squares), imatrix);
}

absl::StatusOr<Imatrix> ReadOlder(const std::string& path,
                                  absl::Span<const uint8_t> bytes) {
  ImatrixCursor cursor(path, bytes);
  const absl::StatusOr<int32_t> weights =
      cursor.Number("the number of weights");
  if (!weights.ok()) return weights.status();
  Imatrix imatrix;
  for (int32_t i = 0; i < *weights; ++i) {
    absl::Status status = ReadWeight(path, &cursor, &imatrix);
    if (!status.ok()) return status;
  }
  if (imatrix.empty()) {
    return FileMalformedError(path, "an importance matrix without weights");
  }
  return imatrix;
}

}  // namespace

std::vector<double> InputSquares::MeanSquares() const {
  double count = 0;
  for (const float one : counts) count += one;
  std::vector<double> means(static_cast<size_t>(columns), 1.0);
  if (!(count > 0)) return means;
  for (size_t column = 0; column < means.size(); ++column) {
    double sum = 0;
    for (size_t i = column; i < sums.size(); i += means.size()) sum += sums[i];
    means[column] = sum / count;
  }
  return means;
}

absl::StatusOr<Imatrix> ReadImatrix(const std::string& path) {
  const absl::StatusOr<MappedFile> file = MappedFile::Open(path);
  if (!file.ok()) return file.status();
  const absl::string_view begin(
      reinterpret_cast<const char*>(file->bytes().data()),
      file->bytes().size());
  return absl::StartsWith(begin, "GGUF") ? ReadGguf(path)
                                         : ReadOlder(path, file->bytes());
}

absl::StatusOr<uint64_t> WriteImatrix(const std::string& path,
                                      IfExists if_exists,
                                      const Imatrix& imatrix) {
  const GgufType* const type = FindGgufType(Dtype::kF32);
  std::vector<GgufEntry> entries;
  std::vector<const std::vector<float>*> data;
  for (const auto& [weight, squares] : imatrix) {
    const auto matrices = static_cast<int64_t>(squares.counts.size());
    entries.push_back(
        {absl::StrCat(weight, kSums), type, {matrices, squares.columns}});
    data.push_back(&squares.sums);
    entries.push_back({absl::StrCat(weight, kCounts), type, {matrices, 1}});
    data.push_back(&squares.counts);
  }
  for (const GgufEntry& entry : entries) {
    absl::Status status = CheckGgufEntry(path, entry);
    if (!status.ok()) return status;
  }
  // Facts about the data that llama.cpp wants to be told; it takes none of them
  // into account when it quantizes.
  constexpr uint32_t kChunkSize = 512;
  const std::string pairs[] = {
      GgufTextPair("general.type", "imatrix"),
      GgufTextsPair("imatrix.datasets", {}),
      GgufUint32Pair("imatrix.chunk_count", 0),
      GgufUint32Pair("imatrix.chunk_size", kChunkSize)};
  const absl::StatusOr<std::unique_ptr<GgufBuilder>> builder =
      GgufBuilder::Create(path, if_exists, {std::begin(pairs), std::end(pairs)},
                          kGgufAlignment, entries);
  if (!builder.ok()) return builder.status();
  for (size_t i = 0; i < data.size(); ++i) {
    absl::Status status =
        (*builder)->Write(i, {reinterpret_cast<const uint8_t*>(data[i]->data()),
                              data[i]->size() * sizeof(float)});
    if (!status.ok()) return status;
  }
  return (*builder)->Finish();
}

}  // namespace quantd::files

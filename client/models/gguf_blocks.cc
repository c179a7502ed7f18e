#include "client/models/gguf_blocks.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/cpp/errors.h"
#include "client/files/dtype.h"
#include "client/files/gguf_encoders.h"
#include "client/files/gguf_types.h"
#include "client/files/safetensors.h"
#include "client/models/spec_syntax.h"
#include "quantd/v1/quantization_service.pb.h"

namespace quantd {
namespace {

// Blocks that a thread takes at a time.
constexpr size_t kPieceBlocks = 64;
// Least weight, beside a largest one of 1. An element that counts nothing is
// not to become anything.
constexpr double kLeastWeight = 1e-6;
// Blocks whose largest element is below `most_coarse` in magnitude have a d
// that float16 has few numbers for: below 2^-20, or 2^-24 where integers make
// up for it.
struct CoarseLimit {
  absl::string_view type;
  float most_coarse;
};
constexpr CoarseLimit kCoarseLimits[] = {
    {"q4_0", 8 * 0x1p-20F},       {"q4_1", 15 * 0x1p-20F},
    {"q5_0", 16 * 0x1p-20F},      {"q5_1", 31 * 0x1p-20F},
    {"q8_0", 127 * 0x1p-20F},     {"q4_K", 15 * 63 * 0x1p-24F},
    {"q5_K", 31 * 63 * 0x1p-24F}, {"q6_K", 32 * 128 * 0x1p-24F}};

struct PieceErrors {
  double signal = 0;
  double squared = 0;
  double absolute = 0;
  double largest = 0;
  uint64_t coarse_scale_count = 0;
  // Index of an element that has no place, or the count of elements.
  size_t refused = 0;
};

// Type that llama.cpp takes in the place of another where rows have no whole
// blocks.
struct Fallback {
  absl::string_view type;
  absl::string_view other;
};
constexpr Fallback kFallbacks[] = {
    {"q4_K", "q5_0"}, {"q5_K", "q5_1"}, {"q6_K", "q8_0"}};

float MostCoarse(const files::GgufType& type) {
  for (const CoarseLimit& limit : kCoarseLimits) {
    if (limit.type == type.name) return limit.most_coarse;
  }
  return 0;
}

// Elements [begin, end) of a tensor.
std::vector<float> FloatElements(const files::FileTensor& tensor, size_t begin,
                                 size_t end) {
  const auto size = static_cast<size_t>(DtypeSizeBytes(tensor.dtype));
  const absl::Span<const uint8_t> data =
      tensor.data.subspan(begin * size, (end - begin) * size);
  std::vector<float> elements(end - begin);
  if (tensor.dtype == files::Dtype::kF64) {
    for (size_t i = 0; i < elements.size(); ++i) {
      double element = 0;
      std::memcpy(&element, &data[i * size], sizeof(element));
      // A number that does not fit is refused as infinity.
      elements[i] = std::fabs(element) > std::numeric_limits<float>::max()
                        ? std::numeric_limits<float>::infinity()
                        : static_cast<float>(element);
    }
    return elements;
  }
  const std::vector<uint8_t> wide =
      files::Widen(tensor.dtype, data, files::Dtype::kF32);
  std::memcpy(elements.data(), wide.data(), wide.size());
  return elements;
}

// Takes pieces of one tensor, from several threads.
class BlockMaker {
 public:
  BlockMaker(const files::FileTensor& tensor, const files::GgufType& type,
             absl::Span<const double> importance)
      : tensor_(tensor),
        type_(type),
        importance_(importance),
        encoder_(*files::FindGgufEncoder(type)),
        most_coarse_(MostCoarse(type)),
        block_elements_(static_cast<size_t>(type.block_elements)),
        block_bytes_(static_cast<size_t>(type.block_bytes)),
        element_count_(tensor.data.size() /
                       static_cast<size_t>(DtypeSizeBytes(tensor.dtype))),
        block_count_(element_count_ / block_elements_),
        blocks_(block_count_ * block_bytes_),
        errors_((block_count_ + kPieceBlocks - 1) / kPieceBlocks) {}

  void Run() {
    const size_t cores = std::max(1U, std::thread::hardware_concurrency());
    std::vector<std::thread> others;
    // There may be no more threads: then fewer do the same.
    try {
      for (size_t i = 1; i < std::min(cores, errors_.size()); ++i) {
        others.emplace_back([this] { TakePieces(); });
      }
    } catch (const std::system_error&) {
    }
    TakePieces();
    for (std::thread& other : others) other.join();
  }

  absl::StatusOr<std::vector<uint8_t>> Finish(v1::ErrorMetrics* metrics,
                                              uint64_t* coarse_scale_count) {
    PieceErrors sum;
    for (size_t piece = 0; piece < errors_.size(); ++piece) {
      const PieceErrors& errors = errors_[piece];
      if (errors.refused < element_count_) return Refusal(errors.refused);
      sum.signal += errors.signal;
      sum.squared += errors.squared;
      sum.absolute += errors.absolute;
      sum.largest = std::max(sum.largest, errors.largest);
      sum.coarse_scale_count += errors.coarse_scale_count;
    }
    if (coarse_scale_count != nullptr) {
      *coarse_scale_count = sum.coarse_scale_count;
    }
    const auto count = static_cast<double>(std::max<size_t>(1, element_count_));
    metrics->set_count(element_count_);
    metrics->set_sum_squared_error(sum.squared);
    metrics->set_mean_squared_error(sum.squared / count);
    metrics->set_mean_absolute_error(sum.absolute / count);
    metrics->set_max_absolute_error(sum.largest);
    metrics->set_sqnr_db(sum.squared == 0
                             ? std::numeric_limits<double>::infinity()
                             : 10 * std::log10(sum.signal / sum.squared));
    return std::move(blocks_);
  }

 private:
  void TakePieces() {
    for (;;) {
      const size_t piece = next_.fetch_add(1, std::memory_order_relaxed);
      if (piece >= errors_.size()) return;
      errors_[piece] = MakePiece(piece);
    }
  }

  PieceErrors MakePiece(size_t piece) {
    const size_t first = piece * kPieceBlocks;
    const size_t end = std::min(first + kPieceBlocks, block_count_);
    const std::vector<float> elements =
        FloatElements(tensor_, first * block_elements_, end * block_elements_);
    PieceErrors errors;
    errors.refused = element_count_;
    for (size_t i = 0; i < elements.size(); ++i) {
      // Written so that NaN fails.
      if (std::fabs(elements[i]) <= encoder_.most_element) continue;
      errors.refused = first * block_elements_ + i;
      return errors;
    }
    std::vector<float> decoded(block_elements_);
    std::vector<float> weights(block_elements_, 1.0F);
    for (size_t b = first; b < end; ++b) {
      const float* const block = &elements[(b - first) * block_elements_];
      uint8_t* const bytes = &blocks_[b * block_bytes_];
      if (!importance_.empty()) SetWeights(b, weights.data());
      encoder_.encode(block, weights.data(), bytes);
      type_.decode(bytes, decoded.data());
      errors.coarse_scale_count += IsCoarse(block) ? 1 : 0;
      for (size_t i = 0; i < block_elements_; ++i) {
        const double error = double{decoded[i]} - double{block[i]};
        errors.signal += double{block[i]} * double{block[i]};
        errors.squared += error * error;
        errors.absolute += std::fabs(error);
        errors.largest = std::max(errors.largest, std::fabs(error));
      }
    }
    return errors;
  }

  bool IsCoarse(const float* elements) const {
    float largest = 0;
    for (size_t i = 0; i < block_elements_; ++i) {
      largest = std::max(largest, std::fabs(elements[i]));
    }
    return largest > 0 && largest < most_coarse_;
  }

  // Sets the weights of a block, of which the largest is 1.
  void SetWeights(size_t block, float* weights) const {
    const double* const own =
        &importance_[block * block_elements_ % importance_.size()];
    const double largest = *std::max_element(own, own + block_elements_);
    for (size_t i = 0; i < block_elements_; ++i) {
      weights[i] =
          largest > 0
              ? static_cast<float>(std::max(own[i] / largest, kLeastWeight))
              : 1.0F;
    }
  }

  absl::Status Refusal(size_t index) const {
    const float element = FloatElements(tensor_, index, index + 1)[0];
    return ArgumentInvalidError(
        absl::StrCat("element ", index, " is ", element, ", but blocks of ",
                     type_.name, " have finite ones of at most ",
                     encoder_.most_element, " in magnitude"));
  }

  const files::FileTensor& tensor_;
  const files::GgufType& type_;
  const absl::Span<const double> importance_;
  const files::GgufEncoder& encoder_;
  const float most_coarse_;
  const size_t block_elements_;
  const size_t block_bytes_;
  const size_t element_count_;
  const size_t block_count_;
  // Results of each piece lie apart: threads have none in common.
  std::vector<uint8_t> blocks_;
  std::vector<PieceErrors> errors_;
  std::atomic<size_t> next_{0};
};

}  // namespace

const files::GgufType* BlockTypeFor(const SpecTemplate& spec,
                                    absl::Span<const int64_t> shape) {
  const int64_t row = shape.empty() ? 1 : shape.back();
  const auto fits = [row](absl::string_view name) -> const files::GgufType* {
    const files::GgufType* const type = files::FindGgufType(name);
    return type != nullptr && row % type->block_elements == 0 ? type : nullptr;
  };
  if (spec.gguf_type.empty()) return nullptr;
  if (const files::GgufType* const type = fits(spec.gguf_type)) return type;
  for (const Fallback& fallback : kFallbacks) {
    if (fallback.type == spec.gguf_type) return fits(fallback.other);
  }
  return nullptr;
}

std::string NoWholeBlocksText(const SpecTemplate& spec,
                              const files::FileTensor& tensor,
                              const files::GgufType* type,
                              absl::string_view otherwise) {
  if (spec.gguf_type.empty()) return "";
  if (type != nullptr && type->name == spec.gguf_type) return "";
  return absl::StrCat(
      "tensor ", tensor.name, ": rows of ",
      tensor.shape.empty() ? 1 : tensor.shape.back(),
      " elements have no whole blocks of ", spec.gguf_type, ": ",
      type == nullptr ? std::string(otherwise)
                      : absl::StrCat(type->name, " in its place"));
}

absl::StatusOr<std::vector<uint8_t>> MakeGgufBlocks(
    const files::FileTensor& tensor, const files::GgufType& type,
    v1::ErrorMetrics* metrics, absl::Span<const double> importance,
    uint64_t* coarse_scale_count) {
  const std::shared_ptr<const void> hold = tensor.Hold();
  BlockMaker maker(tensor, type, importance);
  maker.Run();
  return maker.Finish(metrics, coarse_scale_count);
}

}  // namespace quantd

#include "client/models/compressed_module.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/cpp/element_bytes.h"
#include "client/cpp/errors.h"
#include "client/cpp/scales.h"
#include "client/files/dtype.h"
#include "client/files/errors.h"
#include "client/files/lazy_bytes.h"
#include "client/files/safetensors.h"
#include "client/models/bit_stream.h"
#include "client/models/compressed_model.h"
#include "client/models/compressed_tensors.h"
#include "nlohmann/json.hpp"

namespace quantd {
namespace {

template <typename T>
std::vector<T> CopiedElements(const files::FileTensor& tensor) {
  return CopyElements<T>(tensor.data);
}

// Reads the modules of one model. Not thread-safe.
class ModuleReader {
 public:
  ModuleReader(const TensorInput& input, const std::string& path)
      : input_(input), path_(path) {}

  absl::StatusOr<QuantizedTensor> Read(const std::string& module,
                                       const files::Json* scheme,
                                       const files::FileTensor& scale) {
    if (scheme == nullptr) {
      return Malformed(module, "no group of config.json targets it");
    }
    const auto part = [&](absl::string_view suffix) {
      return input_.Find(absl::StrCat(module, suffix));
    };
    QuantizedTensor tensor;
    tensor.name = absl::StrCat(module, kCompressedWeight);
    tensor.element_type =
        ElementTypeOf(scale.dtype).value_or(ElementType::kFloat32);
    for (const char* suffix :
         {".weight", ".weight_packed", ".weight_scale", ".weight_zero_point",
          ".weight_shape", ".weight_global_scale", ".weight_g_idx",
          ".input_scale", ".input_zero_point", ".input_global_scale"}) {
      if (part(suffix) != nullptr) {
        tensor.parts.push_back(absl::StrCat(module, suffix));
      }
    }
    const bool is_integer = StringOf(*scheme, "type") != "float";
    const int64_t bits = IntegerOf(*scheme, "num_bits", 8);
    if (bits < 2 || bits > kMostCompressedBits) {
      return Malformed(module,
                       absl::StrCat("num_bits is ", bits, ", expected 2 to 8"));
    }
    const files::FileTensor* const plain = part(kCompressedWeight);
    const files::FileTensor* const packed = part(".weight_packed");
    if ((plain == nullptr) == (packed == nullptr)) {
      return Malformed(module, "expected weight or weight_packed");
    }
    absl::Status status = CheckMatrix(module, plain, packed, scale);
    if (!status.ok()) return status;
    if (!is_integer && packed != nullptr) {
      status = ReadFloat4(module, *packed, scale, part(".weight_global_scale"),
                          &tensor);
    } else if (packed != nullptr) {
      status = ReadPacked(module, static_cast<int>(bits), *packed,
                          part(".weight_shape"), &tensor);
    } else {
      status = ReadPlain(module, is_integer, static_cast<int>(bits), *plain,
                         scale, &tensor);
    }
    if (!status.ok()) return status;
    status = AddScales(module, *scheme, scale, &tensor);
    if (!status.ok()) return status;
    const files::FileTensor* const zero_point = part(".weight_zero_point");
    if (zero_point == nullptr && is_integer &&
        scheme->value("symmetric", files::Json()) == false) {
      return Malformed(module,
                       absl::StrCat("expected ", module,
                                    ".weight_zero_point, as its scheme is not "
                                    "symmetric, got none"));
    }
    if (zero_point != nullptr && !is_integer &&
        absl::c_any_of(zero_point->data,
                       [](uint8_t byte) { return byte != 0; })) {
      return files::FileUnsupportedError(
          path_, absl::StrCat("module \"", module,
                              "\": expected a weight_zero_point of zeros for "
                              "floats"));
    }
    if (zero_point != nullptr && is_integer) {
      status =
          AddZeroPoints(module, static_cast<int>(bits), *zero_point, &tensor);
      if (!status.ok()) return status;
    }
    if (const files::FileTensor* const groups = part(".weight_g_idx")) {
      status = AddColumnGroups(module, *groups, &tensor);
      if (!status.ok()) return status;
    }
    return tensor;
  }

 private:
  absl::Status Malformed(const std::string& module, absl::string_view what) {
    return files::FileMalformedError(
        path_, absl::StrCat("module \"", module, "\": ", what));
  }

  // Experts in one tensor have a dimension more, and a scale for each of their
  // rows.
  absl::Status CheckMatrix(const std::string& module,
                           const files::FileTensor* plain,
                           const files::FileTensor* packed,
                           const files::FileTensor& scale) {
    const bool is_stack = packed != nullptr ? packed->shape.size() == 3
                                            : plain->shape.size() == 3 &&
                                                  scale.shape.size() == 3 &&
                                                  scale.shape[1] > 1;
    if (!is_stack) return absl::OkStatus();
    return files::FileUnsupportedError(
        path_, absl::StrCat("module \"", module,
                            "\": expected a matrix for each expert, got all "
                            "experts in a tensor of three dimensions"));
  }

  static int64_t IntegerOf(const files::Json& object, const char* key,
                           int64_t otherwise) {
    const auto found = object.find(key);
    return found != object.end() && found->is_number_integer()
               ? found->get<int64_t>()
               : otherwise;
  }

  static std::string StringOf(const files::Json& object, const char* key) {
    const auto found = object.find(key);
    return found != object.end() && found->is_string()
               ? found->get<std::string>()
               : "";
  }

  // Empty where there are no two integers; older versions wrote "128x128".
  static std::vector<int64_t> BlockStructureOf(const files::Json& scheme) {
    const auto found = scheme.find("block_structure");
    if (found == scheme.end()) return {};
    if (found->is_array() && found->size() == 2 &&
        (*found)[0].is_number_integer() && (*found)[1].is_number_integer()) {
      return {(*found)[0].get<int64_t>(), (*found)[1].get<int64_t>()};
    }
    std::vector<int64_t> sizes;
    if (!found->is_string()) return sizes;
    for (const absl::string_view text :
         absl::StrSplit(found->get_ref<const std::string&>(), 'x')) {
      int64_t size = 0;
      if (text.empty() || !absl::c_all_of(text, absl::ascii_isdigit) ||
          !absl::SimpleAtoi(text, &size)) {
        return {};
      }
      sizes.push_back(size);
    }
    return sizes.size() == 2 ? sizes : std::vector<int64_t>();
  }

  absl::Status SetIntegers(int bits, QuantizedTensor* tensor) {
    const absl::StatusOr<v1::NumberFormat> format =
        IntegerFormat(bits, /*is_signed=*/true);
    if (!format.ok()) return format.status();
    tensor->encoding.set_format(*format);
    return absl::OkStatus();
  }

  // `fill` writes all codes, of which there are `count`.
  static void SetLazyCodes(const FormatInfo& format, int64_t count,
                           files::LazyBytes::Fill fill,
                           QuantizedTensor* tensor) {
    const int64_t size_bytes = format.SizeBytes(count);
    if (size_bytes == 0) {
      tensor->codes = {};
      return;
    }
    tensor->lazy = std::make_shared<files::LazyBytes>(
        static_cast<size_t>(size_bytes), std::move(fill));
    tensor->codes = tensor->lazy->span();
  }

  absl::Status ReadPlain(const std::string& module, bool is_integer, int bits,
                         const files::FileTensor& plain,
                         const files::FileTensor& scale,
                         QuantizedTensor* tensor) {
    tensor->shape = plain.shape;
    tensor->codes = plain.data;
    if (!is_integer) {
      if (plain.dtype != files::Dtype::kF8E4M3) {
        return Malformed(module, "expected a weight of F8_E4M3");
      }
      const bool is_mxfp8 = files::IsPowerScale(scale.dtype);
      tensor->encoding.set_format(is_mxfp8 ? v1::NUMBER_FORMAT_MXFP8_E4M3
                                           : v1::NUMBER_FORMAT_FLOAT8_E4M3FN);
      if (is_mxfp8) {
        tensor->element_type = ElementType::kFloat32;
        tensor->encoding.set_scale_code(scale.data.data(), scale.data.size());
      }
      return absl::OkStatus();
    }
    if (plain.dtype != files::Dtype::kI8) {
      return Malformed(module, "expected a weight of I8");
    }
    if (absl::Status s = SetIntegers(bits, tensor); !s.ok()) return s;
    if (bits == 8) return absl::OkStatus();
    const int half = 1 << (bits - 1);
    for (const uint8_t byte : plain.data) {
      const int value = static_cast<int8_t>(byte);
      if (value < -half || value >= half) {
        return Malformed(module, absl::StrCat("a weight is ", value,
                                              ", not of ", bits, " bits"));
      }
    }
    const FormatInfo format = *GetFormatInfo(tensor->encoding.format());
    SetLazyCodes(
        format, static_cast<int64_t>(plain.data.size()),
        [format, data = plain.data](absl::Span<uint8_t> out) {
          CodeWriter writer(format, out.data());
          for (const uint8_t byte : data) writer.Put(byte);
          writer.Finish();
        },
        tensor);
    return absl::OkStatus();
  }

  // True if no code lies in two words. `fits`: the shape is also that of codes
  // without gaps; then the bits that would be padding decide.
  static bool IsPadded(const files::FileTensor& packed, int64_t rows,
                       int64_t columns, int bits, bool fits) {
    const int per_word = 32 / bits;
    const std::vector<int64_t> shape = {
        rows, columns / per_word + (columns % per_word != 0)};
    if (packed.shape != shape) return false;
    if (!fits) return true;
    const int code_bits = per_word * bits;
    return code_bits < 32 && rows > 0 && columns > per_word &&
           absl::c_all_of(
               CopiedElements<uint32_t>(packed),
               [code_bits](uint32_t word) { return word >> code_bits == 0; });
  }

  absl::Status ReadPacked(const std::string& module, int bits,
                          const files::FileTensor& packed,
                          const files::FileTensor* shape,
                          QuantizedTensor* tensor) {
    if (shape == nullptr || shape->shape != std::vector<int64_t>{2} ||
        (shape->dtype != files::Dtype::kI64 &&
         shape->dtype != files::Dtype::kI32)) {
      return Malformed(module, "expected a weight_shape of two integers");
    }
    if (shape->dtype == files::Dtype::kI64) {
      tensor->shape = CopiedElements<int64_t>(*shape);
    } else {
      for (const int32_t size : CopiedElements<int32_t>(*shape)) {
        tensor->shape.push_back(size);
      }
    }
    const absl::StatusOr<int64_t> count = ElementCount(tensor->shape);
    const int64_t rows = tensor->shape[0];
    const int64_t columns = tensor->shape[1];
    const bool is_packed = count.ok() && packed.dtype == files::Dtype::kI32;
    const bool has_all =
        packed.shape == std::vector<int64_t>{rows, PackedWords(columns, bits)};
    if (is_packed && IsPadded(packed, rows, columns, bits, has_all)) {
      return files::FileUnsupportedError(
          path_, absl::StrCat("module \"", module, "\": weight_packed has ",
                              32 / bits, " codes of ", bits,
                              " bits in each word and padding, as old versions "
                              "of compressed-tensors packed them; only codes "
                              "without gaps are read"));
    }
    if (!is_packed || !has_all) {
      return Malformed(
          module,
          absl::StrCat("expected a weight_packed of I32 that holds ", bits,
                       " bits for each of [", rows, ",", columns, "]"));
    }
    if (absl::Status s = SetIntegers(bits, tensor); !s.ok()) return s;
    const FormatInfo format = *GetFormatInfo(tensor->encoding.format());
    SetLazyCodes(
        format, *count,
        [format, bits, rows, columns,
         data = packed.data](absl::Span<uint8_t> out) {
          const uint32_t half = 1U << (bits - 1);
          const size_t row_bytes = data.size() / static_cast<size_t>(rows);
          CodeWriter writer(format, out.data());
          for (int64_t row = 0; row < rows; ++row) {
            std::vector<uint32_t> words = CopyElements<uint32_t>(
                data.subspan(static_cast<size_t>(row) * row_bytes, row_bytes));
            BitStream stream(bits, words.data(), 1);
            for (int64_t column = 0; column < columns; ++column) {
              writer.Put(stream.Get() - half);
            }
          }
          writer.Finish();
        },
        tensor);
    return absl::OkStatus();
  }

  absl::Status ReadFloat4(const std::string& module,
                          const files::FileTensor& packed,
                          const files::FileTensor& scale,
                          const files::FileTensor* global,
                          QuantizedTensor* tensor) {
    if (packed.dtype != files::Dtype::kU8 || packed.shape.size() != 2 ||
        packed.shape[1] > INT64_MAX / 2) {
      return Malformed(module, "expected a weight_packed of U8, a matrix");
    }
    tensor->shape = {packed.shape[0], packed.shape[1] * 2};
    tensor->codes = packed.data;
    tensor->element_type = ElementType::kFloat32;
    Encoding& encoding = tensor->encoding;
    encoding.set_scale_code(scale.data.data(), scale.data.size());
    if (global == nullptr) {
      if (!files::IsPowerScale(scale.dtype)) {
        return Malformed(module, "expected a weight_scale of U8");
      }
      encoding.set_format(v1::NUMBER_FORMAT_MXFP4_E2M1);
      return absl::OkStatus();
    }
    if (scale.dtype != files::Dtype::kF8E4M3 ||
        global->dtype != files::Dtype::kF32 || global->data.size() != 4) {
      return Malformed(module,
                       "expected a weight_scale of F8_E4M3 under one "
                       "weight_global_scale of F32");
    }
    encoding.set_format(v1::NUMBER_FORMAT_NVFP4);
    const float global_scale = CopiedElements<float>(*global)[0];
    encoding.add_outer_scale(1.0f / global_scale);
    if (!IsExactInverse(global_scale, encoding.outer_scale(0))) {
      tensor->divisor = global_scale;
    }
    return absl::OkStatus();
  }

  absl::Status AddScales(const std::string& module, const files::Json& scheme,
                         const files::FileTensor& scale,
                         QuantizedTensor* tensor) {
    Encoding& encoding = tensor->encoding;
    const size_t rank = tensor->shape.size();
    const std::string strategy = StringOf(scheme, "strategy");
    std::vector<int64_t> block(rank, 0);
    if (strategy == "channel" && rank > 0) {
      block[0] = 1;
    } else if ((strategy == "group" || strategy == "tensor_group") &&
               rank == 2) {
      block = {1, IntegerOf(scheme, "group_size", 0)};
    } else if (strategy == "block" && rank == 2) {
      block = BlockStructureOf(scheme);
      if (block.empty()) {
        return Malformed(module, "expected a block_structure of two integers");
      }
    } else if (strategy != "tensor" && !strategy.empty()) {
      return files::FileUnsupportedError(
          path_, absl::StrCat("module \"", module, "\": strategy \"", strategy,
                              "\" of a tensor of ", rank, " dimensions"));
    }
    const absl::StatusOr<std::vector<int64_t>> shape =
        ScaleShape(tensor->shape, block);
    if (!shape.ok()) return Malformed(module, ErrorText(shape.status()));
    const absl::StatusOr<int64_t> expected = ElementCount(*shape);
    const int64_t got =
        static_cast<int64_t>(scale.data.size()) / DtypeSizeBytes(scale.dtype);
    if (!expected.ok() || *expected != got) {
      return Malformed(module, absl::StrCat("weight_scale has ", got,
                                            " elements, a ", strategy, " of [",
                                            absl::StrJoin(tensor->shape, ","),
                                            "] takes ", expected.value_or(0)));
    }
    for (const int64_t size : block) encoding.add_block_size(size);
    for (const int64_t size : *shape) encoding.add_scale_shape(size);
    if (!encoding.scale_code().empty()) return absl::OkStatus();
    if (!ReadScales(scale, &encoding)) {
      return Malformed(module, "expected a weight_scale of F32, F16 or BF16");
    }
    return absl::OkStatus();
  }

  absl::Status AddZeroPoints(const std::string& module, int bits,
                             const files::FileTensor& zero_point,
                             QuantizedTensor* tensor) {
    Encoding& encoding = tensor->encoding;
    const int count = encoding.scale_size();
    if (zero_point.dtype == files::Dtype::kI8 &&
        zero_point.data.size() == static_cast<size_t>(count)) {
      for (const int8_t value : CopiedElements<int8_t>(zero_point)) {
        encoding.add_zero_point(value);
      }
      return absl::OkStatus();
    }
    const int64_t rows = tensor->shape.empty() ? 0 : tensor->shape[0];
    const int64_t groups = rows > 0 ? count / rows : 0;
    if (zero_point.dtype != files::Dtype::kI32 || groups * rows != count ||
        zero_point.shape !=
            std::vector<int64_t>{PackedWords(rows, bits), groups}) {
      return Malformed(module,
                       "expected a weight_zero_point as many as scales, I8 or "
                       "packed in I32");
    }
    std::vector<uint32_t> words = CopiedElements<uint32_t>(zero_point);
    encoding.mutable_zero_point()->Resize(count, 0);
    for (int64_t group = 0; group < groups; ++group) {
      BitStream stream(bits, words.data() + group, static_cast<size_t>(groups));
      for (int64_t row = 0; row < rows; ++row) {
        encoding.set_zero_point(
            static_cast<int>(row * groups + group),
            static_cast<int32_t>(stream.Get()) - (1 << (bits - 1)));
      }
    }
    return absl::OkStatus();
  }

  // In compressed-tensors, -1 stands for groups one after the other. So do
  // zeros beside several groups: nobody set those.
  absl::Status AddColumnGroups(const std::string& module,
                               const files::FileTensor& groups,
                               QuantizedTensor* tensor) {
    const Encoding& encoding = tensor->encoding;
    const bool is_grouped = tensor->shape.size() == 2 &&
                            encoding.block_size(0) == 1 &&
                            encoding.block_size(1) > 0;
    if (!is_grouped || groups.dtype != files::Dtype::kI32 ||
        groups.shape != std::vector<int64_t>{tensor->shape[1]}) {
      return Malformed(module,
                       "expected a weight_g_idx of I32, the group of each "
                       "column of a matrix in groups");
    }
    const std::vector<int32_t> numbers = CopiedElements<int32_t>(groups);
    const int64_t count = encoding.scale_shape(1);
    const bool is_set =
        count == 1 || std::any_of(numbers.begin(), numbers.end(),
                                  [](int32_t number) { return number != 0; });
    if (!is_set ||
        std::find(numbers.begin(), numbers.end(), -1) != numbers.end()) {
      return absl::OkStatus();
    }
    bool is_in_order = true;
    for (size_t i = 0; i < numbers.size(); ++i) {
      if (numbers[i] < 0 || numbers[i] >= count) {
        return Malformed(module, absl::StrCat("expected a weight_g_idx of "
                                              "groups from 0 to ",
                                              count - 1, ", got ", numbers[i]));
      }
      is_in_order = is_in_order && numbers[i] == static_cast<int64_t>(i) /
                                                     encoding.block_size(1);
    }
    if (!is_in_order) tensor->column_groups = groups.data;
    return absl::OkStatus();
  }

  const TensorInput& input_;
  const std::string& path_;
};

}  // namespace

absl::StatusOr<QuantizedTensor> ReadCompressedModule(
    const TensorInput& input, const std::string& path,
    const std::string& module, const files::Json* scheme) {
  return ModuleReader(input, path)
      .Read(module, scheme, *input.Find(absl::StrCat(module, ".weight_scale")));
}

}  // namespace quantd

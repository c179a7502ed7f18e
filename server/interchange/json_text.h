// JSON from strangers: its size and depth are known before it is built, and
// what it lacks is said with the place.

#ifndef QUANTD_SERVER_INTERCHANGE_JSON_TEXT_H_
#define QUANTD_SERVER_INTERCHANGE_JSON_TEXT_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/parallel/stop_token.h"
#include "nlohmann/json.hpp"

namespace quantd::server {

using Json = nlohmann::json;

// Deeper documents are refused.
constexpr int kMaxJsonDepth = 32;

// A text in pieces, one after the other.
using TextPieces = absl::Span<const absl::string_view>;

// Computes an upper bound on the memory that ReadJsonHead and ReadJsonEntries
// take, and on what their entries leave. Calls `charge` with the bound in bytes
// once for each MiB that it has read, and at the end for all. Stops at the
// first error of `charge`. Errors: INTERCHANGE_INVALID (not JSON, too deep, a
// key twice in one object); those of `charge`.
absl::Status ChargeJsonMemory(TextPieces text,
                              absl::FunctionRef<absl::Status(int64_t)> charge);

// The document without what its lists and objects hold: one that is not empty
// has a single null in place of that.
Json ReadJsonHead(TextPieces text);

// Calls `take` with every entry of the list or object under that key, in order
// of the text, each gone before the next is built. `name` is its key in an
// object, empty in a list. Stops at the first error, which it answers.
// Requires: a text that ChargeJsonMemory took.
absl::Status ReadJsonEntries(
    TextPieces text, absl::string_view key,
    absl::FunctionRef<absl::Status(const std::string& name, const Json& entry)>
        take);

// A document on one line. What is not UTF-8 in it is replaced.
std::string DumpJson(const Json& json);

// Appends the same text of a large document, of which a part is left when it is
// stopped. Errors: CANCELLED.
absl::Status AppendJson(const Json& json, core::StopToken stop,
                        std::string* out);

// `text` in quotes, safe to show and cut to a bounded length.
std::string QuotedText(absl::string_view text);

// "what", at `place`. INTERCHANGE_INVALID.
absl::Status InvalidAt(absl::string_view place, absl::string_view what);

// Reads members of an object. The first that is missing or wrong is kept as
// the status; what is read after it is empty. Not thread-safe.
class ObjectReader {
 public:
  // `object` must outlive the reader and may be anything.
  ObjectReader(const Json& object, std::string place);

  const absl::Status& status() const { return status_; }
  const std::string& place() const { return place_; }
  // The place of a member.
  std::string PlaceOf(absl::string_view key) const;
  void Fail(absl::string_view key, absl::string_view what);

  bool Has(absl::string_view key) const { return Find(key) != nullptr; }
  // Null where there is none. A member that is null counts as none.
  const Json* Find(absl::string_view key) const;

  std::string String(absl::string_view key);
  // Also the strings "True" and "False", in any case.
  bool Boolean(absl::string_view key);
  // Also a float without fraction.
  int64_t Integer(absl::string_view key, int64_t min, int64_t max);
  // A number, or a list of numbers.
  std::vector<double> Numbers(absl::string_view key);
  std::vector<int64_t> Integers(absl::string_view key, int64_t min,
                                int64_t max);
  // Numbers as float32; `rounded` grows by the number of those that were not.
  std::vector<float> Floats(absl::string_view key, int64_t* rounded);
  // Numbers in nested lists of the same lengths, row-major; a number is of
  // rank 0.
  std::vector<double> Nested(absl::string_view key,
                             std::vector<int64_t>* shape);

 private:
  void Flatten(const Json& value, const std::string& place, size_t depth,
               std::vector<int64_t>* shape, std::vector<double>* values);

  const Json& object_;
  const std::string place_;
  absl::Status status_;
};

// The nearest float32, and whether it is another number. Beyond the largest
// it is infinity.
float ToFloat(double value, int64_t* rounded);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_INTERCHANGE_JSON_TEXT_H_

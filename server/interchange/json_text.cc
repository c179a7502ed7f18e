#include "server/interchange/json_text.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/errors.h"

namespace quantd::server {
namespace {

// A value in a list that grew by doubling, and what a member and a string take
// beside their bytes.
constexpr int64_t kValueBytes = 2 * sizeof(Json) + 8;
constexpr int64_t kMemberBytes = 128;
constexpr int64_t kStringBytes = 64;
// What is counted before it is charged.
constexpr int64_t kChargedAtOnce = int64_t{1} << 20;

// Counts what a document would take.
class MemoryCounter final : public nlohmann::json_sax<Json> {
 public:
  explicit MemoryCounter(absl::FunctionRef<absl::Status(int64_t)> charge)
      : charge_(charge) {}

  // Charges what is counted and was not charged yet.
  absl::Status Charge() {
    charged_bytes_ = bytes_;
    return charge_(bytes_);
  }
  const absl::Status& status() const { return status_; }

  bool null() override { return Value(); }
  bool boolean(bool) override { return Value(); }
  bool number_integer(number_integer_t) override { return Value(); }
  bool number_unsigned(number_unsigned_t) override { return Value(); }
  bool number_float(number_float_t, const string_t&) override {
    return Value();
  }
  bool string(string_t& value) override {
    return Count(kValueBytes + kStringBytes +
                 2 * static_cast<int64_t>(value.size()));
  }
  bool binary(binary_t&) override { return Fail("binary data"); }

  bool start_object(size_t) override {
    keys_.emplace_back();
    return Open();
  }
  bool key(string_t& value) override {
    // Before the key is kept.
    if (!Count(kMemberBytes + 2 * static_cast<int64_t>(value.size()))) {
      return false;
    }
    if (keys_.back().insert(value).second) return true;
    return Fail(absl::StrCat("the key ", QuotedText(value),
                             " stands twice in one object"));
  }
  bool end_object() override {
    keys_.pop_back();
    --depth_;
    return true;
  }
  bool start_array(size_t) override { return Open(); }
  bool end_array() override {
    --depth_;
    return true;
  }

  bool parse_error(size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    return Fail(absl::StrCat("not valid JSON at byte ", position));
  }

 private:
  bool Fail(absl::string_view what) {
    status_ = core::InterchangeInvalidError(absl::StrCat("the file: ", what));
    return false;
  }
  bool Count(int64_t bytes) {
    bytes_ += bytes;
    if (bytes_ - charged_bytes_ < kChargedAtOnce) return true;
    status_ = Charge();
    return status_.ok();
  }
  bool Value() { return Count(kValueBytes); }
  bool Open() {
    if (++depth_ > kMaxJsonDepth) {
      return Fail(absl::StrCat("nested deeper than ", kMaxJsonDepth));
    }
    return Count(kValueBytes + kStringBytes);
  }

  const absl::FunctionRef<absl::Status(int64_t)> charge_;
  int64_t bytes_ = 0;
  int64_t charged_bytes_ = 0;
  int depth_ = 0;
  // Of the objects that are open.
  std::vector<absl::flat_hash_set<std::string>> keys_;
  absl::Status status_;
};

// Values that are written at once.
constexpr size_t kDumpedAtOnce = 256;

// Of `json` and all that is in it, counted up to `most`.
size_t ValueCount(const Json& json, size_t most) {
  size_t count = 1;
  if (!json.is_structured()) return count;
  for (const Json& value : json) {
    if (count >= most) break;
    count += ValueCount(value, most - count);
  }
  return count;
}

std::string TypeText(const Json& value) {
  return absl::StrCat("got ", value.is_number()   ? "a number"
                              : value.is_array()  ? "a list"
                              : value.is_null()   ? "null"
                              : value.is_object() ? "an object"
                              : value.is_string() ? "a string"
                                                  : "a boolean");
}

}  // namespace

absl::Status ChargeJsonMemory(absl::string_view text,
                              absl::FunctionRef<absl::Status(int64_t)> charge) {
  // The parser takes a zero byte for the end and would ignore what follows.
  const size_t zero_at = text.find('\0');
  if (zero_at != absl::string_view::npos) {
    return core::InterchangeInvalidError(
        absl::StrCat("the file has a zero byte at byte ", zero_at));
  }
  MemoryCounter counter(charge);
  if (!Json::sax_parse(text.begin(), text.end(), &counter)) {
    return counter.status();
  }
  return counter.Charge();
}

std::string DumpJson(const Json& json) {
  // Names are UTF-8, and must not throw if they are not.
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

JsonDumper::JsonDumper(Json json) : json_(std::move(json)) {}

void JsonDumper::Begin(const Json& json, std::string* out) {
  if (ValueCount(json, kDumpedAtOnce) < kDumpedAtOnce) {
    out->append(DumpJson(json));
    return;
  }
  out->push_back(json.is_array() ? '[' : '{');
  open_.push_back({&json, json.begin(), true});
}

void JsonDumper::Step(std::string* out) {
  Open& open = open_.back();
  if (open.next == open.json->end()) {
    out->push_back(open.json->is_array() ? ']' : '}');
    open_.pop_back();
    return;
  }
  if (!open.is_first) out->push_back(',');
  open.is_first = false;
  if (open.json->is_object()) {
    absl::StrAppend(out, DumpJson(Json(open.next.key())), ":");
  } else {
    // Small values of a list together, which is several times faster.
    Json values = Json::array();
    for (size_t count = 0; open.next != open.json->end(); ++open.next) {
      count += ValueCount(*open.next, kDumpedAtOnce);
      if (count >= kDumpedAtOnce) break;
      values.push_back(*open.next);
    }
    if (!values.empty()) {
      const std::string text = DumpJson(values);
      out->append(text, 1, text.size() - 2);
      return;
    }
  }
  const Json& value = *open.next;
  ++open.next;
  Begin(value, out);
}

bool JsonDumper::Run(const core::TimeSlice& slice, std::string* out) {
  if (!has_begun_) Begin(json_, out);
  has_begun_ = true;
  while (!open_.empty()) {
    Step(out);
    if (slice.over()) break;
  }
  return open_.empty();
}

std::string QuotedText(absl::string_view text) {
  constexpr size_t kMostBytes = 200;
  return absl::StrCat("\"",
                      absl::Utf8SafeCHexEscape(text.substr(0, kMostBytes)),
                      text.size() > kMostBytes ? "...\"" : "\"");
}

absl::Status InvalidAt(absl::string_view place, absl::string_view what) {
  return core::InterchangeInvalidError(absl::StrCat(place, ": ", what));
}

ObjectReader::ObjectReader(const Json& object, std::string place)
    : object_(object), place_(std::move(place)) {
  if (!object.is_object()) {
    status_ = InvalidAt(place_,
                        absl::StrCat("expected an object, ", TypeText(object)));
  }
}

std::string ObjectReader::PlaceOf(absl::string_view key) const {
  return place_.empty() ? std::string(key) : absl::StrCat(place_, ".", key);
}

void ObjectReader::Fail(absl::string_view key, absl::string_view what) {
  if (status_.ok()) status_ = InvalidAt(PlaceOf(key), what);
}

const Json* ObjectReader::Find(absl::string_view key) const {
  if (!object_.is_object()) return nullptr;
  const auto found = object_.find(std::string(key));
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

std::string ObjectReader::String(absl::string_view key) {
  const Json* const value = Find(key);
  if (value != nullptr && value->is_string()) {
    return value->get_ref<const std::string&>();
  }
  Fail(key, value == nullptr
                ? "is missing, expected a string"
                : absl::StrCat("expected a string, ", TypeText(*value)));
  return "";
}

bool ObjectReader::Boolean(absl::string_view key) {
  const Json* const value = Find(key);
  if (value != nullptr && value->is_boolean()) return value->get<bool>();
  if (value != nullptr && value->is_string()) {
    const std::string text =
        absl::AsciiStrToLower(value->get_ref<const std::string&>());
    if (text == "true" || text == "false") return text == "true";
  }
  Fail(key, value == nullptr ? "is missing, expected true or false"
                             : "expected true or false");
  return false;
}

std::vector<double> ObjectReader::Numbers(absl::string_view key) {
  const Json* const value = Find(key);
  std::vector<double> numbers;
  if (value != nullptr && value->is_number()) {
    numbers.push_back(value->get<double>());
    return numbers;
  }
  if (value == nullptr || !value->is_array()) {
    Fail(key, value == nullptr ? "is missing, expected a list of numbers"
                               : absl::StrCat("expected a list of numbers, ",
                                              TypeText(*value)));
    return numbers;
  }
  numbers.reserve(value->size());
  for (const Json& item : *value) {
    if (!item.is_number()) {
      Fail(absl::StrCat(key, "[", numbers.size(), "]"),
           absl::StrCat("expected a number, ", TypeText(item)));
      return {};
    }
    numbers.push_back(item.get<double>());
  }
  return numbers;
}

std::vector<int64_t> ObjectReader::Integers(absl::string_view key, int64_t min,
                                            int64_t max) {
  const std::vector<double> numbers = Numbers(key);
  std::vector<int64_t> integers;
  integers.reserve(numbers.size());
  for (const double number : numbers) {
    // Bounds first: the conversion is undefined beyond int64. Block sizes and
    // the like are far below 2^53, where float64 holds every integer.
    if (!(number >= static_cast<double>(min) &&
          number <= static_cast<double>(max)) ||
        number != std::floor(number)) {
      Fail(absl::StrCat(key, "[", integers.size(), "]"),
           absl::StrCat("expected an integer of ", min, " to ", max, ", got ",
                        number));
      return {};
    }
    integers.push_back(static_cast<int64_t>(number));
  }
  return integers;
}

int64_t ObjectReader::Integer(absl::string_view key, int64_t min, int64_t max) {
  const Json* const value = Find(key);
  if (value == nullptr || !value->is_number()) {
    Fail(key, value == nullptr
                  ? "is missing, expected an integer"
                  : absl::StrCat("expected an integer, ", TypeText(*value)));
    return 0;
  }
  const std::vector<int64_t> integers = Integers(key, min, max);
  return integers.empty() ? 0 : integers[0];
}

std::vector<float> ObjectReader::Floats(absl::string_view key,
                                        int64_t* rounded) {
  const std::vector<double> numbers = Numbers(key);
  std::vector<float> floats;
  floats.reserve(numbers.size());
  for (const double number : numbers) {
    floats.push_back(ToFloat(number, rounded));
  }
  return floats;
}

std::vector<double> ObjectReader::Nested(absl::string_view key,
                                         std::vector<int64_t>* shape) {
  shape->clear();
  const Json* const value = Find(key);
  std::vector<double> values;
  if (value == nullptr) {
    Fail(key, "is missing, expected a number or lists of numbers");
    return values;
  }
  for (const Json* inner = value; inner->is_array();) {
    shape->push_back(static_cast<int64_t>(inner->size()));
    if (inner->empty()) break;
    inner = &inner->front();
  }
  Flatten(*value, std::string(key), 0, shape, &values);
  return values;
}

void ObjectReader::Flatten(const Json& value, const std::string& place,
                           size_t depth, std::vector<int64_t>* shape,
                           std::vector<double>* values) {
  if (!status_.ok()) return;
  if (depth == shape->size()) {
    if (value.is_number()) return values->push_back(value.get<double>());
    return Fail(place, absl::StrCat("expected a number, ", TypeText(value)));
  }
  const auto length = static_cast<size_t>((*shape)[depth]);
  if (!value.is_array() || value.size() != length) {
    return Fail(place, absl::StrCat("expected a list of ", length,
                                    " as its neighbours are"));
  }
  for (size_t i = 0; i < length; ++i) {
    Flatten(value[i], absl::StrCat(place, "[", i, "]"), depth + 1, shape,
            values);
  }
}

float ToFloat(double value, int64_t* rounded) {
  constexpr double kMax = std::numeric_limits<float>::max();
  if (std::fabs(value) > kMax) {
    return std::copysign(std::numeric_limits<float>::infinity(),
                         static_cast<float>(value > 0 ? 1 : -1));
  }
  const float result = static_cast<float>(value);
  if (static_cast<double>(result) != value) ++*rounded;
  return result;
}

}  // namespace quantd::server

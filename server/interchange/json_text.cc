#include "server/interchange/json_text.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
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
#include "absl/types/span.h"
#include "core/errors.h"

namespace quantd::server {
namespace {

// A value in a list that grew by doubling, and what a member and a string take
// beside their bytes.
constexpr int64_t kValueBytes = 2 * sizeof(Json) + 8;
constexpr int64_t kMemberBytes = 128;
constexpr int64_t kJsonStringBytes = 64;
// Bytes that are counted before they are charged.
constexpr int64_t kChargedAtOnce = int64_t{1} << 20;

// Memory that an entry leaves beside its numbers and strings: an encoding, its
// name and place, losses.
constexpr int64_t kEntryBytes = 3072;
// Memory that may stay of a number: in scales, codes or zero points, with room
// to grow.
constexpr int64_t kKeptNumberBytes = 16;

// Entries are what the members of the document hold.
constexpr int kEntryDepth = 2;
// A module of AIMET's torch files is an entry, whose inputs and outputs leave
// what entries do: encodings of its name, or losses where there are none.
constexpr int kPlaceDepth = 4;
constexpr int64_t kNamesOfPlace = 4;

// Runs over the bytes of a text in pieces.
class PiecesIterator {
 public:
  using iterator_category = std::forward_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  PiecesIterator(const absl::string_view* piece, const absl::string_view* end)
      : piece_(piece), end_(end) {
    Open();
  }

  reference operator*() const { return *at_; }
  PiecesIterator& operator++() {
    if (++at_ == piece_end_) {
      ++piece_;
      Open();
    }
    return *this;
  }
  bool operator==(const PiecesIterator& other) const {
    return at_ == other.at_;
  }
  bool operator!=(const PiecesIterator& other) const {
    return at_ != other.at_;
  }

 private:
  // The first piece from here that is not empty; at the end null.
  void Open() {
    while (piece_ != end_ && piece_->empty()) ++piece_;
    at_ = piece_ == end_ ? nullptr : piece_->data();
    piece_end_ = piece_ == end_ ? nullptr : at_ + piece_->size();
  }

  const absl::string_view* piece_;
  const absl::string_view* end_;
  const char* at_;
  const char* piece_end_;
};

bool ParsePieces(TextPieces text, nlohmann::json_sax<Json>* sax) {
  const absl::string_view* const end = text.data() + text.size();
  return Json::sax_parse(PiecesIterator(text.data(), end),
                         PiecesIterator(end, end), sax);
}

// Counts what a document would take.
class MemoryCounter final : public nlohmann::json_sax<Json> {
 public:
  explicit MemoryCounter(absl::FunctionRef<absl::Status(int64_t)> charge)
      : charge_(charge) {}

  // Charges what is counted and was not charged yet.
  absl::Status Charge() {
    charged_bytes_ = bytes();
    return charge_(charged_bytes_);
  }
  const absl::Status& status() const { return status_; }

  bool null() override { return Value(); }
  bool boolean(bool) override { return Value(); }
  bool number_integer(number_integer_t) override { return Number(); }
  bool number_unsigned(number_unsigned_t) override { return Number(); }
  bool number_float(number_float_t, const string_t&) override {
    return Number();
  }
  bool string(string_t& value) override {
    const auto size = static_cast<int64_t>(value.size());
    if (depth_ >= kEntryDepth) kept_bytes_ += 2 * size;
    return Value(kValueBytes + kJsonStringBytes + 2 * size);
  }
  bool binary(binary_t&) override { return Fail("binary data"); }

  bool start_object(size_t) override {
    if (!Open()) return false;
    keys_.emplace_back();
    return true;
  }
  bool key(string_t& value) override {
    // Before the key is kept. Those of entries stay until the last is read.
    const auto size = static_cast<int64_t>(value.size());
    if (depth_ == kEntryDepth) entry_name_bytes_ = size;
    const int64_t bytes = kMemberBytes + 2 * size;
    (depth_ <= kEntryDepth ? outer_bytes_ : entry_bytes_) += bytes;
    if (!Check()) return false;
    if (keys_.back().insert(value).second) return true;
    return Fail(absl::StrCat("the key ", QuotedText(value),
                             " stands twice in one object"));
  }
  bool end_object() override {
    keys_.pop_back();
    return Close();
  }
  bool start_array(size_t) override { return Open(); }
  bool end_array() override { return Close(); }

  bool parse_error(size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    return Fail(absl::StrCat("not valid JSON at byte ", position));
  }

 private:
  // Trees, and what is read from them while they are there.
  int64_t bytes() const {
    return 2 * (outer_bytes_ + std::max(entry_bytes_, largest_entry_bytes_)) +
           kept_bytes_;
  }

  bool Fail(absl::string_view what) {
    status_ = core::InterchangeInvalidError(absl::StrCat("the file: ", what));
    return false;
  }
  bool Check() {
    if (bytes() - charged_bytes_ < kChargedAtOnce) return true;
    status_ = Charge();
    return status_.ok();
  }
  bool Count(int64_t value_bytes) {
    if (depth_ < kEntryDepth) {
      outer_bytes_ += value_bytes;
    } else {
      if (depth_ == kEntryDepth) BeginEntry();
      if (MayBeOfModule()) {
        kept_bytes_ += kEntryBytes + kNamesOfPlace * entry_name_bytes_;
      }
      entry_bytes_ += value_bytes;
    }
    return Check();
  }
  // True if a value at this depth is in nothing but objects.
  bool MayBeOfModule() const {
    return depth_ > kEntryDepth && depth_ <= kPlaceDepth &&
           keys_.size() == static_cast<size_t>(depth_);
  }
  void BeginEntry() {
    largest_entry_bytes_ = std::max(largest_entry_bytes_, entry_bytes_);
    entry_bytes_ = 0;
    kept_bytes_ += kEntryBytes;
  }
  bool Value(int64_t bytes = kValueBytes) { return Count(bytes); }
  bool Number() {
    if (depth_ >= kEntryDepth) kept_bytes_ += kKeptNumberBytes;
    return Value();
  }
  bool Open() {
    if (depth_ == kMaxJsonDepth) {
      return Fail(absl::StrCat("nested deeper than ", kMaxJsonDepth));
    }
    if (!Count(kValueBytes + kJsonStringBytes)) return false;
    ++depth_;
    return true;
  }
  bool Close() {
    --depth_;
    return true;
  }

  const absl::FunctionRef<absl::Status(int64_t)> charge_;
  // Memory of the document without its entries, of the entry that is open or
  // was last, of the largest before it, and of what all entries leave.
  int64_t outer_bytes_ = 0;
  int64_t entry_bytes_ = 0;
  int64_t largest_entry_bytes_ = 0;
  int64_t kept_bytes_ = 0;
  // Size of the name of the last entry that has one.
  int64_t entry_name_bytes_ = 0;
  int64_t charged_bytes_ = 0;
  int depth_ = 0;
  // Keys of the objects that are open.
  std::vector<absl::flat_hash_set<std::string>> keys_;
  absl::Status status_;
};

// Builds the head of a document, and the entries under one of its keys.
class EntryReader final : public nlohmann::json_sax<Json> {
 public:
  using Take = absl::FunctionRef<absl::Status(const std::string&, const Json&)>;

  EntryReader(absl::string_view key, Take take) : key_(key), take_(take) {}

  const absl::Status& status() const { return status_; }
  Json TakeHead() { return std::move(head_); }

  bool null() override { return Value(nullptr); }
  bool boolean(bool value) override { return Value(value); }
  bool number_integer(number_integer_t value) override { return Value(value); }
  bool number_unsigned(number_unsigned_t value) override {
    return Value(value);
  }
  bool number_float(number_float_t value, const string_t&) override {
    return Value(value);
  }
  bool string(string_t& value) override { return Value(std::move(value)); }
  bool binary(binary_t&) override { return false; }
  bool start_object(size_t) override { return Open(Json::object()); }
  bool end_object() override { return Close(); }
  bool start_array(size_t) override { return Open(Json::array()); }
  bool end_array() override { return Close(); }
  bool key(string_t& value) override {
    names_[std::min(depth_, kEntryDepth + 1)] = std::move(value);
    return true;
  }
  bool parse_error(size_t, const std::string&,
                   const nlohmann::detail::exception&) override {
    return false;
  }

 private:
  bool is_wanted() const { return names_[1] == key_; }

  bool Value(Json value) {
    if (depth_ > kEntryDepth) {
      if (is_wanted()) Append(std::move(value));
      return true;
    }
    Place(std::move(value));
    return depth_ < kEntryDepth || Finish();
  }

  bool Open(Json container) {
    if (depth_ <= kEntryDepth) {
      Place(std::move(container));
      if (depth_ == 1) names_[kEntryDepth].clear();
      if (depth_ == kEntryDepth) open_ = {&entry_};
    } else if (is_wanted()) {
      open_.push_back(Append(std::move(container)));
    }
    ++depth_;
    return true;
  }

  bool Close() {
    --depth_;
    if (depth_ < kEntryDepth) return true;
    if (depth_ == kEntryDepth) return Finish();
    if (is_wanted()) open_.pop_back();
    return true;
  }

  // Takes the value of the document, of a member of it, or of an entry.
  void Place(Json value) {
    if (depth_ == 0) {
      head_ = std::move(value);
    } else if (depth_ == 1) {
      if (head_.is_object()) head_[names_[1]] = std::move(value);
    } else {
      if (head_.is_object()) {
        Json& member = head_[names_[1]];
        if (member.empty() && member.is_array()) member.push_back(nullptr);
        if (member.empty() && member.is_object()) member[""] = nullptr;
      }
      entry_ = std::move(value);
    }
  }

  // To the innermost that is open in an entry.
  Json* Append(Json value) {
    Json& container = *open_.back();
    if (container.is_array()) {
      container.push_back(std::move(value));
      return &container.back();
    }
    Json& member = container[names_[kEntryDepth + 1]];
    member = std::move(value);
    return &member;
  }

  bool Finish() {
    if (is_wanted()) status_ = take_(names_[kEntryDepth], entry_);
    entry_ = nullptr;
    return status_.ok();
  }

  const absl::string_view key_;
  const Take take_;
  int depth_ = 0;
  // The last key at each depth; below entries, that of the innermost object.
  std::string names_[kEntryDepth + 2];
  Json head_;
  Json entry_;
  std::vector<Json*> open_;
  absl::Status status_;
};

// Values that are written at once.
constexpr size_t kDumpedAtOnce = 256;

// Number of values in `json`, itself among them, counted up to `most`.
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

absl::Status ChargeJsonMemory(TextPieces text,
                              absl::FunctionRef<absl::Status(int64_t)> charge) {
  // The parser takes a zero byte for the end and would ignore what follows.
  size_t before = 0;
  for (const absl::string_view piece : text) {
    const size_t zero_at = piece.find('\0');
    if (zero_at != absl::string_view::npos) {
      return core::InterchangeInvalidError(
          absl::StrCat("the file has a zero byte at byte ", before + zero_at));
    }
    before += piece.size();
  }
  MemoryCounter counter(charge);
  if (!ParsePieces(text, &counter)) return counter.status();
  return counter.Charge();
}

Json ReadJsonHead(TextPieces text) {
  const auto nothing = [](const std::string&, const Json&) {
    return absl::OkStatus();
  };
  // No member has this name.
  EntryReader reader(absl::string_view("\0", 1), nothing);
  return ParsePieces(text, &reader) ? reader.TakeHead() : Json();
}

absl::Status ReadJsonEntries(
    TextPieces text, absl::string_view key,
    absl::FunctionRef<absl::Status(const std::string& name, const Json& entry)>
        take) {
  EntryReader reader(key, take);
  ParsePieces(text, &reader);
  return reader.status();
}

std::string DumpJson(const Json& json) {
  // Names are UTF-8, and must not throw if they are not.
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

absl::Status AppendJson(const Json& json, core::StopToken stop,
                        std::string* out) {
  if (stop.stopped()) return core::StoppedError();
  if (ValueCount(json, kDumpedAtOnce) < kDumpedAtOnce) {
    out->append(DumpJson(json));
    return absl::OkStatus();
  }
  out->push_back(json.is_array() ? '[' : '{');
  bool is_first = true;
  for (auto next = json.begin(); next != json.end(); is_first = false) {
    if (!is_first) out->push_back(',');
    if (json.is_object()) {
      absl::StrAppend(out, DumpJson(Json(next.key())), ":");
    } else {
      // Small values of a list together, which is several times faster.
      Json values = Json::array();
      for (size_t count = 0; next != json.end(); ++next) {
        count += ValueCount(*next, kDumpedAtOnce);
        if (count >= kDumpedAtOnce) break;
        values.push_back(*next);
      }
      if (!values.empty()) {
        if (stop.stopped()) return core::StoppedError();
        const std::string text = DumpJson(values);
        out->append(text, 1, text.size() - 2);
        continue;
      }
    }
    absl::Status status = AppendJson(*next++, stop, out);
    if (!status.ok()) return status;
  }
  out->push_back(json.is_array() ? ']' : '}');
  return absl::OkStatus();
}

std::string QuotedText(absl::string_view text) {
  constexpr size_t kMostBytes = 200;
  size_t size = std::min(text.size(), kMostBytes);
  // A cut character would not be UTF-8, of which messages are.
  while (size < text.size() && size > 0 && (text[size] & 0xC0) == 0x80) --size;
  return absl::StrCat("\"", absl::Utf8SafeCHexEscape(text.substr(0, size)),
                      size < text.size() ? "...\"" : "\"");
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

#include "client/cpp/envelope.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cpp/errors.h"

namespace quantd::internal {
namespace {

// Below this a copy is cheaper than a counted reference.
constexpr size_t kCopyBelowBytes = 4096;

constexpr int kHeaderField = 1;
constexpr int kOffsetField = 2;
constexpr int kDataField = 3;
constexpr int kSharedField = 4;
constexpr int kSummaryField = 4;
constexpr int kErrorField = 5;
constexpr int kRequestScalesField = 5;
constexpr int kResponseScalesField = 6;

constexpr int kVarintType = 0;
constexpr int kFixed64Type = 1;
constexpr int kBytesType = 2;
constexpr int kFixed32Type = 5;

void AppendVarint(uint64_t value, std::string* out) {
  while (value >= 0x80) {
    out->push_back(static_cast<char>(value | 0x80));
    value >>= 7;
  }
  out->push_back(static_cast<char>(value));
}

void AppendTag(int field, int type, std::string* out) {
  AppendVarint(static_cast<uint64_t>(field) << 3 | static_cast<uint64_t>(type),
               out);
}

void AppendBytes(int field, absl::string_view value, std::string* out) {
  AppendTag(field, kBytesType, out);
  AppendVarint(value.size(), out);
  out->append(value.data(), value.size());
}

void DropReference(void* references) {
  const std::unique_ptr<std::shared_ptr<PayloadReferences>> owned(
      static_cast<std::shared_ptr<PayloadReferences>*>(references));
  (*owned)->Remove();
}

// Walks the slices of one message. Not thread-safe.
class SliceCursor {
 public:
  explicit SliceCursor(const std::vector<grpc::Slice>& slices)
      : slices_(slices) {
    for (const grpc::Slice& slice : slices_) remaining_ += slice.size();
    SkipEmpty();
  }

  size_t remaining() const { return remaining_; }

  bool ReadVarint(uint64_t* value) {
    *value = 0;
    for (int shift = 0; shift < 70; shift += 7) {
      if (remaining_ == 0) return false;
      const uint8_t byte = *(slices_[index_].begin() + position_);
      Advance(1);
      if (shift < 64) *value |= static_cast<uint64_t>(byte & 0x7F) << shift;
      if ((byte & 0x80) == 0) return true;
    }
    return false;
  }

  // Calls visit(span) for the pieces of the next `size` bytes.
  // Requires: size <= remaining().
  template <typename Visitor>
  void Read(size_t size, Visitor&& visit) {
    while (size > 0) {
      const grpc::Slice& slice = slices_[index_];
      const size_t piece = std::min(size, slice.size() - position_);
      visit(absl::MakeConstSpan(slice.begin() + position_, piece));
      Advance(piece);
      size -= piece;
    }
  }

 private:
  void Advance(size_t size) {
    position_ += size;
    remaining_ -= size;
    SkipEmpty();
  }

  void SkipEmpty() {
    while (index_ < slices_.size() && position_ == slices_[index_].size()) {
      ++index_;
      position_ = 0;
    }
  }

  const std::vector<grpc::Slice>& slices_;
  size_t index_ = 0;
  size_t position_ = 0;
  size_t remaining_ = 0;
};

}  // namespace

void PayloadReferences::Add() {
  absl::MutexLock lock(&mutex_);
  ++count_;
}

void PayloadReferences::Remove() {
  absl::MutexLock lock(&mutex_);
  --count_;
}

bool PayloadReferences::AwaitNone(absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  return mutex_.AwaitWithTimeout(
      absl::Condition(
          +[](int* count) { return *count == 0; }, &count_),
      timeout);
}

grpc::Slice SliceOf(absl::Span<const uint8_t> data,
                    const std::shared_ptr<PayloadReferences>& references) {
  if (data.size() < kCopyBelowBytes) {
    return grpc::Slice(data.data(), data.size());
  }
  references->Add();
  // gRPC only reads it; its interface has no const.
  return grpc::Slice(const_cast<uint8_t*>(data.data()), data.size(),
                     &DropReference,
                     new std::shared_ptr<PayloadReferences>(references));
}

grpc::ByteBuffer EncodeRequest(absl::string_view header,
                               absl::Span<const std::string> scales,
                               uint64_t offset_bytes, const grpc::Slice& data) {
  std::string front;
  const bool copy = data.size() < kCopyBelowBytes;
  front.reserve(header.size() + 32 + (copy ? data.size() : 0));
  if (!header.empty()) {
    AppendTag(kHeaderField, kBytesType, &front);
    AppendVarint(header.size(), &front);
    front.append(header.data(), header.size());
  }
  for (const std::string& piece : scales) {
    AppendBytes(kRequestScalesField, piece, &front);
  }
  if (offset_bytes != 0) {
    AppendTag(kOffsetField, kVarintType, &front);
    AppendVarint(offset_bytes, &front);
  }
  if (data.size() > 0) {
    AppendTag(kDataField, kBytesType, &front);
    AppendVarint(data.size(), &front);
  }
  if (copy) {
    front.append(reinterpret_cast<const char*>(data.begin()), data.size());
    const grpc::Slice slice(front.data(), front.size());
    return grpc::ByteBuffer(&slice, 1);
  }
  const grpc::Slice slices[] = {grpc::Slice(front.data(), front.size()), data};
  return grpc::ByteBuffer(slices, 2);
}

grpc::ByteBuffer EncodeSharedRequest(absl::string_view header,
                                     uint64_t offset_bytes,
                                     absl::string_view shared) {
  std::string message;
  AppendBytes(kHeaderField, header, &message);
  if (offset_bytes != 0) {
    AppendTag(kOffsetField, kVarintType, &message);
    AppendVarint(offset_bytes, &message);
  }
  AppendBytes(kSharedField, shared, &message);
  const grpc::Slice slice(message.data(), message.size());
  return grpc::ByteBuffer(&slice, 1);
}

absl::Status DecodeResponse(const grpc::ByteBuffer& buffer,
                            Response* response) {
  *response = Response();
  if (!buffer.Dump(&response->slices).ok()) {
    return ResponseMalformedError("the message could not be read");
  }
  SliceCursor cursor(response->slices);
  const auto append = [&cursor](size_t size, bool* has, std::string* out) {
    *has = true;
    cursor.Read(size, [out](absl::Span<const uint8_t> piece) {
      out->append(reinterpret_cast<const char*>(piece.data()), piece.size());
    });
  };
  while (cursor.remaining() > 0) {
    uint64_t tag = 0;
    if (!cursor.ReadVarint(&tag) || tag > 0xFFFFFFFF || (tag >> 3) == 0) {
      return ResponseMalformedError("expected a protobuf tag");
    }
    const int field = static_cast<int>(tag >> 3);
    const int type = static_cast<int>(tag & 7);
    if (type == kVarintType) {
      uint64_t value = 0;
      if (!cursor.ReadVarint(&value)) {
        return ResponseMalformedError("a varint is cut off or too long");
      }
      if (field == kOffsetField) response->offset_bytes = value;
      continue;
    }
    uint64_t size = 0;
    if (type == kFixed64Type) {
      size = 8;
    } else if (type == kFixed32Type) {
      size = 4;
    } else if (type != kBytesType || !cursor.ReadVarint(&size)) {
      return ResponseMalformedError(
          absl::StrCat("field ", field, " has wire type ", type));
    }
    if (size > cursor.remaining()) {
      return ResponseMalformedError(
          absl::StrCat("field ", field, " has ", size, " bytes, but only ",
                       cursor.remaining(), " are left"));
    }
    const bool is_bytes = type == kBytesType;
    if (is_bytes && field == kHeaderField) {
      append(size, &response->has_header, &response->header);
    } else if (is_bytes && field == kSummaryField) {
      append(size, &response->has_summary, &response->summary);
    } else if (is_bytes && field == kErrorField) {
      append(size, &response->has_error, &response->error);
    } else if (is_bytes && field == kResponseScalesField) {
      append(size, &response->has_scales, &response->scales);
    } else if (is_bytes && field == kDataField) {
      response->data.clear();
      response->data_size_bytes = size;
      cursor.Read(size, [response](absl::Span<const uint8_t> piece) {
        response->data.push_back(piece);
      });
    } else {
      cursor.Read(size, [](absl::Span<const uint8_t>) {});
    }
  }
  return absl::OkStatus();
}

}  // namespace quantd::internal

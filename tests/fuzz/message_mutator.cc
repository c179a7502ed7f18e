#include "tests/fuzz/message_mutator.h"

#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <random>
#include <string>

#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"

namespace quantd::fuzz {
namespace {

using ::google::protobuf::EnumDescriptor;
using ::google::protobuf::FieldDescriptor;
using ::google::protobuf::Message;
using ::google::protobuf::Reflection;

template <typename T>
T MutateInteger(T value, std::mt19937_64& random) {
  // Unsigned, so that nothing overflows.
  const auto bits = static_cast<uint64_t>(value);
  switch (random() % 6) {
    case 0:
      return static_cast<T>(bits + 1);
    case 1:
      return static_cast<T>(bits - 1);
    case 2:
      return static_cast<T>(random() % 40);
    case 3:
      return static_cast<T>((uint64_t{1} << random() % 64) - random() % 2);
    case 4:
      return static_cast<T>(-(uint64_t{1} << random() % 64));
    default:
      return static_cast<T>(random() >> random() % 64);
  }
}

template <typename T>
T MutateFloat(T value, std::mt19937_64& random) {
  using Limits = std::numeric_limits<T>;
  const T special[] = {0,
                       -T{0},
                       1,
                       -1,
                       T{0.5},
                       Limits::min(),
                       Limits::denorm_min(),
                       Limits::max(),
                       Limits::lowest(),
                       Limits::infinity(),
                       -Limits::infinity(),
                       Limits::quiet_NaN()};
  switch (random() % 5) {
    case 0:
      return value * 2;
    case 1:
      return -value;
    case 2: {
      const uint64_t bits = random();
      std::memcpy(&value, &bits, sizeof(value));
      return value;
    }
    case 3:
      return static_cast<T>(static_cast<int>(random() % 64) - 32) / 8;
    default:
      return special[random() % std::size(special)];
  }
}

std::string MutateString(std::string value, std::mt19937_64& random) {
  const size_t at = value.empty() ? 0 : random() % value.size();
  switch (random() % 4) {
    case 0:
      value.insert(at, 1 + random() % 4, static_cast<char>(random()));
      break;
    case 1:
      value.erase(at, 1 + random() % 4);
      break;
    case 2:
      if (value.size() < 4096) value += value;
      break;
    default:
      if (!value.empty()) value[at] = static_cast<char>(random());
  }
  return value;
}

int MutateEnum(const EnumDescriptor& type, std::mt19937_64& random) {
  if (random() % 8 == 0) return static_cast<int>(random() % 128);
  return type.value(static_cast<int>(random() % type.value_count()))->number();
}

// The value of a field or, of a repeated one, of its element `index`.
void MutateValue(Message* message, const FieldDescriptor* field, int index,
                 std::mt19937_64& random) {
  const Reflection* const r = message->GetReflection();
  const bool repeated = field->is_repeated();
  switch (field->cpp_type()) {
#define QUANTD_MUTATE(TYPE, Name, Mutate)                                \
  case FieldDescriptor::TYPE:                                            \
    if (repeated) {                                                      \
      r->SetRepeated##Name(                                              \
          message, field, index,                                         \
          Mutate(r->GetRepeated##Name(*message, field, index), random)); \
    } else {                                                             \
      r->Set##Name(message, field,                                       \
                   Mutate(r->Get##Name(*message, field), random));       \
    }                                                                    \
    break
    QUANTD_MUTATE(CPPTYPE_INT32, Int32, MutateInteger);
    QUANTD_MUTATE(CPPTYPE_INT64, Int64, MutateInteger);
    QUANTD_MUTATE(CPPTYPE_UINT32, UInt32, MutateInteger);
    QUANTD_MUTATE(CPPTYPE_UINT64, UInt64, MutateInteger);
    QUANTD_MUTATE(CPPTYPE_FLOAT, Float, MutateFloat);
    QUANTD_MUTATE(CPPTYPE_DOUBLE, Double, MutateFloat);
    QUANTD_MUTATE(CPPTYPE_STRING, String, MutateString);
#undef QUANTD_MUTATE
    case FieldDescriptor::CPPTYPE_BOOL:
      r->SetBool(message, field, !r->GetBool(*message, field));
      break;
    case FieldDescriptor::CPPTYPE_ENUM: {
      const int value = MutateEnum(*field->enum_type(), random);
      if (repeated) {
        r->SetRepeatedEnumValue(message, field, index, value);
      } else {
        r->SetEnumValue(message, field, value);
      }
      break;
    }
    case FieldDescriptor::CPPTYPE_MESSAGE:
      MutateMessage(repeated ? r->MutableRepeatedMessage(message, field, index)
                             : r->MutableMessage(message, field),
                    random);
      break;
  }
}

void AddElement(Message* message, const FieldDescriptor* field) {
  const Reflection* const r = message->GetReflection();
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      return r->AddInt32(message, field, 0);
    case FieldDescriptor::CPPTYPE_INT64:
      return r->AddInt64(message, field, 0);
    case FieldDescriptor::CPPTYPE_UINT32:
      return r->AddUInt32(message, field, 0);
    case FieldDescriptor::CPPTYPE_UINT64:
      return r->AddUInt64(message, field, 0);
    case FieldDescriptor::CPPTYPE_FLOAT:
      return r->AddFloat(message, field, 0);
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return r->AddDouble(message, field, 0);
    case FieldDescriptor::CPPTYPE_STRING:
      return r->AddString(message, field, "");
    case FieldDescriptor::CPPTYPE_ENUM:
      return r->AddEnumValue(message, field, 0);
    case FieldDescriptor::CPPTYPE_BOOL:
      return r->AddBool(message, field, false);
    case FieldDescriptor::CPPTYPE_MESSAGE:
      r->AddMessage(message, field);
  }
}

}  // namespace

void MutateMessage(Message* message, std::mt19937_64& random) {
  const int field_count = message->GetDescriptor()->field_count();
  if (field_count == 0) return;
  const FieldDescriptor* const field =
      message->GetDescriptor()->field(static_cast<int>(random() % field_count));
  const Reflection* const r = message->GetReflection();
  if (!field->is_repeated()) {
    if (random() % 16 == 0) {
      r->ClearField(message, field);
    } else {
      MutateValue(message, field, 0, random);
    }
    return;
  }
  const int size = r->FieldSize(*message, field);
  const auto any = [&] { return static_cast<int>(random() % size); };
  switch (random() % 8) {
    case 0:
      if (size > 0) r->RemoveLast(message, field);
      break;
    case 1:
      if (size > 1) r->SwapElements(message, field, any(), any());
      break;
    case 2:
    case 3:
      AddElement(message, field);
      MutateValue(message, field, size, random);
      break;
    default:
      if (size > 0) MutateValue(message, field, any(), random);
  }
}

}  // namespace quantd::fuzz

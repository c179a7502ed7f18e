// Serialized statistics: whatever is taken is a state that is the same after a
// round trip, merges and coarsens. And states that are made from elements are
// taken, whatever way the elements were split.

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/errors.h"
#include "core/statistics/statistics_state.h"
#include "core/statistics/tensor_statistics.h"
#include "core/types/block_layout.h"
#include "core/types/element_type.h"
#include "quantd/v1/statistics.pb.h"
#include "server/wire/statistics_proto.h"
#include "tests/fuzz/fuzz_target.h"

namespace quantd::fuzz {
namespace statistics_target {
namespace {

std::string Serialized(const core::StatisticsState& state) {
  v1::StatisticsState proto;
  server::StateToProto(state, &proto);
  return proto.SerializeAsString();
}

core::StatisticsState Parsed(const std::string& bytes) {
  v1::StatisticsState proto;
  Require(proto.ParseFromString(bytes), "a state is a message");
  absl::StatusOr<core::StatisticsState> state = server::StateFromProto(proto);
  Require(state.ok(), "what is written is read");
  return *std::move(state);
}

void RequireCoarsens(const core::StatisticsState& state) {
  const absl::StatusOr<core::TensorStatistics> same =
      core::StatisticsAt(state, state.block_size);
  Require(same.ok(), "a state has its own granularity");
  Require(
      Serialized({state.block_size, state.shape, *same}) == Serialized(state),
      "at its own granularity a state is itself");
  const absl::StatusOr<core::TensorStatistics> whole =
      core::StatisticsAt(state, {});
  Require(whole.ok(), "every granularity coarsens to per tensor");
  Require(whole->scale_count() == 1 &&
              whole->counts().total == state.statistics.counts().total,
          "per tensor is everything");
  std::vector<int64_t> twice = state.block_size;
  for (int64_t& size : twice) size = std::min<int64_t>(size, 1 << 20) * 2;
  const absl::StatusOr<core::TensorStatistics> coarse =
      core::StatisticsAt(state, twice);
  Require(
      !coarse.ok() || coarse->counts().total == state.statistics.counts().total,
      "coarsening loses nothing");
}

void RequireSound(const core::StatisticsState& state) {
  const std::string bytes = Serialized(state);
  const core::StatisticsState again = Parsed(bytes);
  Require(Serialized(again) == bytes, "a round trip changes nothing");
  core::StatisticsState twice = state;
  const absl::Status merged = core::MergeState(again, &twice);
  Require(merged.ok(), "a state merges with itself");
  Require(
      twice.statistics.counts().total == 2 * state.statistics.counts().total,
      "merging adds the counts");
  RequireCoarsens(state);
}

void RunSerialized(absl::Span<const uint8_t> bytes) {
  v1::StatisticsState proto;
  if (!proto.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return;
  }
  const absl::StatusOr<core::StatisticsState> state =
      server::StateFromProto(proto);
  if (!state.ok()) {
    Require(core::ErrorReason(state.status()) == "STATISTICS_INVALID",
            "what is no state is refused as such");
    return;
  }
  RequireSound(*state);
}

// A shape of up to 3 dimensions, blocks, bits of the histogram, a type, and
// the bytes of the elements, over and over.
core::StatisticsState Build(ByteSource& source, int parts) {
  core::StatisticsState state;
  const int rank = source.Byte() % 4;
  for (int d = 0; d < rank; ++d) {
    const uint8_t byte = source.Byte();
    state.shape.push_back(byte % 6);
    state.block_size.push_back(byte / 6 % 4);
  }
  const int mantissa_bits = core::kMinMantissaBits + source.Byte() % 9;
  const auto type = static_cast<core::ElementType>(1 + source.Byte() % 4);
  const core::BlockLayout layout =
      *core::BlockLayout::Create(state.shape, state.block_size);
  std::vector<uint8_t> data(layout.element_count() *
                            core::ElementSizeBytes(type));
  const absl::Span<const uint8_t> rest = source.rest();
  for (size_t i = 0; i < data.size() && !rest.empty(); ++i) {
    data[i] = rest[i % rest.size()];
  }
  state.statistics =
      core::TensorStatistics(layout.scale_count(), mantissa_bits);
  for (int part = 0; part < parts; ++part) {
    const int64_t first = layout.element_count() * part / parts;
    const int64_t last = layout.element_count() * (part + 1) / parts;
    core::TensorStatistics statistics(layout.scale_count(), mantissa_bits);
    statistics.Update(layout, type, first, last - first,
                      data.data() + first * core::ElementSizeBytes(type),
                      nullptr);
    state.statistics.Merge(statistics);
  }
  return state;
}

void RunElements(const ByteSource& source) {
  ByteSource one = source;
  ByteSource three = source;
  const core::StatisticsState state = Build(one, 1);
  Require(Serialized(state) == Serialized(Build(three, 3)),
          "states do not depend on how elements were split");
  RequireSound(state);
}

void Run(absl::Span<const uint8_t> input) {
  ByteSource source(input);
  if (source.Byte() % 2 == 0) {
    RunSerialized(source.rest());
  } else {
    RunElements(source);
  }
}

std::vector<std::string> Seeds() {
  // Mode, rank, shape and blocks, mantissa bits, type, elements.
  std::vector<std::string> elements = {
      std::string("\x01\x00\x05\x00\x00\x00\x80\x3f", 8),
      std::string("\x01\x01\x05\x03\x02\x00\x3c\x00\xbc\x00\x7c", 11),
      std::string("\x01\x02\x0a\x04\x00\x00"
                  "\x01\x02\x03\x04\x05\x06\x07\x08\x09\x80\x7f\xff",
                  18),
      std::string("\x01\x03\x0b\x10\x05\x08\x03"
                  "\x9a\x99\x99\x99\x99\x99\xb9\x3f\xff\x7f\xf0\xff",
                  19),
      std::string("\x01\x02\x00\x0a\x01\x00", 6),
  };
  std::vector<std::string> seeds = elements;
  // The same as they are stored.
  for (const std::string& seed : elements) {
    ByteSource source(
        {reinterpret_cast<const uint8_t*>(seed.data()) + 1, seed.size() - 1});
    seeds.push_back(std::string(1, '\0') + Serialized(Build(source, 1)));
  }
  return seeds;
}

// The first byte says whether there is one.
size_t MessageAt(absl::Span<const uint8_t> input) {
  return input.empty() || input[0] % 2 == 1 ? input.size() : 1;
}

}  // namespace
}  // namespace statistics_target

FuzzTarget StatisticsTarget() {
  return {"statistics", statistics_target::Run, statistics_target::Seeds,
          statistics_target::MessageAt,
          &v1::StatisticsState::default_instance()};
}

}  // namespace quantd::fuzz

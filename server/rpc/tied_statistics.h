// Tensors that share a scale, as a request names them: see v1::TiedTensors.

#ifndef QUANTD_SERVER_RPC_TIED_STATISTICS_H_
#define QUANTD_SERVER_RPC_TIED_STATISTICS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/calibrate/encoding_spec.h"
#include "core/parallel/stop_token.h"
#include "core/statistics/statistics_state.h"
#include "google/protobuf/repeated_ptr_field.h"
#include "quantd/v1/encoding_service.pb.h"
#include "server/guard/memory_budget.h"
#include "server/rpc/encoding_source.h"
#include "server/rpc/rpc_environment.h"
#include "server/rpc/stored_calibration.h"
#include "server/store/statistics_store.h"

namespace quantd::server {

// The most tensors of all groups of a request.
constexpr int64_t kMaxTiedTensors = 65536;

// The groups of a request, and what the tensors of each share. The tensors come
// in order of name. The first of a group waits until the statistics of all of
// its tensors were taken in, one after the other. Only what they share is held
// then, until the last of the group was answered. Not thread-safe.
class TiedStatistics {
 public:
  // `env` must outlive this.
  explicit TiedStatistics(const RpcEnvironment& env) : env_(env) {}

  // Checks the groups of a request, which must stay.
  // Errors: TIE_INVALID, NAME_INVALID, MEMORY_BUDGET.
  absl::Status Open(
      const google::protobuf::RepeatedPtrField<v1::TiedTensors>& ties);

  bool empty() const { return groups_.empty(); }

  // A tensor has statistics. `spec`  a number that equal specs share; -1 where
  // the tensor is left out.
  void See(absl::string_view tensor, int spec);
  // When all that have statistics were seen.
  // Errors: STATISTICS_NOT_FOUND (a tensor of a group was not seen),
  // TIE_INVALID (two of a group have different specs).
  absl::Status CheckSeen(const std::string& model,
                         const std::string& revision) const;

  // The tensor whose statistics to take in before `tensor` can be calibrated;
  // null when there is none, or no more.
  // `specs`  those that it is to be calibrated by.
  const std::string* NextToTakeIn(absl::string_view tensor,
                                  absl::Span<const core::EncodingSpec> specs);
  // Takes in what was read of it.
  // `read`    why that failed; the whole group fails then.
  // `specs`, `transport`  as they are of NextToTakeIn and
  //                       StoredCalibrator::Calibrate.
  // Errors: CANCELLED.
  absl::Status TakeIn(absl::string_view tensor, const absl::Status& read,
                      const StoredStatistics& stored,
                      absl::Span<const core::EncodingSpec> specs,
                      ScaleTransport transport, core::StopToken stop);

  // The scale that a tensor shares under the spec of that index.
  // Errors: those of v1::TiedTensors that concern all tensors of a group, those
  // of RevisionStatistics::Load and StoredCalibrator::Resolve, MEMORY_BUDGET,
  // all at the name of a tensor in `ties`; those of StoredCalibrator::Calibrate
  // at the group.
  absl::StatusOr<TiedScale> ScaleOf(absl::string_view tensor,
                                    size_t spec_index) const;

  // A tensor was answered.
  void Done(absl::string_view tensor);

 private:
  // Statistics of the tensors so far, put together at one granularity.
  struct Merged {
    bool with_histograms = false;
    core::StatisticsState state;
    absl::Status status;
    // Number of tensors that were taken in.
    int taken_in = 0;
  };
  // The result that a group shares under one spec.
  struct Shared {
    absl::Status status;
    TiedScale scale;
    // Index in Group::merged of what its encoding is made of; -1 for none.
    int merged = -1;
  };
  struct Group {
    const v1::TiedTensors* tensors = nullptr;
    // A number of its specs; -1 while none was seen.
    int spec = -1;
    // Index of the first tensor with another spec; -1 where there is none.
    int differs = -1;
    // Tensors that are yet to be answered.
    int64_t left = 0;
    int taken_in = 0;
    // Why all of its tensors fail.
    absl::Status status;
    // Per spec; from the first tensor to the last.
    std::vector<Shared> shared = {};
    // Only until all are taken in.
    std::vector<Merged> merged = {};
    MemoryBudget::Lease lease = {};
  };
  struct Member {
    size_t group;
    int index;
    bool seen = false;
  };

  Group* FindGroup(absl::string_view tensor);
  std::string FieldOf(const Group& group) const;
  // The field of one of its tensors.
  std::string FieldOf(const Group& group, int index) const;
  void TakeInUnder(const core::EncodingSpec& spec, ScaleTransport transport,
                   const StoredStatistics& stored, core::StopToken stop,
                   StoredCalibrator* calibrator, Group* group, Shared* shared);
  absl::Status Merge(const StoredCalibrator::Resolved& resolved,
                     const StoredStatistics& stored, Group* group,
                     Shared* shared);
  // Makes the encodings of what was put together.
  void Finish(absl::Span<const core::EncodingSpec> specs,
              ScaleTransport transport, core::StopToken stop, Group* group);

  const RpcEnvironment& env_;
  std::vector<Group> groups_;
  // By names in the request.
  absl::flat_hash_map<absl::string_view, Member> members_;
  // Lease of groups_ and members_.
  MemoryBudget::Lease lease_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_TIED_STATISTICS_H_

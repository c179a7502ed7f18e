// ChooseMixture: measured errors > one spec for each tensor.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "core/calibrate/mixed_precision.h"
#include "core/calibrate/precision_option.h"
#include "core/errors.h"
#include "core/types/portable_log.h"
#include "quantd/v1/encoding_service.pb.h"
#include "server/guard/memory_budget.h"
#include "server/rpc/encoding_call.h"
#include "server/rpc/mixture.h"
#include "server/rpc/statistics_rpcs.h"
#include "server/rpc/steps.h"
#include "server/wire/rpcs.h"

namespace quantd::server {
namespace {

// SQNR in dB. Noise that is not finite is worse than any number, here too.
double SqnrDb(double noise_to_signal) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (noise_to_signal == 0) return kInfinity;
  if (!std::isfinite(noise_to_signal)) return -kInfinity;
  return core::Decibels(1, noise_to_signal);
}

absl::Status OptionError(const std::string& what, int tensor, int option) {
  return core::WithField(
      core::CandidatesInvalidError(what),
      absl::StrCat("tensors[", tensor, "].options[", option, "]"));
}

class ChooseMixtureCall final : public EncodingCall {
 public:
  explicit ChooseMixtureCall(const CallArguments& arguments)
      : EncodingCall(arguments, Rpc::kChooseMixture, &request_) {}

 private:
  void Took(bool more) override {
    if (!more)
      return End(core::MessageMalformedError("expected a request, got none"));
    Schedule(StepKind::kLong, [this] {
      absl::Status status = Choose();
      Schedule(StepKind::kQuantum, [this, status] { Finish(status); });
    });
  }

  // The answer is the end.
  void Sent() override {}

  void Finish(const absl::Status& status) {
    if (!IsWanted()) return;
    status.ok() ? EndWith(response_) : End(status);
  }

  absl::Status Choose() {
    absl::Status status = CheckRequest();
    if (status.ok()) status = Charge();
    if (!status.ok()) return status;
    const std::vector<core::TensorOptions> tensors = TakeOptions();
    for (const v1::MixtureTarget& target : request_.targets()) {
      status = MakeMixture(
          tensors, target,
          [this](size_t tensor) -> const std::string& {
            return request_.tensors(static_cast<int>(tensor)).tensor();
          },
          [&tensors](size_t tensor, int option) {
            return SqnrDb(tensors[tensor][option].noise_to_signal);
          },
          stop(), response_.add_mixtures());
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status CheckRequest() const {
    if (request_.tensors().empty()) {
      return core::WithField(
          core::CandidatesInvalidError("0 tensors, expected at least 1"),
          "tensors");
    }
    const int target_count = request_.targets_size();
    if (target_count == 0 || target_count > kMaxMixtureTargets) {
      return core::WithField(
          core::TargetInvalidError(absl::StrCat(
              target_count, " targets, expected 1 to ", kMaxMixtureTargets)),
          "targets");
    }
    for (int i = 0; i < target_count; ++i) {
      absl::Status status = CheckTarget(request_.targets(i));
      if (!status.ok()) {
        return core::WithField(status, absl::StrCat("targets[", i, "]"));
      }
    }
    constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
    int64_t left_bytes = kMax;
    for (int i = 0; i < request_.tensors_size(); ++i) {
      uint64_t largest_bytes = 0;
      absl::Status status = CheckTensor(i, &largest_bytes);
      if (!status.ok()) return status;
      if (largest_bytes > static_cast<uint64_t>(left_bytes)) {
        return core::WithField(
            core::CandidatesInvalidError(absl::StrCat(
                "the sizes of the tensors add up to more than ", kMax)),
            absl::StrCat("tensors[", i, "]"));
      }
      left_bytes -= static_cast<int64_t>(largest_bytes);
    }
    return absl::OkStatus();
  }

  // And finds its largest option.
  absl::Status CheckTensor(int i, uint64_t* largest_bytes) const {
    const v1::MixtureTensor& tensor = request_.tensors(i);
    const int count = tensor.options_size();
    if (count == 0 || count > kMaxSweepSpecs) {
      return core::WithField(
          core::CandidatesInvalidError(
              absl::StrCat(count, " options, expected 1 to ", kMaxSweepSpecs)),
          absl::StrCat("tensors[", i, "].options"));
    }
    for (int k = 0; k < count; ++k) {
      const v1::MixtureOption& option = tensor.options(k);
      constexpr uint32_t kMaxIndex = std::numeric_limits<int32_t>::max();
      if (option.spec_index() > kMaxIndex) {
        return OptionError(absl::StrCat("spec_index is ", option.spec_index(),
                                        ", expected 0 to ", kMaxIndex),
                           i, k);
      }
      if (option.noise_to_signal() < 0) {
        return OptionError(
            absl::StrCat("noise_to_signal is ", option.noise_to_signal(),
                         ", expected 0 or more"),
            i, k);
      }
      *largest_bytes = std::max(*largest_bytes, option.size_bytes());
    }
    return absl::OkStatus();
  }

  // Charges the memory of the choice and the answer.
  absl::Status Charge() {
    int64_t bytes = 0;
    int64_t most_options = 0;
    for (const v1::MixtureTensor& tensor : request_.tensors()) {
      // A choice lies on the heap, and so does its name.
      constexpr int64_t kChoiceBytes = sizeof(v1::SweepMixture::Choice) +
                                       sizeof(std::string) + sizeof(void*) + 32;
      const int64_t options = tensor.options_size();
      bytes +=
          MixtureTensorBytes(options) +
          request_.targets_size() *
              (kChoiceBytes + static_cast<int64_t>(tensor.tensor().size()));
      most_options = std::max(most_options, options);
    }
    const bool searches =
        absl::c_any_of(request_.targets(), [](const v1::MixtureTarget& target) {
          return target.has_max_size_bytes();
        });
    if (searches) bytes += core::MixtureBytes(most_options);
    return env().budget->Grow(&lease_, bytes,
                              "choose for fewer targets at once");
  }

  std::vector<core::TensorOptions> TakeOptions() const {
    std::vector<core::TensorOptions> tensors;
    tensors.reserve(request_.tensors_size());
    for (const v1::MixtureTensor& tensor : request_.tensors()) {
      core::TensorOptions& options = tensors.emplace_back();
      options.reserve(tensor.options_size());
      for (const v1::MixtureOption& option : tensor.options()) {
        options.push_back({static_cast<int>(option.spec_index()),
                           static_cast<int64_t>(option.size_bytes()),
                           option.noise_to_signal()});
      }
    }
    return tensors;
  }

  v1::ChooseMixtureRequest request_;
  // Goes after the answer that it is for.
  MemoryBudget::Lease lease_;
  v1::ChooseMixtureResponse response_;
};

}  // namespace

EncodingCall* StartChooseMixture(const CallArguments& arguments) {
  return EncodingCall::Start<ChooseMixtureCall>(arguments);
}

}  // namespace quantd::server

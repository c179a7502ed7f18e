// Finds the stored inputs of a model's weights.

#ifndef QUANTD_CLIENT_JOBS_STORED_INPUTS_H_
#define QUANTD_CLIENT_JOBS_STORED_INPUTS_H_

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/client.h"
#include "client/jobs/inputs_options.h"
#include "client/models/tie_groups.h"
#include "quantd/v1/quantization_service.pb.h"

namespace quantd::jobs {

// The map of that file: inputs by weight; empty for an empty path.
// Errors: FILE_UNREADABLE, FILE_MALFORMED.
absl::StatusOr<std::map<std::string, std::string>> ReadInputsMap(
    const std::string& path);

// The numbers of a JSON object, by weight.
// Errors: FILE_UNREADABLE, FILE_MALFORMED.
absl::StatusOr<std::map<std::string, double>> ReadOutputWeights(
    const std::string& path);

// The names under which a revision has features of inputs. Immutable.
class StoredInputs {
 public:
  // Features that inputs must have: a Gram matrix, or at least moments.
  enum class Need { kGram, kMoments };

  // Errors: FILE_UNREADABLE, FILE_MALFORMED of the map; of the client.
  static absl::StatusOr<StoredInputs> Read(const InputsOptions& options,
                                           Need need, Client* client);

  // The name of the inputs of a weight; empty where there are none. Those of
  // MODULE.weight are MODULE.input, or what the map says. Inputs that a layer
  // shares with those that it is fused with lie under the name of one of them.
  std::string Of(const std::string& tensor) const;

  // Tells the statistics from those of another time; empty where there are
  // none.
  std::string StateOf(const std::string& inputs) const;

 private:
  StoredInputs() = default;

  bool Has(const std::string& inputs) const {
    return usable_.find(inputs) != usable_.end();
  }
  std::string LabelOf(const std::string& tensor) const;

  std::map<std::string, std::string> map_;
  // States of all statistics; usable ones have what is needed.
  std::map<std::string, std::string> states_;
  std::set<std::string> usable_;
  std::vector<TiePattern> patterns_;
  // Names of inputs by label.
  std::map<std::string, std::vector<std::string>> fused_;
};

// The error that no tensor has inputs there.
absl::Status NoInputsError(const InputsOptions& options,
                           StoredInputs::Need need);

// The SQNR at the output of a layer that was measured for its inputs.
double OutputSqnrDb(const v1::OutputNoise& noise);
// A note that some inputs were clipped; empty where none was.
std::string ClippedInputsText(const std::string& tensor,
                              const v1::OutputNoise& noise);

}  // namespace quantd::jobs

#endif  // QUANTD_CLIENT_JOBS_STORED_INPUTS_H_

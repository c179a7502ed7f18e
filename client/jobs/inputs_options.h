// Where the stored inputs of a model's weights are.

#ifndef QUANTD_CLIENT_JOBS_INPUTS_OPTIONS_H_
#define QUANTD_CLIENT_JOBS_INPUTS_OPTIONS_H_

#include <string>

namespace quantd::jobs {

// --inputs and --inputs-map.
struct InputsOptions {
  // "MODEL[@REVISION]".
  std::string text;
  // A JSON object of weights and the names of their inputs.
  std::string map;
  // After Resolve.
  std::string model;
  std::string revision;

  // Sets where the inputs are; no model without `text`.
  void Resolve();

  bool IsGiven() const { return !text.empty() || !map.empty(); }
};

}  // namespace quantd::jobs

#endif  // QUANTD_CLIENT_JOBS_INPUTS_OPTIONS_H_

// The output of a sweep, whatever it is made from.

#ifndef QUANTD_CLIENT_CLI_SWEEP_OUTPUT_H_
#define QUANTD_CLIENT_CLI_SWEEP_OUTPUT_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/cli/session.h"
#include "client/models/model_sweep.h"
#include "quantd/v1/encoding_service.pb.h"

namespace quantd::cli {

// The specs of a sweep as they were written, by their index in answers.
class SweptSpecs {
 public:
  explicit SweptSpecs(std::vector<std::string> specs);

  const std::vector<std::string>& texts() const { return texts_; }
  // "unknown" for an index that was not asked for.
  const std::string& Text(uint32_t index) const;

  Json TotalsJson(const std::vector<v1::SweepTotal>& totals) const;
  // A table; empty without totals.
  std::string TotalsText(const std::vector<v1::SweepTotal>& totals) const;

  // `written_to` is the file that has it, empty for none.
  Json MixtureJson(const v1::SweepMixture& mixture, bool is_written) const;
  std::string MixtureText(const v1::SweepMixture& mixture,
                          const std::string& written_to) const;

  // Writes what `quantize --spec @FILE` reads: TENSOR=SPEC lines.
  // Errors: those of CheckNameForSpecFile and AtomicFile.
  absl::Status WriteMixture(const v1::SweepMixture& mixture,
                            const std::string& path,
                            files::IfExists if_exists) const;

 private:
  const std::vector<std::string> texts_;
};

// The figures of each spec over all tensors, least noise first; those that
// failed anywhere last.
std::vector<v1::SweepTotal> TotalsOf(const std::vector<MeasuredTensor>& tensors,
                                     size_t spec_count);

// Why a mixture does not do what was asked for, of so many tensors; empty where
// it does.
std::string ReasonForNoMixture(const v1::SweepMixture& mixture,
                               uint64_t tensor_count);

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_SWEEP_OUTPUT_H_

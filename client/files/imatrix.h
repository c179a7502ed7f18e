// Importance matrices of llama.cpp: for each weight the squares of the inputs
// of its columns, summed. Two formats:
//
//   GGUF   for each weight the float32 tensors NAME.in_sum2 [matrices, columns]
//          and NAME.counts [matrices, 1]
//   older  i32 number of weights; for each: i32 size of the name, the name, i32
//          number of calls, i32 number of values, float32 values: means times
//          calls. Then what quantd does not read.
//
// There is one matrix, or one for each expert.

#ifndef QUANTD_CLIENT_FILES_IMATRIX_H_
#define QUANTD_CLIENT_FILES_IMATRIX_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/files/atomic_file.h"

namespace quantd::files {

// Sums of squares that a file has of one weight. Plain value.
struct InputSquares {
  int64_t columns = 0;
  // [matrices, columns], each finite and at least 0.
  std::vector<float> sums;
  // [matrices]: how many inputs were summed; finite and at least 0.
  std::vector<float> counts;

  // Mean of each column, over the inputs of all matrices; 1 where none came, as
  // llama.cpp has it.
  std::vector<double> MeanSquares() const;
};

// By weight.
using Imatrix = std::map<std::string, InputSquares>;

// Either format, which the first bytes tell.
// Errors: FILE_UNREADABLE; FILE_UNSUPPORTED for a GGUF file of something else;
// FILE_MALFORMED.
absl::StatusOr<Imatrix> ReadImatrix(const std::string& path);

// Writes GGUF. Returns its size in bytes.
// Requires: at least one weight.
// Errors: FILE_EXISTS, FILE_UNWRITABLE; FILE_UNSUPPORTED for a name that is too
// long.
absl::StatusOr<uint64_t> WriteImatrix(const std::string& path,
                                      IfExists if_exists,
                                      const Imatrix& imatrix);

}  // namespace quantd::files

#endif  // QUANTD_CLIENT_FILES_IMATRIX_H_

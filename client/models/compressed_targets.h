// Finds the scheme of each module of a compressed-tensors model by its
// config.json.

#ifndef QUANTD_CLIENT_MODELS_COMPRESSED_TARGETS_H_
#define QUANTD_CLIENT_MODELS_COMPRESSED_TARGETS_H_

#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "client/files/json.h"

namespace quantd {

// The "weights" of a group, by module; null for one that no group targets.
using CompressedSchemes = absl::flat_hash_map<std::string, const files::Json*>;

// Finds the schemes of the modules that are the keys of `schemes`: of each the
// first group that targets it by its name, else by a regular expression, else
// by its class. They point into `config`, the
// "quantization_config"; `path` is of its file, for errors.
// Errors: FILE_UNSUPPORTED for a regular expression that is not RE2's or too
// large.
absl::Status MatchTargets(const files::Json& config, const std::string& path,
                          CompressedSchemes* schemes);

}  // namespace quantd

#endif  // QUANTD_CLIENT_MODELS_COMPRESSED_TARGETS_H_

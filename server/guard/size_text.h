// Sizes in bytes as operators write them: "4096", "64KiB", "10 GiB".

#ifndef QUANTD_SERVER_GUARD_SIZE_TEXT_H_
#define QUANTD_SERVER_GUARD_SIZE_TEXT_H_

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace quantd::server {

constexpr int64_t kKiB = int64_t{1} << 10;
constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kGiB = int64_t{1} << 30;
constexpr int64_t kTiB = int64_t{1} << 40;

// With the largest unit that it is a multiple of.
std::string FormatSize(int64_t bytes);

// False for what is not a size or does not fit.
bool ParseSize(absl::string_view text, int64_t* bytes);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_GUARD_SIZE_TEXT_H_

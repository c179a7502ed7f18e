// Validity of UTF-8.

#ifndef QUANTD_CLIENT_CPP_UTF8_H_
#define QUANTD_CLIENT_CPP_UTF8_H_

#include "absl/strings/string_view.h"

namespace quantd::internal {

// True for well-formed UTF-8 (Unicode 15, table 3-7): no overlong forms, no
// surrogates, nothing above U+10FFFF.
bool IsValidUtf8(absl::string_view text);

}  // namespace quantd::internal

#endif  // QUANTD_CLIENT_CPP_UTF8_H_

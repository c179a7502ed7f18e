// Text from a file or a server made safe for a terminal.

#ifndef QUANTD_CLIENT_CLI_PRINTABLE_H_
#define QUANTD_CLIENT_CLI_PRINTABLE_H_

#include <string>

#include "absl/strings/string_view.h"

namespace quantd::cli {

// Control characters, those of the writing direction among them, become \xNN;
// in text that is not UTF-8 so do all bytes of its upper half. What it makes is
// left as it is.
std::string Printable(absl::string_view text);

// Like Printable for a JSON document in UTF-8, which stays one: control
// characters become \uNNNN.
std::string PrintableJson(absl::string_view text);

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_PRINTABLE_H_

// Mutations of messages that stay messages: bytes that are changed at random
// rarely get past the parser with anything new.

#ifndef QUANTD_TESTS_FUZZ_MESSAGE_MUTATOR_H_
#define QUANTD_TESTS_FUZZ_MESSAGE_MUTATOR_H_

#include <random>

#include "google/protobuf/message.h"

namespace quantd::fuzz {

// Changes one field of the message, or of a message inside it. The new value is
// near the old one, at the end of a range, or random. An element of a repeated
// field is changed, added or removed.
void MutateMessage(google::protobuf::Message* message, std::mt19937_64& random);

}  // namespace quantd::fuzz

#endif  // QUANTD_TESTS_FUZZ_MESSAGE_MUTATOR_H_

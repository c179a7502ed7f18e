// Key that an encoding, and the statistics of a tensor, are kept under.

#ifndef QUANTD_SERVER_WIRE_ENCODING_KEY_H_
#define QUANTD_SERVER_WIRE_ENCODING_KEY_H_

#include <string>
#include <utility>

namespace quantd::server {

// Names one encoding. The names were checked (names.h).
struct EncodingKey {
  std::string model;
  std::string revision;
  std::string tensor;

  friend bool operator==(const EncodingKey& a, const EncodingKey& b) {
    return a.model == b.model && a.revision == b.revision &&
           a.tensor == b.tensor;
  }
  template <typename H>
  friend H AbslHashValue(H h, const EncodingKey& k) {
    return H::combine(std::move(h), k.model, k.revision, k.tensor);
  }
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_WIRE_ENCODING_KEY_H_

// A proxy of TCP connections that breaks some of them.

#ifndef QUANTD_TESTS_SUPPORT_CUTTING_PROXY_H_
#define QUANTD_TESTS_SUPPORT_CUTTING_PROXY_H_

#include <atomic>
#include <cstdint>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace quantd::testing {

// Listens on loopback and passes every connection on. The first `cuts` of them
// end when a random number of bytes, up to `most_bytes`, went to the server.
class CuttingProxy {
 public:
  // `target`  "127.0.0.1:port". Aborts the test program if it can't listen.
  CuttingProxy(const std::string& target, int cuts, int64_t most_bytes,
               uint32_t seed);
  // Ends all connections.
  ~CuttingProxy();
  CuttingProxy(const CuttingProxy&) = delete;
  CuttingProxy& operator=(const CuttingProxy&) = delete;

  // "127.0.0.1:port".
  const std::string& address() const { return address_; }
  // Cuts that are left.
  int cuts_left() const { return cuts_left_; }

 private:
  void Accept();
  // Passes bytes on until either side ends, or `cut_bytes` went up.
  void Pass(int client, int64_t cut_bytes);

  const int target_port_;
  const int64_t most_bytes_;
  std::atomic<int> cuts_left_;
  std::atomic<bool> is_over_{false};
  int listener_ = -1;
  std::string address_;
  // Of the thread that accepts.
  std::mt19937 random_;
  std::vector<std::thread> connections_;
  std::thread acceptor_;
};

}  // namespace quantd::testing

#endif  // QUANTD_TESTS_SUPPORT_CUTTING_PROXY_H_

#include "client/cpp/credentials.h"

#include <string>

#include "absl/status/status.h"
#include "client/cpp/client_options.h"
#include "client/cpp/errors.h"
#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "tests/support/temporary_directory.h"

namespace quantd::internal {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(IsLocalTargetTest, IsTrueOnlyWhereAllAddressesAreOfThisMachine) {
  for (const char* target :
       {"unix:/run/quantd.sock", "unix:///run/quantd.sock",
        "unix-abstract:quantd", "127.0.0.1:8430", "127.255.0.9:1",
        "localhost:8430", "[::1]:8430", "dns:///localhost:8430",
        "dns:localhost:8430", "ipv4:127.0.0.1:1,127.0.0.2:1",
        "ipv6:[::1]:8430"}) {
    EXPECT_TRUE(IsLocalTarget(target)) << target;
  }
  for (const char* target :
       {"10.0.0.1:8430", "example.com:8430", "dns:///example.com:8430",
        // A name may begin as an address does.
        "127.0.0.1.example.com:8430", "127.example.com:1",
        "localhost.example.com:8430", "[::2]:8430",
        // One address elsewhere is enough.
        "ipv4:127.0.0.1:1,10.0.0.1:1", "ipv4:10.0.0.1:1,127.0.0.1:1",
        "unixy:8430"}) {
    EXPECT_FALSE(IsLocalTarget(target)) << target;
  }
}

class CredentialsTest : public ::testing::Test {
 protected:
  const testing::TemporaryDirectory directory_;
  const std::string pem_ = directory_.Write(
      "some.pem", "-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----");
};

TEST_F(CredentialsTest, TlsNeedsNoFiles) {
  EXPECT_TRUE(TlsCredentials({}).ok());
  EXPECT_TRUE(TlsCredentials({pem_, "", ""}).ok());
}

TEST_F(CredentialsTest, ACertificateGoesWithItsKey) {
  for (const TlsPaths& paths :
       {TlsPaths{"", pem_, ""}, TlsPaths{"", "", pem_}}) {
    const absl::Status status = TlsCredentials(paths).status();
    EXPECT_EQ(ErrorReason(status), "ARGUMENT_INVALID");
    EXPECT_THAT(std::string(status.message()), HasSubstr("together with"));
  }
}

TEST_F(CredentialsTest, NamesTheFileThatIsNotPem) {
  const std::string text = directory_.Write("text", "no certificate");
  const std::string empty = directory_.Write("empty", "");
  const std::string missing = directory_.File("missing");
  for (const std::string& path : {text, empty, missing}) {
    for (const TlsPaths& paths :
         {TlsPaths{path, "", ""}, TlsPaths{"", path, pem_},
          TlsPaths{"", pem_, path}}) {
      const absl::Status status = TlsCredentials(paths).status();
      EXPECT_EQ(ErrorReason(status), "ARGUMENT_INVALID") << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(path));
    }
  }
}

TEST_F(CredentialsTest, ATokenIsOneWordWithSpaceAround) {
  EXPECT_TRUE(SendTokenOf(directory_.Write("token", " s3cret\n")).ok());
  for (const char* text :
       {"", "\n", "two words", "s3cret\x01", "s3cr\xC3\xA9t"}) {
    const std::string path = directory_.Write("bad", text);
    const absl::Status status = SendTokenOf(path).status();
    EXPECT_EQ(ErrorReason(status), "ARGUMENT_INVALID") << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr(path));
    // Errors end up in logs.
    EXPECT_THAT(std::string(status.message()), Not(HasSubstr("s3cr")));
  }
  EXPECT_EQ(ErrorReason(SendTokenOf(directory_.File("missing")).status()),
            "ARGUMENT_INVALID");
}

}  // namespace
}  // namespace quantd::internal

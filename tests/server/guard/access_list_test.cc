#include "server/guard/access_list.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <fstream>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/errors.h"
#include "server/store/encoding_store.h"
#include "tests/support/temporary_directory.h"

namespace quantd::server {
namespace {

using ::testing::HasSubstr;

// SHA-256 of "abc" and of "", from FIPS 180-2.
constexpr char kAbc[] =
    "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
constexpr char kEmpty[] =
    "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

std::shared_ptr<const AccessList> MustParse(const std::string& text) {
  absl::StatusOr<std::shared_ptr<const AccessList>> list =
      AccessList::Parse(text);
  EXPECT_TRUE(list.ok()) << list.status();
  return list.ok() ? *list : nullptr;
}

std::string Reason(const absl::Status& status) {
  return std::string(core::ErrorReason(status));
}

TEST(AccessListTest, FindsTheCallerOfAToken) {
  const auto list = MustParse(absl::StrCat("# the team\n\nacme ", kAbc,
                                           " read,quantize acme/ # comment\n"));
  const auto caller = list->Find(Credential("abc", {}), absl::Now());
  ASSERT_TRUE(caller.ok()) << caller.status();
  EXPECT_TRUE((*caller)->MaySee("acme/net"));
  EXPECT_FALSE((*caller)->MaySee("acme"));
  EXPECT_FALSE((*caller)->MaySee("other/net"));
  EXPECT_TRUE((*caller)->Check(Scope::kRead).ok());
  EXPECT_TRUE((*caller)->Check(Scope::kQuantize).ok());
  const absl::Status denied = (*caller)->Check(Scope::kCalibrate);
  EXPECT_EQ(Reason(denied), "SCOPE_MISSING");
  EXPECT_TRUE(absl::IsPermissionDenied(denied));
  EXPECT_THAT(std::string(denied.message()), HasSubstr("calibrate"));
  EXPECT_EQ(Reason((*caller)->Check(Scope::kAdmin)), "SCOPE_MISSING");
}

TEST(AccessListTest, RefusesWhatItDoesNotKnow) {
  const auto list =
      MustParse(absl::StrCat("a ", kAbc, " read *\nb ", kEmpty, " read *\n"));
  EXPECT_EQ(Reason(list->Find(Credential("abd", {}), absl::Now()).status()),
            "TOKEN_INVALID");
  // Also where the file has the digest of nothing.
  EXPECT_EQ(Reason(list->Find(Credential("", {}), absl::Now()).status()),
            "TOKEN_MISSING");
  EXPECT_EQ(
      Reason(list->Find(Credential("", {"stranger"}), absl::Now()).status()),
      "TOKEN_INVALID");
  // The digest itself is no token, nor is a name that looks like one.
  EXPECT_EQ(Reason(list->Find(Credential(kAbc, {}), absl::Now()).status()),
            "TOKEN_INVALID");
}

TEST(AccessListTest, FindsTheCallerOfACertificate) {
  const auto list =
      MustParse("trainer certificate:trainer.acme calibrate acme/");
  const auto caller =
      list->Find(Credential("", {"10.0.0.1", "trainer.acme"}), absl::Now());
  ASSERT_TRUE(caller.ok()) << caller.status();
  EXPECT_TRUE((*caller)->Check(Scope::kCalibrate).ok());
  // A token that came with it decides, and a name is no token.
  EXPECT_FALSE(
      list->Find(Credential("abc", {"trainer.acme"}), absl::Now()).ok());
  EXPECT_FALSE(
      list->Find(Credential("certificate:trainer.acme", {}), absl::Now()).ok());
}

TEST(AccessListTest, TokensExpire) {
  const auto list =
      MustParse(absl::StrCat("a ", kAbc, " read * 2027-01-31T12:00:00Z"));
  const absl::Time end =
      absl::FromCivil(absl::CivilSecond(2027, 1, 31, 12), absl::UTCTimeZone());
  EXPECT_TRUE(list->Find(Credential("abc", {}), end - absl::Seconds(1)).ok());
  const absl::Status expired = list->Find(Credential("abc", {}), end).status();
  const absl::Status unknown = list->Find(Credential("abd", {}), end).status();
  EXPECT_EQ(expired, unknown);
}

TEST(AccessListTest, NamesTheLineThatIsWrong) {
  const std::string good = absl::StrCat("a ", kAbc, " read *\n");
  for (const std::string& bad : std::vector<std::string>{
           "b", absl::StrCat("b ", kEmpty, " read"), "b sha256:12 read *",
           absl::StrCat("b ", std::string(kEmpty).replace(10, 1, "g"),
                        " read *"),
           "b certificate: read *", "b md5:12 read *",
           absl::StrCat("b ", kEmpty, " read,write *"),
           absl::StrCat("b ", kEmpty, " read,, *"),
           absl::StrCat("b ", kEmpty, " read acme/*"),
           absl::StrCat("b ", kEmpty, " read /acme"),
           absl::StrCat("b ", kEmpty, " read acme/../rival/"),
           absl::StrCat("b ", kEmpty, " read * tomorrow"),
           absl::StrCat("b ", kEmpty, " read * 2027-01-31T00:00:00Z more"),
           absl::StrCat("b ", kAbc, " read *")}) {
    const absl::Status status = AccessList::Parse(good + bad).status();
    EXPECT_EQ(Reason(status), "CONFIG_INVALID") << bad;
    EXPECT_THAT(std::string(status.message()), HasSubstr("line 2")) << bad;
  }
}

TEST(AccessListTest, QuotasAreOfAPrincipalOrAPrefix) {
  const auto list = MustParse(
      absl::StrCat("quota models:acme/ bytes=10GiB rows=100000 # of the team\n",
                   "a ", kAbc, " calibrate acme/\nquota certificate:c read *\n",
                   "a ", kEmpty, " calibrate acme/\n",
                   "quota principal:a bytes=1KiB\nquota models:* rows=7\n"));
  ASSERT_EQ(list->quotas().size(), 3u);
  const auto a = *list->Find(Credential("abc", {}), absl::Now());
  const WriteAccount account = a->AccountFor("acme/net");
  EXPECT_EQ(account.principal, "a");
  // In the order in which stores lock them.
  ASSERT_EQ(account.quotas.size(), 3u);
  EXPECT_EQ(account.quotas[0].scope, "models:*");
  EXPECT_EQ(account.quotas[0].max_rows, 7);
  EXPECT_EQ(account.quotas[0].max_bytes, std::numeric_limits<int64_t>::max());
  EXPECT_EQ(account.quotas[1].scope, "models:acme/");
  EXPECT_EQ(account.quotas[1].max_bytes, int64_t{10} << 30);
  EXPECT_EQ(account.quotas[1].max_rows, 100'000);
  EXPECT_EQ(account.quotas[2].scope, "principal:a");
  EXPECT_EQ(account.quotas[2].max_bytes, 1024);
  // Somebody may be called so.
  const auto quota = *list->Find(Credential("", {"c"}), absl::Now());
  EXPECT_EQ(quota->AccountFor("other").principal, "quota");
  ASSERT_EQ(quota->AccountFor("acme.x").quotas.size(), 1u);
  EXPECT_EQ(quota->AccountFor("acme.x").quotas[0].scope, "models:*");
  EXPECT_TRUE(Principal::Unrestricted()->AccountFor("acme/net").quotas.empty());
}

TEST(AccessListTest, SaysWhichRevisionsAreKept) {
  const auto list = MustParse(
      "retain models:ci/ revisions=20 age=720h\nretain models:* age=inf\n");
  ASSERT_EQ(list->retention().size(), 2u);
  EXPECT_EQ(list->retention()[0].scope, "models:ci/");
  EXPECT_EQ(list->retention()[0].revisions, 20);
  EXPECT_EQ(list->retention()[0].age, absl::Hours(720));
  EXPECT_FALSE(list->retention()[1].revisions.has_value());
  EXPECT_EQ(list->retention()[1].age, absl::InfiniteDuration());
}

TEST(AccessListTest, NamesTheRuleThatIsWrong) {
  const std::string good =
      absl::StrCat("a ", kAbc, " read *\nquota models:x/ rows=1\n",
                   "retain models:x/ age=2h\n");
  for (const std::string& bad :
       std::vector<std::string>{"quota",
                                "retain",
                                "quota models:acme/",
                                "quota models:acme rows=1",
                                "quota models: rows=1",
                                "quota models:/ rows=1",
                                "quota a rows=1",
                                "quota models:*/ rows=1",
                                "quota principal: rows=1",
                                "quota principal:b rows=1",
                                "quota models:acme/ rows=-1",
                                "quota models:1/2/3/4/5/6/7/8/9/ rows=1",
                                "quota models:acme/ rows=1 rows=2",
                                "quota models:acme/ bytes=1GB",
                                "quota models:acme/ age=2h",
                                "quota models:acme/ rows",
                                "quota models:x/ rows=2",
                                "retain models:acme/",
                                "retain principal:a revisions=1",
                                "retain models:acme/ revisions=0",
                                "retain models:acme/ age=2",
                                "retain models:acme/ age=59m",
                                "retain models:acme/ age=-2h",
                                "retain models:acme/ rows=1",
                                "retain models:x/ revisions=1",
                                "retain acme/ revisions=1"}) {
    const absl::Status status = AccessList::Parse(good + bad).status();
    EXPECT_EQ(Reason(status), "CONFIG_INVALID") << bad;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(bad == "quota principal:b rows=1"
                              ? "expected a credential of \"b\""
                              : "line 4"))
        << bad;
  }
}

TEST(AccessListTest, ModelsAreAllOrThoseBelowAPrefixOrOne) {
  const auto list =
      MustParse(absl::StrCat("a ", kAbc, " read acme/net\nb ", kEmpty,
                             " read *\nc certificate:c read acme/\n"));
  const auto one = *list->Find(Credential("abc", {}), absl::Now());
  EXPECT_TRUE(one->MaySee("acme/net"));
  EXPECT_FALSE(one->MaySee("acme/net2"));
  EXPECT_FALSE(one->MaySee("acme/net/large"));
  const auto below = *list->Find(Credential("", {"c"}), absl::Now());
  EXPECT_TRUE(below->MaySee("acme/net/large"));
  EXPECT_FALSE(below->MaySee("acme-rival/net"));
  EXPECT_LT(below->BeforeModels(), "acme/");
  EXPECT_GT(below->BeforeModels(), "acme.zzz");
  EXPECT_GT(below->AfterModels(), "acme/zzz");
  EXPECT_LE(below->AfterModels(), "acme0");
  EXPECT_TRUE(Principal::Unrestricted()->MaySee("anything"));
  EXPECT_EQ(Principal::Unrestricted()->BeforeModels(), "");
  EXPECT_EQ(Principal::Unrestricted()->AfterModels(), "");
}

TEST(AccessListTest, WritingNeedsItsScopeAndAModelOfOnesOwn) {
  const auto list = MustParse(absl::StrCat("a ", kAbc, " calibrate acme/\nb ",
                                           kEmpty, " quantize acme/\n"));
  const auto writer = *list->Find(Credential("abc", {}), absl::Now());
  EXPECT_TRUE(writer->CheckWrite("acme/net").ok());
  const absl::Status denied = writer->CheckWrite("other/net");
  EXPECT_TRUE(absl::IsPermissionDenied(denied));
  EXPECT_EQ(Reason(denied), "MODEL_DENIED");
  Credential reader("", {});
  reader.token_digest =
      absl::HexStringToBytes(absl::string_view(kEmpty).substr(7));
  EXPECT_EQ(Reason((*list->Find(reader, absl::Now()))->CheckWrite("acme/net")),
            "SCOPE_MISSING");
}

TEST(AccessListTest, EveryRpcNeedsAScope) {
  EXPECT_EQ(ScopeOf(Rpc::kQuantize), Scope::kQuantize);
  EXPECT_EQ(ScopeOf(Rpc::kGetEncoding), Scope::kRead);
  EXPECT_EQ(ScopeOf(Rpc::kPutEncoding), Scope::kCalibrate);
  EXPECT_EQ(ScopeOf(Rpc::kDeleteEncoding), Scope::kAdmin);
  for (int rpc = 0; rpc < kRpcCount; ++rpc) {
    EXPECT_TRUE(
        Principal::Unrestricted()->Check(ScopeOf(static_cast<Rpc>(rpc))).ok());
  }
}

TEST(AccessListTest, TakesTheTokenFromItsHeader) {
  EXPECT_EQ(BearerToken("Bearer abc"), "abc");
  EXPECT_EQ(BearerToken("bearer  abc "), "abc");
  EXPECT_EQ(BearerToken("Basic abc"), "");
  EXPECT_EQ(BearerToken("Bearer"), "");
  EXPECT_EQ(BearerToken(""), "");
}

TEST(AccessFileTest, FollowsTheFileAndKeepsTheLastGoodOne) {
  const testing::TemporaryDirectory directory;
  const std::string path = directory.File("access");
  EXPECT_EQ(Reason(AccessFile::Open(path).status()), "CONFIG_INVALID");
  std::ofstream(path) << "a " << kAbc << " read *\n";
  const auto file = AccessFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_FALSE((*file)->Reload().value());
  std::ofstream(path) << "nonsense\n";
  EXPECT_EQ(Reason((*file)->Reload().status()), "CONFIG_INVALID");
  // Said once.
  EXPECT_FALSE((*file)->Reload().value());
  // Written to a part: nothing yet, and up to the middle of a line.
  std::ofstream(path) << "";
  EXPECT_EQ(Reason((*file)->Reload().status()), "CONFIG_INVALID");
  std::ofstream(path) << "b " << kEmpty << " read *\na " << kAbc << " read *";
  EXPECT_EQ(Reason((*file)->Reload().status()), "CONFIG_INVALID");
  EXPECT_TRUE((*file)->list()->Find(Credential("abc", {}), absl::Now()).ok());
  std::ofstream(path) << "a " << kEmpty << " read *\n";
  EXPECT_TRUE((*file)->Reload().value());
  EXPECT_FALSE((*file)->list()->Find(Credential("abc", {}), absl::Now()).ok());
}

}  // namespace
}  // namespace quantd::server

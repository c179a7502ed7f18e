#include "server/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/time/time.h"
#include "core/errors.h"
#include "core/types/block_layout.h"
#include "tests/support/temporary_directory.h"

namespace quantd::server {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class ConfigTest : public ::testing::Test {
 protected:
  ConfigTest() { Set("XDG_STATE_HOME", "/state"); }
  ~ConfigTest() override {
    for (const std::string& name : variables_) unsetenv(name.c_str());
  }

  void Set(const std::string& name, const std::string& value) {
    setenv(name.c_str(), value.c_str(), 1);
    variables_.push_back(name);
  }

  // The path of a new file with that text.
  std::string File(const std::string& text) {
    const std::string path = directory_.File("quantd.toml");
    std::ofstream(path) << text;
    return path;
  }

  static absl::StatusOr<CommandLine> Parse(
      const std::vector<std::string>& arguments) {
    std::vector<const char*> argv = {"quantd"};
    for (const std::string& argument : arguments) {
      argv.push_back(argument.c_str());
    }
    return ParseCommandLine(static_cast<int>(argv.size()), argv.data());
  }

  static Config MustParse(const std::vector<std::string>& arguments) {
    absl::StatusOr<CommandLine> parsed = Parse(arguments);
    EXPECT_TRUE(parsed.ok()) << parsed.status();
    if (!parsed.ok()) return Config();
    EXPECT_EQ(parsed->action, CommandLine::Action::kRun);
    return parsed->config;
  }

  // What is printed in place of serving.
  static std::string MustPrint(const std::vector<std::string>& arguments) {
    absl::StatusOr<CommandLine> parsed = Parse(arguments);
    EXPECT_TRUE(parsed.ok()) << parsed.status();
    if (!parsed.ok()) return "";
    EXPECT_EQ(parsed->action, CommandLine::Action::kPrint);
    return parsed->text;
  }

  // The error's message, after checking its reason.
  static std::string Error(const std::vector<std::string>& arguments) {
    const absl::Status status = Parse(arguments).status();
    EXPECT_EQ(core::ErrorReason(status), "CONFIG_INVALID") << status;
    return std::string(status.message());
  }

  const testing::TemporaryDirectory directory_;
  std::vector<std::string> variables_;
};

TEST_F(ConfigTest, HasSafeDefaults) {
  const Config config = MustParse({});
  EXPECT_THAT(config.listen, ElementsAre("127.0.0.1:8430"));
  EXPECT_EQ(config.metrics_listen, "127.0.0.1:8431");
  EXPECT_EQ(config.store_path, "/state/quantd/encodings.db");
  EXPECT_TRUE(config.store_is_default);
  EXPECT_EQ(config.cache_bytes, int64_t{256} << 20);
  EXPECT_EQ(config.cache_max_age, absl::Seconds(1));
  EXPECT_GE(config.threads, 1);
  EXPECT_EQ(config.simd, "auto");
  EXPECT_EQ(config.log_level, LogLevel::kInfo);
  EXPECT_EQ(config.log_format, LogFormat::kText);
  EXPECT_EQ(config.drain_delay, absl::Milliseconds(500));
  EXPECT_EQ(config.drain_grace, absl::Seconds(30));
  EXPECT_FALSE(config.insecure_listen);
  EXPECT_EQ(config.ready_file, "");
  const Limits limits;
  EXPECT_EQ(config.limits.message_bytes, limits.message_bytes);
  EXPECT_EQ(config.limits.chunk_bytes, limits.chunk_bytes);
  EXPECT_EQ(config.limits.tensor_bytes, limits.tensor_bytes);
  EXPECT_EQ(config.limits.metrics_count, limits.metrics_count);
  EXPECT_EQ(config.limits.memory_budget_bytes, limits.memory_budget_bytes);
  EXPECT_EQ(config.limits.memory_wait, limits.memory_wait);
  EXPECT_EQ(config.limits.response_chunk_bytes, limits.response_chunk_bytes);
  EXPECT_EQ(config.limits.idle_timeout, limits.idle_timeout);
  EXPECT_EQ(config.limits.tensor_rank, limits.tensor_rank);
  EXPECT_EQ(config.limits.tensor_rank, core::kMaxRank);
  EXPECT_EQ(config.limits.tensor_count, limits.tensor_count);
  EXPECT_EQ(config.limits.queue_delay, limits.queue_delay);
  EXPECT_EQ(config.limits.stream_age, limits.stream_age);
  EXPECT_EQ(config.limits.connections, limits.connections);
  EXPECT_EQ(config.limits.address_connections, limits.address_connections);
  EXPECT_EQ(config.limits.calls, limits.calls);
  EXPECT_EQ(config.limits.connection_streams, limits.connection_streams);
  EXPECT_EQ(config.limits.connection_idle, limits.connection_idle);
  EXPECT_EQ(config.limits.connection_age, limits.connection_age);
  EXPECT_EQ(config.limits.metadata_bytes, limits.metadata_bytes);
}

TEST_F(ConfigTest, ReadsEveryFlag) {
  const Config config = MustParse({"--listen=127.0.0.1:0",
                                   "--listen",
                                   "unix:/run/quantd.sock",
                                   "--listen=[::1]:9000,localhost:9001",
                                   "--metrics-listen=0.0.0.0:9002",
                                   "--store=sqlite:/data/e.db",
                                   "--cache-bytes=1MiB",
                                   "--cache-max-age=250ms",
                                   "--threads=3",
                                   "--simd=scalar",
                                   "--log-level=warning",
                                   "--log-format=json",
                                   "--message-bytes=64MiB",
                                   "--chunk-bytes=8MiB",
                                   "--tensor-bytes=2TiB",
                                   "--metrics-count=200",
                                   "--memory-budget-bytes=2GiB",
                                   "--memory-wait=1.5s",
                                   "--response-chunk-bytes=524288",
                                   "--idle-timeout=1m30s",
                                   "--tensor-rank=4",
                                   "--tensor-count=12",
                                   "--queue-delay=30ms",
                                   "--stream-age=2h",
                                   "--connections=100",
                                   "--address-connections=50",
                                   "--calls=300",
                                   "--connection-streams=64",
                                   "--connection-idle=inf",
                                   "--connection-age=90m",
                                   "--metadata-bytes=16KiB",
                                   "--drain-delay=0",
                                   "--drain-grace=5s",
                                   "--ready-file=/tmp/ready.json"});
  EXPECT_THAT(config.listen, ElementsAre("127.0.0.1:0", "unix:/run/quantd.sock",
                                         "[::1]:9000", "localhost:9001"));
  EXPECT_EQ(config.metrics_listen, "0.0.0.0:9002");
  EXPECT_EQ(config.store_path, "/data/e.db");
  EXPECT_FALSE(config.store_is_default);
  EXPECT_EQ(config.cache_bytes, 1 << 20);
  EXPECT_EQ(config.cache_max_age, absl::Milliseconds(250));
  EXPECT_EQ(config.threads, 3);
  EXPECT_EQ(config.simd, "scalar");
  EXPECT_EQ(config.log_level, LogLevel::kWarning);
  EXPECT_EQ(config.log_format, LogFormat::kJson);
  EXPECT_EQ(config.limits.message_bytes, 64 << 20);
  EXPECT_EQ(config.limits.chunk_bytes, 8 << 20);
  EXPECT_EQ(config.limits.tensor_bytes, int64_t{2} << 40);
  EXPECT_EQ(config.limits.metrics_count, 200);
  EXPECT_EQ(config.limits.memory_budget_bytes, int64_t{2} << 30);
  EXPECT_EQ(config.limits.memory_wait, absl::Milliseconds(1500));
  EXPECT_EQ(config.limits.response_chunk_bytes, 524288);
  EXPECT_EQ(config.limits.idle_timeout, absl::Seconds(90));
  EXPECT_EQ(config.limits.tensor_rank, 4);
  EXPECT_EQ(config.limits.tensor_count, 12);
  EXPECT_EQ(config.limits.queue_delay, absl::Milliseconds(30));
  EXPECT_EQ(config.limits.stream_age, absl::Hours(2));
  EXPECT_EQ(config.limits.connections, 100);
  EXPECT_EQ(config.limits.address_connections, 50);
  EXPECT_EQ(config.limits.calls, 300);
  EXPECT_EQ(config.limits.connection_streams, 64);
  EXPECT_EQ(config.limits.connection_idle, absl::InfiniteDuration());
  EXPECT_EQ(config.limits.connection_age, absl::Minutes(90));
  EXPECT_EQ(config.limits.metadata_bytes, 16 << 10);
  EXPECT_EQ(config.drain_delay, absl::ZeroDuration());
  EXPECT_EQ(config.drain_grace, absl::Seconds(5));
  EXPECT_EQ(config.ready_file, "/tmp/ready.json");
  EXPECT_EQ(MustParse({"--metrics-listen=off"}).metrics_listen, "");
}

TEST_F(ConfigTest, FlagWinsOverVariableOverFileOverDefault) {
  const std::string file = File("threads = 5\n");
  EXPECT_EQ(MustParse({"--config", file}).threads, 5);
  Set("QUANTD_THREADS", "6");
  EXPECT_EQ(MustParse({"--config", file}).threads, 6);
  EXPECT_EQ(MustParse({"--config", file, "--threads=7"}).threads, 7);
}

TEST_F(ConfigTest, ReadsVariables) {
  Set("QUANTD_LISTEN", "127.0.0.1:1,unix:/a");
  Set("QUANTD_INSECURE_LISTEN", "true");
  Set("QUANTD_SIMD", "scalar");
  Set("QUANTD_MEMORY_BUDGET_BYTES", "64MiB");
  const Config config = MustParse({});
  EXPECT_THAT(config.listen, ElementsAre("127.0.0.1:1", "unix:/a"));
  EXPECT_TRUE(config.insecure_listen);
  EXPECT_EQ(config.simd, "scalar");
  EXPECT_EQ(config.limits.memory_budget_bytes, 64 << 20);
}

TEST_F(ConfigTest, TellsVariablesThatNobodyReads) {
  // Whoever runs the tests may have set some.
  const absl::StatusOr<CommandLine> before = Parse({});
  ASSERT_TRUE(before.ok()) << before.status();
  Set("QUANTD_MEMORY_BUDGET", "1GiB");
  Set("QUANTD_THREAD", "4");
  // quantctl's, and those of a service in Kubernetes.
  Set("QUANTD_SERVER", "unix:/a");
  Set("QUANTD_SERVICE_HOST", "10.0.0.1");
  Set("QUANTD_SERVICE_PORT_GRPC", "8430");
  Set("QUANTD_PORT", "tcp://10.0.0.1:8430");
  Set("QUANTD_PORT_8430_TCP_ADDR", "10.0.0.1");
  const absl::StatusOr<CommandLine> parsed = Parse({});
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  std::vector<std::string> unknown = parsed->unknown_variables;
  for (const std::string& name : before->unknown_variables) {
    unknown.erase(absl::c_find(unknown, name));
  }
  EXPECT_THAT(unknown, ElementsAre("QUANTD_MEMORY_BUDGET", "QUANTD_THREAD"));
}

TEST_F(ConfigTest, ReadsAFile) {
  Set("QUANTD_CONFIG", File("# comment\n"
                            "listen = [\"127.0.0.1:1\", \"unix:/a b\"]\n"
                            "insecure-listen = true\n"
                            "store = \"sqlite:/x/y.db\"  # why\n"
                            "memory-wait = \"10ms\"\n"));
  const Config config = MustParse({});
  EXPECT_THAT(config.listen, ElementsAre("127.0.0.1:1", "unix:/a b"));
  EXPECT_TRUE(config.insecure_listen);
  EXPECT_EQ(config.store_path, "/x/y.db");
  EXPECT_EQ(config.limits.memory_wait, absl::Milliseconds(10));
}

TEST_F(ConfigTest, RefusesBadFiles) {
  EXPECT_THAT(Error({"--config", directory_.File("none")}),
              HasSubstr("expected a file that can be read"));
  EXPECT_THAT(Error({"--config", directory_.path()}),
              HasSubstr("expected a file that can be read"));
  EXPECT_THAT(Error({"--config", "/dev/zero"}),
              HasSubstr("expected a file that can be read"));
  EXPECT_THAT(Error({"--config", File("thread = 5\n")}),
              HasSubstr("got \"thread\""));
  EXPECT_THAT(Error({"--config", File("[limits]\nchunk-bytes = 5\n")}),
              HasSubstr("got \"limits.chunk-bytes\""));
  EXPECT_THAT(Error({"--config", File("config = \"x\"\n")}),
              HasSubstr("got \"config\""));
  EXPECT_THAT(Error({"--config", "/dev/zero"}),
              HasSubstr("expected a file that can be read"));
  EXPECT_THAT(Error({"--config", File("threads = 5\nthreads = 6\n")}),
              HasSubstr("--threads (from"));
  EXPECT_THAT(Error({"--config", File("chunk-bytes = \"big\"\n")}),
              AllOf(HasSubstr("--chunk-bytes (from"), HasSubstr("quantd.toml"),
                    HasSubstr("got \"big\"")));
}

TEST_F(ConfigTest, RefusesPlaintextOffLoopback) {
  for (const char* address :
       {"0.0.0.0:8430", "[::]:8430", "10.0.0.1:8430", "myhost:8430",
        "128.0.0.1:8430", "127.0.0.1.example.com:8430", "127.1:8430"}) {
    EXPECT_THAT(Error({absl::StrCat("--listen=127.0.0.1:1,", address)}),
                AllOf(HasSubstr("--listen: expected a loopback address"),
                      HasSubstr(address), HasSubstr("--insecure-listen")))
        << address;
    EXPECT_THAT(
        MustParse({absl::StrCat("--listen=", address), "--insecure-listen"})
            .listen,
        ElementsAre(address));
  }
  for (const char* address : {"127.0.0.1:1", "127.9.9.9:1", "localhost:1",
                              "[::1]:1", "unix:/tmp/x"}) {
    EXPECT_THAT(MustParse({absl::StrCat("--listen=", address)}).listen,
                ElementsAre(address));
  }
}

TEST_F(ConfigTest, OnlyRequiredCertificatesMakeOtherAddressesLawful) {
  const std::vector<std::string> tls = {"--listen=0.0.0.0:1",
                                        "--tls-certificate=/c", "--tls-key=/k"};
  const auto with = [&tls](std::vector<std::string> more) {
    more.insert(more.begin(), tls.begin(), tls.end());
    return more;
  };
  const Config config = MustParse(with({"--tls-client-ca=/a"}));
  EXPECT_EQ(config.tls.certificate, "/c");
  EXPECT_EQ(config.tls.key, "/k");
  EXPECT_EQ(config.tls.client_ca, "/a");
  EXPECT_EQ(config.tls.EffectiveClientAuth(), ClientAuth::kRequire);
  MustParse(with({"--tls-client-ca=/a", "--tls-client-crl=/r",
                  "--tls-client-auth=require"}));
  // What a stranger sends is read before a token can be asked for.
  for (const std::vector<std::string>& flags :
       std::vector<std::vector<std::string>>{
           {},
           {"--access-file=/t"},
           {"--tls-client-ca=/a", "--tls-client-auth=request"}}) {
    EXPECT_THAT(Error(with(flags)),
                AllOf(HasSubstr("clients need no certificate"),
                      HasSubstr("--insecure-listen")));
    std::vector<std::string> insecure = flags;
    insecure.push_back("--insecure-listen");
    MustParse(with(insecure));
  }
  EXPECT_EQ(MustParse({"--access-file=/t"}).access_file, "/t");
}

TEST_F(ConfigTest, RefusesFlagsOfTlsWithoutThoseThatTheyNeed) {
  const std::string certificate = "--tls-certificate=/c";
  const std::string key = "--tls-key=/k";
  EXPECT_THAT(Error({certificate}), HasSubstr("together with --tls-key"));
  EXPECT_THAT(Error({key}), HasSubstr("together with --tls-certificate"));
  EXPECT_THAT(Error({"--tls-client-ca=/a"}),
              HasSubstr("together with --tls-certificate"));
  EXPECT_THAT(Error({certificate, key, "--tls-client-crl=/r"}),
              HasSubstr("together with --tls-client-ca"));
  for (const char* mode : {"request", "require"}) {
    EXPECT_THAT(
        Error({certificate, key, absl::StrCat("--tls-client-auth=", mode)}),
        HasSubstr("together with --tls-client-ca"));
  }
  EXPECT_THAT(
      Error({certificate, key, "--tls-client-ca=/a", "--tls-client-auth=none"}),
      HasSubstr("expected request or require"));
  EXPECT_THAT(Error({"--tls-client-auth=maybe"}),
              HasSubstr("one of auto, none, request, require"));
}

TEST_F(ConfigTest, NamesFlagExpectationAndValue) {
  struct Case {
    std::string flag;
    std::vector<std::string> values;
    std::string expected;
  };
  for (const Case& c : std::vector<Case>{
           {"listen",
            {"", "8430", ":8430", "localhost:", "localhost:70000",
             "localhost:x", "a b:1", "[::1:1", "[x]:1", "::1:8430",
             "localhost:+1", "unix:relative", "unix:", "127.0.0.1:1,"},
            ""},
           {"metrics-listen", {"on", "", "unix:/x", ":1"}, "host:port or off"},
           {"store",
            {"", "sqlite:", "sqlite::memory:", "/x.db", "mysql://h"},
            "sqlite:PATH"},
           {"cache-bytes",
            {"", "x", "-1", "1MB", "1.5GiB", "9223372036854775807KiB",
             "99999999999999999999", "KiB"},
            "a size from 0 to 1TiB"},
           {"store-connections", {"0", "x"}, "a whole number from 1 to 1000"},
           {"store-timeout", {"0", "2m"}, "a duration from 10ms to 1m"},
           {"cache-max-age", {"1", "-1s", "inf", "", "2h"}, "a duration from"},
           {"threads",
            {"0", "1025", "two", "", "1.5"},
            "a whole number from 1 to 1024"},
           {"message-bytes", {"1", "2GiB"}, "a size from 64KiB to 1GiB"},
           {"chunk-bytes", {"0"}, "a size from"},
           {"tensor-bytes", {"0"}, "a size from"},
           {"metrics-count", {"0", "1KiB"}, "a whole number from"},
           {"metrics-count", {"-5"}, "a whole number from"},
           {"statistics-limit", {"0", "1GiB"}, "a size from 1KiB to 512MiB"},
           {"gram-features",
            {"127", "32769", "1KiB"},
            "a whole number from 128 to 32768"},
           {"memory-budget-bytes", {"0"}, "a size from"},
           {"memory-wait", {"2m"}, "a duration from 0 to 1m"},
           {"response-chunk-bytes", {"1"}, "a size from"},
           {"idle-timeout", {"0"}, "a duration from 100ms to 24h"},
           {"drain-delay", {"11m"}, "a duration from"},
           {"drain-grace", {"2h"}, "a duration from"},
           {"log-level", {"loud", ""}, "one of debug, info, warning, error"},
           {"log-format", {"xml"}, "one of text, json"},
       }) {
    for (const std::string& value : c.values) {
      const std::string variable = absl::StrCat(
          "QUANTD_",
          absl::AsciiStrToUpper(absl::StrReplaceAll(c.flag, {{"-", "_"}})));
      setenv(variable.c_str(), value.c_str(), 1);
      EXPECT_THAT(
          Error({}),
          AllOf(StartsWith(absl::StrCat("CONFIG_INVALID: --", c.flag, " (from ",
                                        variable, "): expected ", c.expected)),
                HasSubstr(
                    absl::StrCat(", got \"", c.flag == "store" ? "" : value))))
          << c.flag << "=" << value;
      unsetenv(variable.c_str());
      if (value.empty()) continue;
      EXPECT_THAT(Error({absl::StrCat("--", c.flag, "=", value)}),
                  StartsWith(absl::StrCat("CONFIG_INVALID: --", c.flag,
                                          ": expected ", c.expected)));
    }
  }
  Set("QUANTD_INSECURE_LISTEN", "maybe");
  EXPECT_THAT(Error({}), HasSubstr("expected true or false, got \"maybe\""));
}

TEST_F(ConfigTest, TakesAPostgresqlStoreAndKeepsItsPassword) {
  const std::string url =
      "postgresql://user:secret@host1,host2:5433/db?password=secret&sslmode=a";
  const Config config = MustParse({"--store=" + url});
  EXPECT_EQ(config.store_url, url);
  EXPECT_EQ(config.store_path, "");
  EXPECT_FALSE(config.store_is_default);
  const std::string shown = MustPrint({"--store=" + url, "--print-config"});
  EXPECT_THAT(shown, HasSubstr("\"postgresql://user:***@host1,host2:5433/"
                               "db?password=***&sslmode=a\""));
  for (const char* open :
       {"postgres://host/db", "postgresql:///db",
        "postgresql://user@host:5432/db?application_name=a:b@c"}) {
    EXPECT_THAT(MustPrint({absl::StrCat("--store=", open), "--print-config"}),
                HasSubstr(absl::StrCat("\"", open, "\"")));
  }
  // However the password is written.
  for (const char* hidden :
       {"postgresql://u@h/db?Password=secret",
        "postgresql://u@h/db?PASSWORD=secret",
        "postgresql://u@h/db?sslpassword=secret",
        "postgresql://u@h/db?%70assword=secret",
        "postgresql://u@h/db?pass%77ord=secret&sslmode=require",
        "postgresql://u@h/db?password=secret&sslpassword=secret",
        "postgresql://u@h/db?password=a&password=secret",
        "postgresql://u@h/db?secret", "postgresql://u:a@secret@h/db",
        "postgresql://u:a/secret@h/db", "postgresql://u:secret@/db",
        "postgresql://u%3Asecret@h/db", "postgresql://h/db#password=secret",
        "postgresql://u:secret%40x@h1,h2/db"}) {
    const std::string text =
        MustPrint({absl::StrCat("--store=", hidden), "--print-config"});
    EXPECT_THAT(text, AllOf(HasSubstr("***"), Not(HasSubstr("secret"))))
        << hidden;
  }
  EXPECT_THAT(
      MustPrint({"--store=postgresql://u:a@%2Frun%2Fpg/db?sslmode=disable",
                 "--print-config"}),
      HasSubstr("\"postgresql://u:***@%2Frun%2Fpg/db?sslmode=disable\""));
  EXPECT_THAT(Error({"--store=host=h password=secret"}),
              Not(HasSubstr("secret")));
  // What is no URL of a store may be one of another.
  EXPECT_THAT(Error({"--store=mysql://user:secret@host/db"}),
              AllOf(HasSubstr("expected sqlite:PATH or postgresql://"),
                    Not(HasSubstr("secret"))));
}

TEST_F(ConfigTest, RefusesWhatTheParserDoesNotKnow) {
  EXPECT_THAT(Error({"--thread=5"}), HasSubstr("--thread=5"));
  EXPECT_THAT(Error({"extra"}), HasSubstr("extra"));
  EXPECT_THAT(Error({"--threads"}), HasSubstr("--threads"));
  EXPECT_THAT(Error({"--threads=1", "--threads=2"}), HasSubstr("--threads"));
}

TEST_F(ConfigTest, ChecksLimitsAgainstEachOther) {
  EXPECT_THAT(Error({"--gram-features=1000"}),
              HasSubstr("--gram-features: expected a multiple of 128, got "
                        "1000"));
  EXPECT_THAT(Error({"--chunk-bytes=32MiB"}),
              AllOf(HasSubstr("--chunk-bytes"), HasSubstr("--message-bytes")));
  EXPECT_THAT(
      Error({"--memory-budget-bytes=16MiB"}),
      AllOf(HasSubstr("--memory-budget-bytes"), HasSubstr("--message-bytes")));
}

TEST_F(ConfigTest, FindsAPlaceForTheStore) {
  Set("XDG_STATE_HOME", "relative");
  const char* old_home = std::getenv("HOME");
  const std::string home = old_home == nullptr ? "" : old_home;
  setenv("HOME", "/home/q", 1);
  EXPECT_EQ(MustParse({}).store_path,
            "/home/q/.local/state/quantd/encodings.db");
  unsetenv("HOME");
  EXPECT_THAT(Error({}), HasSubstr("--store"));
  EXPECT_EQ(MustParse({"--store=sqlite:x.db"}).store_path, "x.db");
  if (old_home != nullptr) setenv("HOME", home.c_str(), 1);
}

TEST_F(ConfigTest, PrintsHelpAndVersionWhateverElseIsWrong) {
  Set("QUANTD_THREADS", "none");
  absl::StatusOr<CommandLine> parsed = Parse({"--version"});
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->action, CommandLine::Action::kPrint);
  EXPECT_THAT(parsed->text, StartsWith("quantd "));
  parsed = Parse({"--help"});
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->action, CommandLine::Action::kPrint);
  for (const char* part :
       {"Limits:", "--chunk-bytes SIZE", "4MiB", "--drain-grace DURATION",
        "30s", "127.0.0.1:8430", "QUANTD_SOME_FLAG"}) {
    EXPECT_THAT(parsed->text, HasSubstr(part));
  }
}

TEST_F(ConfigTest, SharesMemoryOnUnixSocketsOnly) {
  EXPECT_FALSE(MustParse({}).shared_memory);
  EXPECT_THAT(Error({"--shared-memory"}),
              AllOf(HasSubstr("--shared-memory: expected a unix socket"),
                    HasSubstr("127.0.0.1:8430")));
  const Config config =
      MustParse({"--shared-memory", "--listen=127.0.0.1:1,unix:/tmp/x",
                 "--shared-regions=7", "--shared-connections=8"});
  EXPECT_TRUE(config.shared_memory);
  EXPECT_EQ(config.limits.shared_regions, 7);
  EXPECT_EQ(config.limits.shared_connections, 8);
}

TEST_F(ConfigTest, PrintedConfigurationReadsBackTheSame) {
  absl::StatusOr<CommandLine> first = Parse(
      {"--print-config", "--listen=127.0.0.1:0", "--listen=unix:/a b",
       "--chunk-bytes=1234567", "--insecure-listen", "--shared-memory",
       "--store=sqlite:/data/e.db", "--memory-wait=0", "--log-format=json",
       "--metrics-listen=off", "--tls-certificate=/c", "--tls-key=/k",
       "--tls-client-ca=/a", "--tls-client-auth=request", "--access-file=/t"});
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(first->action, CommandLine::Action::kPrint);
  EXPECT_THAT(first->text, HasSubstr("chunk-bytes = \"1234567\"\n"));
  EXPECT_THAT(first->text, HasSubstr("message-bytes = \"32MiB\"\n"));
  absl::StatusOr<CommandLine> second =
      Parse({"--print-config", "--config", File(first->text)});
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(second->text, first->text);
}

}  // namespace
}  // namespace quantd::server

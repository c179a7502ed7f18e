#include "client/models/tensor_engine.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "client/cpp/client.h"
#include "client/cpp/tensor.h"
#include "gtest/gtest.h"
#include "tests/client/cpp/fake_service.h"

namespace quantd::internal {
namespace {

// Tensors that one stream sends before it has the first result.
constexpr size_t kCount = 20;

TEST(TensorEngineTest, AfterAnErrorTakesWhatIsUnderWayWhereAskedTo) {
  FakeServer server;
  ClientOptions options;
  options.target = server.target();
  const std::unique_ptr<Client> client =
      std::move(Client::Connect(options)).value();
  const std::vector<float> values(1000, 1.0f);
  QuantizeEngine engine({client.get()});
  for (const bool takes_all : {false, true}) {
    std::atomic<size_t> made{0};
    std::atomic<size_t> taken{0};
    QuantizeEngine::Work work;
    work.count = kCount;
    work.size_bytes = [&](size_t) { return values.size() * sizeof(float); };
    work.make_job = [&](size_t i) {
      ++made;
      QuantizeJob job;
      job.tensor.name.set_tensor(absl::StrCat("t", i));
      job.tensor.shape = {static_cast<int64_t>(values.size())};
      job.tensor.data =
          absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(values.data()),
                              values.size() * sizeof(float));
      v1::Encoding encoding;
      encoding.set_format(v1::NUMBER_FORMAT_INT8);
      encoding.add_scale(1);
      job.source = encoding;
      return job;
    };
    work.take = [&](size_t, const absl::StatusOr<QuantizeResult>& result,
                    EvaluateStream*) {
      EXPECT_TRUE(result.ok()) << result.status();
      return absl::CancelledError(absl::StrCat("number ", ++taken));
    };
    work.takes_all_under_way = takes_all;
    EXPECT_EQ(engine.Run(work), absl::CancelledError("number 1"));
    EXPECT_EQ(made, kCount);
    EXPECT_EQ(taken, takes_all ? kCount : 1);
  }
}

}  // namespace
}  // namespace quantd::internal

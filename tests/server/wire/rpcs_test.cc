#include "server/wire/rpcs.h"

#include <set>
#include <string>

#include "google/protobuf/descriptor.h"
#include "gtest/gtest.h"
#include "quantd/v1/access.pb.h"
#include "quantd/v1/encoding_service.pb.h"
#include "quantd/v1/quantization_service.pb.h"

namespace quantd::server {
namespace {

TEST(RpcsTest, EveryMethodHasARowAndAScope) {
  std::set<std::string> rows;
  for (const RpcRow& row : kRpcs) {
    const RpcName& name = RpcNameOf(row.rpc);
    ASSERT_NE(name.service, nullptr) << row.method;
    rows.insert(std::string(name.service) + "." + name.method);
  }
  std::set<std::string> methods;
  for (const auto* file : {v1::QuantizeRequest::descriptor()->file(),
                           v1::SweepRequest::descriptor()->file()}) {
    const auto& service = *file->service(0);
    for (int i = 0; i < service.method_count(); ++i) {
      methods.insert(service.method(i)->full_name());
      EXPECT_NE(service.method(i)->options().GetExtension(v1::scope),
                v1::SCOPE_UNSPECIFIED)
          << service.method(i)->full_name();
    }
  }
  EXPECT_EQ(rows, methods);
}

TEST(RpcsTest, NamesAndScopesAreThoseOfTheProto) {
  const RpcName& quantize = RpcNameOf(Rpc::kQuantize);
  EXPECT_STREQ(quantize.type, "bidi_stream");
  EXPECT_STREQ(quantize.service, "quantd.v1.QuantizationService");
  EXPECT_STREQ(quantize.method, "Quantize");
  EXPECT_STREQ(RpcNameOf(Rpc::kGetEncoding).type, "unary");
  EXPECT_STREQ(RpcNameOf(Rpc::kSweep).type, "server_stream");
  EXPECT_STREQ(RpcNameOf(Rpc::kImportEncodings).type, "client_stream");
  EXPECT_EQ(ScopeOf(Rpc::kSweep), Scope::kRead);
  EXPECT_EQ(ScopeOf(Rpc::kEvaluate), Scope::kQuantize);
  EXPECT_EQ(ScopeOf(Rpc::kImportEncodings), Scope::kCalibrate);
  EXPECT_EQ(ScopeOf(Rpc::kDeleteStatistics), Scope::kAdmin);
}

}  // namespace
}  // namespace quantd::server

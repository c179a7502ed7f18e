#include "server/rpc/provenance.h"

#include <string>
#include <utility>

#include "google/protobuf/descriptor.h"
#include "google/protobuf/field_mask.pb.h"
#include "google/protobuf/util/field_mask_util.h"
#include "quantd/v1/encoding.pb.h"
#include "quantd/v1/encoding_service.pb.h"
#include "server/rpc/rpc_environment.h"
#include "server/store/encoding_store.h"
#include "server/store/statistics_store.h"
#include "server/wire/statistics_proto.h"

namespace quantd::server {
namespace {

// All of a spec that is told.
google::protobuf::FieldMask* MakeToldFields() {
  auto* const mask = new google::protobuf::FieldMask;
  const google::protobuf::Descriptor& spec = *v1::EncodingSpec::descriptor();
  for (int i = 0; i < spec.field_count(); ++i) {
    const google::protobuf::FieldDescriptor& field = *spec.field(i);
    const bool is_real =
        field.cpp_type() == google::protobuf::FieldDescriptor::CPPTYPE_FLOAT ||
        field.cpp_type() == google::protobuf::FieldDescriptor::CPPTYPE_DOUBLE;
    if (field.is_repeated() && is_real) continue;
    if (field.number() == v1::EncodingSpec::kImportanceFieldNumber) continue;
    mask->add_paths(field.name());
  }
  mask->add_paths("importance.inputs");
  mask->add_paths("importance.axis");
  return mask;
}

Precondition PutOf(const RpcEnvironment& env, v1::EncodingOrigin origin,
                   v1::EncodingProvenance provenance) {
  provenance.set_origin(origin);
  provenance.set_quantd_version(std::string(env.version));
  Precondition put;
  put.provenance = provenance.SerializeAsString();
  return put;
}

}  // namespace

v1::EncodingSpec ToldSpec(const v1::EncodingSpec& spec) {
  static const google::protobuf::FieldMask* const kTold = MakeToldFields();
  v1::EncodingSpec told;
  google::protobuf::util::FieldMaskUtil::MergeMessageTo(
      spec, *kTold, google::protobuf::util::FieldMaskUtil::MergeOptions(),
      &told);
  // The mask makes one in any case. That there was one is told at least.
  if (spec.has_importance()) {
    told.mutable_importance();
  } else {
    told.clear_importance();
  }
  told.DiscardUnknownFields();
  return told;
}

Precondition MadeOfElements(const RpcEnvironment& env,
                            const v1::EncodingSpec& spec,
                            const v1::Prediction* prediction) {
  v1::EncodingProvenance provenance;
  *provenance.mutable_spec() = ToldSpec(spec);
  if (prediction != nullptr) *provenance.mutable_prediction() = *prediction;
  return PutOf(env, v1::ENCODING_ORIGIN_ELEMENTS, std::move(provenance));
}

Precondition MadeOfStatistics(const RpcEnvironment& env,
                              const v1::EncodingSpec& spec,
                              const StoredStatistics& statistics,
                              const v1::Prediction* prediction) {
  v1::EncodingProvenance provenance;
  *provenance.mutable_spec() = ToldSpec(spec);
  provenance.set_statistics_digest_xxh3(StateDigest(statistics.state));
  if (prediction != nullptr) *provenance.mutable_prediction() = *prediction;
  return PutOf(env, v1::ENCODING_ORIGIN_STATISTICS, std::move(provenance));
}

Precondition MadeByClient(const RpcEnvironment& env, std::string if_match) {
  Precondition put = PutOf(env, v1::ENCODING_ORIGIN_CLIENT, {});
  put.if_match = std::move(if_match);
  return put;
}

Precondition MadeOfFile(const RpcEnvironment& env,
                        v1::InterchangeFormat format) {
  v1::EncodingProvenance provenance;
  provenance.set_interchange_format(v1::InterchangeFormat_Name(format));
  return PutOf(env, v1::ENCODING_ORIGIN_IMPORT, std::move(provenance));
}

}  // namespace quantd::server

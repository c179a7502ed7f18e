// Protobuf messages as JSON.

#ifndef QUANTD_CLIENT_CLI_MESSAGE_JSON_H_
#define QUANTD_CLIENT_CLI_MESSAGE_JSON_H_

#include <string>

#include "client/cli/session.h"
#include "google/protobuf/message.h"
#include "google/protobuf/timestamp.pb.h"
#include "quantd/v1/encoding.pb.h"
#include "quantd/v1/tensor.pb.h"

namespace quantd::cli {

// The protobuf JSON of a message, which any client can read back.
Json MessageJson(const google::protobuf::Message& message);

// With numbers, infinities as null.
Json PredictionJson(const v1::Prediction& prediction);
Json StatisticsJson(const v1::TensorStatistics& statistics);

// "2026-01-31 23:59:59", in UTC.
std::string TimeText(const google::protobuf::Timestamp& time);

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_MESSAGE_JSON_H_

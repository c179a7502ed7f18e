// The revision of a model that a job reads or writes.

#ifndef QUANTD_CLIENT_JOBS_REVISION_NAME_H_
#define QUANTD_CLIENT_JOBS_REVISION_NAME_H_

#include <string>

#include "client/cpp/tensor.h"

namespace quantd::jobs {

// A revision of a model.
struct RevisionName {
  std::string model;
  std::string revision = "main";

  TensorName NameOf(const std::string& tensor) const {
    TensorName name;
    name.set_model(model);
    name.set_revision(revision);
    name.set_tensor(tensor);
    return name;
  }
};

}  // namespace quantd::jobs

#endif  // QUANTD_CLIENT_JOBS_REVISION_NAME_H_

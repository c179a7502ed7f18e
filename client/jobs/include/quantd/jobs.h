// The work of quantctl on whole models: #include <quantd/jobs.h>, link
// quantd::jobs.

#ifndef QUANTD_CLIENT_JOBS_INCLUDE_QUANTD_JOBS_H_
#define QUANTD_CLIENT_JOBS_INCLUDE_QUANTD_JOBS_H_

#include "client/jobs/quantize_model.h"

#endif  // QUANTD_CLIENT_JOBS_INCLUDE_QUANTD_JOBS_H_

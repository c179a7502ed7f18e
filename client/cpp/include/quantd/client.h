// All that a program needs of quantd: #include <quantd/client.h>.

#ifndef QUANTD_CLIENT_CPP_INCLUDE_QUANTD_CLIENT_H_
#define QUANTD_CLIENT_CPP_INCLUDE_QUANTD_CLIENT_H_

#include "client/cpp/client.h"
#include "client/cpp/errors.h"

#endif  // QUANTD_CLIENT_CPP_INCLUDE_QUANTD_CLIENT_H_

// quantd: flags to objects, serving, and stopping.

#ifndef QUANTD_SERVER_RUN_QUANTD_H_
#define QUANTD_SERVER_RUN_QUANTD_H_

namespace quantd::server {

// Runs quantd with these arguments. Returns its exit code: 0 when it has
// printed what was asked for, found the store sound, or drained after a signal;
// 2 for flags that it does not take; 1 otherwise.
int RunQuantd(int argc, const char* const* argv);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RUN_QUANTD_H_

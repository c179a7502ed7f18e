#include <malloc.h>

#include <csignal>
#include <cstdlib>

#include "absl/synchronization/mutex.h"
#include "client/cli/commands.h"

int main(int argc, char** argv) {
  // glibc otherwise gives every large buffer back to the kernel and faults it
  // in again, which costs more than the transport.
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  mallopt(M_TOP_PAD, 16 << 20);
  // gRPC otherwise wakes up for every few packets of a large message.
  setenv("GRPC_EXPERIMENTS", "tcp_frame_size_tuning,tcp_rcv_lowat",
         /*overwrite=*/0);
  // The error of a connection that fails already says what gRPC would log.
  setenv("GRPC_VERBOSITY", "NONE", /*overwrite=*/0);
#ifdef NDEBUG
  // The distribution's Abseil otherwise looks for cycles in the order of all
  // locks, with one lock for the whole process.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
#endif
  // A reader that closes the pipe ends the process by itself; a server that
  // closes the connection must not.
  std::signal(SIGPIPE, SIG_DFL);
  return quantd::cli::RunQuantctl(argc, argv);
}

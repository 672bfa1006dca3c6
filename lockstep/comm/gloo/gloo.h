// The Gloo transport: c10d's ProcessGroupGloo, TCP between processes on one host or several, for tensors on the CPU.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "lockstep/comm/interface/transport.h"
#include "lockstep/job/store.h"

namespace lockstep::comm::gloo {

struct GlooOptions {
  std::shared_ptr<job::Store> store = nullptr;  ///< used by this transport alone, for its rendezvous
  int rank = 0;
  int size = 1;
  std::string address = {};             ///< numeric address of this host
  std::string interface = {};           ///< network interface; if not empty, `address` is not used
  std::chrono::milliseconds timeout{};  ///< for connecting
  int threads = 2;                      ///< the number of operations that run concurrently
};

/// Returns an empty string if Gloo is available, otherwise the reason.
std::string gloo_unavailable_reason();

/// Connects all ranks; blocks until all of them have called it. If SIGPIPE would end the process, it is ignored from
/// now on, so that a lost peer becomes the error of an operation. Throws CommError if a rank does not connect in time,
/// UsageError if `interface` cannot be used, and SystemError if `address` cannot be used.
std::shared_ptr<Transport> make_gloo_transport(const GlooOptions& options);

}  // namespace lockstep::comm::gloo

// c10d's ProcessGroupGloo as a transport: TCP between CPU processes, on one host or many.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "lockstep/comm/interface/transport.h"
#include "lockstep/job/store.h"

namespace lockstep::comm {

struct GlooOptions {
  std::shared_ptr<job::Store> store;  ///< where the ranks of this transport find each other, under keys of its own
  int rank = 0;
  int size = 1;
  std::string address;                  ///< of this host, as numbers
  std::string interface;                ///< outranks `address`
  std::chrono::milliseconds timeout{};  ///< to connect
  int threads = 2;                      ///< operations that are carried out at once
};

/// Empty when it can be used, else why not.
std::string gloo_unavailable_reason();

/// Connects all ranks; all of them call it. Where SIGPIPE would end the process it is ignored from then on: a peer that
/// goes is an error of an operation. Throws CommError when one does not come in time.
std::shared_ptr<Transport> make_gloo_transport(const GlooOptions& options);

}  // namespace lockstep::comm

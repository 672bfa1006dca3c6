// Serves a LocalStore over TCP. The launcher owns one; without a launcher rank 0 does.
#pragma once

#include <memory>
#include <string>

#include "lockstep/base/socket.h"
#include "lockstep/job/local_store.h"

namespace lockstep::job {

/// Listens on exactly the address it is given and answers StoreClient. A connection must say the job's name within 2 s, in
/// at most 256 bytes, or it is dropped and nothing is allocated for it; every later length is checked before memory is
/// taken. One own thread.
class StoreServer {
 public:
  /// Throws SystemError (kPortInUse when the port is taken). Port 0 picks one.
  StoreServer(const base::Address& address, std::string job);
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  /// Where it listens.
  const base::Address& address() const;
  /// The table itself, for its owner.
  LocalStore& store();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep::job

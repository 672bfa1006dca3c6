// An adapter that makes Lockstep's store usable by c10d.
#pragma once

#include <chrono>
#include <memory>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/job/store.h"

namespace lockstep::comm::gloo {

/// Returns a c10d store that forwards to `store`. A call that blocks throws c10::DistStoreError at its timeout, which
/// is `timeout` unless the call specifies one.
c10::intrusive_ptr<c10d::Store> make_c10d_store(std::shared_ptr<job::Store> store, std::chrono::milliseconds timeout);

}  // namespace lockstep::comm::gloo

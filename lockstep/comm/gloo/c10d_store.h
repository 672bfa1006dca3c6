// Our store as one of c10d's, for what c10d makes.
#pragma once

#include <chrono>
#include <memory>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/job/store.h"

namespace lockstep::comm {

/// Every call of it that waits ends at its timeout (`timeout` unless the call gives one) with c10::DistStoreError.
c10::intrusive_ptr<c10d::Store> make_c10d_store(std::shared_ptr<job::Store> store, std::chrono::milliseconds timeout);

}  // namespace lockstep::comm

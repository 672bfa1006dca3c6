// Runs the code of the ranks of a host in many schedules.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/arena/arena.h"
#include "lockstep/comm/interface/transport.h"
#include "lockstep/comm/shm/control_block.h"
#include "lockstep/comm/shm/local_peers.h"
#include "tests/schedules/scheduler.h"

namespace lockstep::schedules {

/// What the code of a rank gets. All ranks use one arena.
struct Rank {
  Fiber& fiber;
  const int rank;
  const int size;
  comm::arena::Arena& arena;
  const std::shared_ptr<const comm::shm::LocalPeers> peers;
  const std::shared_ptr<job::Store> store;
  /// Closes the connections of this rank, as the kernel does when a process ends.
  const std::function<void()> leave;
  /// True once a rank was killed: from then on the others may fail.
  const std::function<bool()> may_fail;

  std::unique_ptr<comm::shm::ControlBlocks> connect(const std::string& name) const;
  std::shared_ptr<comm::Transport> transport(const std::string& name) const;
  at::Tensor tensor(std::int64_t count, float value) const;
};

/// The further fibers of a schedule, for example a thread of a rank that aborts.
using Extra = std::function<void(Fiber&)>;

/// Runs `body` on every rank in `--schedules` schedules, and `extra`, if set, on one more fiber. Reports the first that
/// fails, with the seed that repeats it.
void explore(Options options, const std::function<void(Rank&)>& body, const Extra& extra = nullptr);
/// The same for fibers that use nothing of a host. `prepare` runs before each schedule.
void explore_fibers(Options options, const std::vector<std::function<void(Fiber&)>>& bodies,
                    const std::function<void()>& prepare);

}  // namespace lockstep::schedules

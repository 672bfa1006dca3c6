// How a collective operation is carried out: which rank sends which bytes to which, and in what order.
#pragma once

#include <c10/util/SmallVector.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "lockstep/comm/interface/collective.h"

namespace lockstep::comm::tcp {

/// Bytes that this rank sends to `peer` or receives from it.
struct Transfer {
  int peer = 0;
  bool sends = false;
  char* data = nullptr;
  std::size_t bytes = 0;
};

/// A step of an operation. When everything that step `after` receives has arrived (at once if it is negative), and all
/// earlier steps have started, `compute` runs and the transfers start.
struct Step {
  std::ptrdiff_t after = -1;
  std::function<void()> compute;  // may be empty
  c10::SmallVector<Transfer, 4> transfers;
};

/// Memory for parts that are received to be reduced. Kept from one operation for the next.
struct Scratch {
  std::unique_ptr<char[]> data;
  std::size_t bytes = 0;
};

/// The steps of an operation on one rank. On each pair of ranks, the order of the messages is the same at both ends.
struct StepSchedule {
  std::vector<Step> steps;
  Scratch scratch;  // without data if none is needed
};

/// Returns this rank's steps of `op`, any kind but send and recv. Pure, except that `take_scratch` is called if memory
/// is needed. The tensors and the result must stay alive until the operation has ended.
///
/// A large reduction is split into one part per rank: each rank receives all others' values of its part, adds them in
/// the order of the ranks, and sends the result to all others, so that each rank sends and receives
/// 2 (ranks - 1) / ranks of the bytes, all ranks get the same bits, and there are two waits (reduce-scatter and
/// all-gather, by direct messages; Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations
/// in MPICH, 2005, section 4). A part is exchanged in chunks, so that the network is busy while the CPU adds. A small
/// all_reduce sends all values to all ranks, with one wait. A large broadcast scatters the tensor and then gathers it.
StepSchedule make_schedule(const Collective& op, int rank, int size, const std::function<Scratch()>& take_scratch);

}  // namespace lockstep::comm::tcp

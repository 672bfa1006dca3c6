// What the members of a column do between hosts: exchange their slices.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <vector>

#include "lockstep/comm/interface/transport.h"

namespace lockstep::comm {

/// A run of elements in the memory of each member of this host, in their order.
struct Slices {
  at::ScalarType dtype = at::kFloat;
  std::vector<char*> locals;
  std::size_t count = 0;
};

/// Calls block until they are done, stop is set or the wire fails; then they throw. One thread at a time; all members
/// of the column make the same calls in the same order.
class Column {
 public:
  /// Member `host` of `outer`, which has one on each of `num_hosts` hosts. `stop` ends all waits within 20 ms.
  Column(std::shared_ptr<Transport> outer, int host, int num_hosts, const std::atomic<bool>& stop);

  /// Every local slice becomes the reduction of all slices of all hosts, the same bits everywhere. The slices of a host
  /// are reduced, rounded to `wire` if they are float32, and sent, each part to the host that owns it, which adds them
  /// in the order of the hosts, divides by `divisor`, rounds once, and sends the result to all. In pieces, several of
  /// which are under way.
  void all_reduce(const Slices& slices, ReduceOp op, int divisor, at::ScalarType wire);
  /// Every local slice becomes local 0's of `root`, a host; there it is slice `source` of the locals.
  void broadcast(const Slices& slices, int root, std::size_t source);

 private:
  /// Memory for one piece on its way: what this host sends, what it gets of its own part from all, that part, and all
  /// parts.
  struct Piece {
    at::Tensor sent, received, part, all;
    PendingPtr scattered, gathered;
    std::size_t first = 0;
    std::size_t count = 0;
    std::size_t part_count = 0;
  };
  void scatter(const Slices& slices, ReduceOp op, at::ScalarType wire, Piece& piece);
  void gather(const Slices& slices, ReduceOp op, int divisor, at::ScalarType wire, Piece& piece);
  void store(const Slices& slices, at::ScalarType wire, Piece& piece);
  void reserve(std::size_t piece_bytes);
  void wait(const PendingPtr& pending) const;
  PendingPtr start(Kind kind, const at::Tensor& input, const at::Tensor& output, int root = 0);

  const std::shared_ptr<Transport> outer_;
  const int host_;
  const std::size_t num_hosts_;
  const std::atomic<bool>& stop_;
  std::uint64_t seq_ = 0;
  std::vector<Piece> pieces_;
  at::Tensor wide_;  // a host's sum before it is rounded
};

}  // namespace lockstep::comm

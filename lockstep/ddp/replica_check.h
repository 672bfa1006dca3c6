// Compares the parameters of the ranks by their hashes: in reductions, on request, and when the model's training ends.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "lockstep/comm/group.h"
#include "lockstep/comm/interface/collective.h"
#include "lockstep/ddp/replicas.h"

namespace lockstep::ddp {

/// The check of one model. Used by one thread at a time. Everything except compare_at_end() is collective.
class ReplicaCheck {
 public:
  /// `every`: DdpOptions.compare_replicas_every.
  ReplicaCheck(NamedTensors parameters, comm::Group group, int every);

  /// Returns the operation that exchanges the hashes if reduction number `number`, from 0, compares them.
  std::optional<comm::Collective> hashes_if_due(std::int64_t number);
  /// Call it when that operation has finished. Throws CommError kReplicaDiverged, on all ranks, if hashes differ.
  void check_exchanged() const;

  /// Exchanges and compares the hashes now. Blocks until all ranks have called it. Throws as check_exchanged() does.
  void compare_now();
  /// Leaves this rank's hashes in the job's store. The last rank compares all of them and prints a warning if some
  /// differ. Does not wait for the other ranks. A store that is lost is no error.
  void compare_at_end() noexcept;

 private:
  void hash();
  std::string describe_difference(const std::vector<std::int64_t>& hashes, int& outlier_rank) const;

  const NamedTensors parameters_;
  const comm::Group group_;
  const int every_;
  const std::string store_key_;
  at::Tensor hashes_, all_hashes_;
};

}  // namespace lockstep::ddp

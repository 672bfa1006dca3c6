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

  /// A step has ended, and reduction number `next` has not begun: if that one, or another one before the next step,
  /// compares hashes, takes them now. Between a backward() and the end of its step, ranks may hold other parameters on
  /// purpose, as in sharpness-aware minimization. Not collective.
  void on_step_end(std::int64_t next);
  /// The parameters have been made equal otherwise than by a step.
  void forget_step() { step_end_ = 0; }
  /// Returns the operation that exchanges the hashes if reduction number `number`, from 0, compares them: those of the
  /// end of the last step, or of now in a program whose steps are not known.
  std::optional<comm::Collective> hashes_if_due(std::int64_t number);
  /// Call it when that operation has finished. Throws CommError kReplicaDiverged, on all ranks, if hashes differ.
  void check_exchanged() const;

  /// Exchanges and compares the hashes now. Blocks until all ranks have called it. Throws as check_exchanged() does.
  void compare_now();
  /// Leaves this rank's hashes in the job's store. The last rank compares all of them and prints a warning if some
  /// differ. Does not wait for the other ranks. A store that is lost is no error.
  void compare_at_end() noexcept;

 private:
  bool is_due(std::int64_t number) const;
  void hash();
  std::string describe_difference(const std::vector<std::int64_t>& hashes, int& outlier_rank) const;

  const NamedTensors parameters_;
  const comm::Group group_;
  const int every_;
  const std::string store_key_;
  std::int64_t step_end_ = 0;  // number of the reduction that followed the end of the last step; 0: none is known
  at::Tensor hashes_, all_hashes_;
};

}  // namespace lockstep::ddp

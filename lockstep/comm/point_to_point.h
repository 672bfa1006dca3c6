// The channels of messages between two ranks. Private to comm/.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <mutex>
#include <vector>

#include "lockstep/comm/group_impl.h"

namespace lockstep::comm {

/// Messages in one direction between this rank and one peer, ordered independently of all other operations. A receive
/// takes the next message when it is executed; a receive from any rank may come between two others.
struct Group::Impl::PeerChannel {
  void begin_receive(Collective& op, const at::Tensor& target);
  /// Starts to receive the signature of the next message, unless that has begun. The caller holds `receiving`.
  Pending& next_signature();
  /// Waits for the next message and receives it. The caller holds `receiving`.
  void receive_next(const Collective& op, const at::Tensor& target);

  channel::Channel channel;
  const int peer;
  std::mutex beginning{};  // held by begin_receive()
  std::mutex receiving{};  // held while a receive takes a message; guards the next three members
  std::uint64_t num_received = 0;
  at::Tensor signature{};
  PendingPtr signature_arrives{};      // null if no receive has asked for the next message
  channel::SerialExecutor executor{};  // last member: its thread ends before the members that it uses
};

/// Receives from the rank that sends first. Their waits belong to a channel that only this rank has.
struct Group::Impl::AnySource {
  /// Done when a message has arrived; then the thread that asked holds `receiving` of its source.
  class Arrival final : public Pending {
   public:
    explicit Arrival(const std::vector<PeerChannel*>& sources) : sources_(sources) {}
    bool done() override;
    bool wait_until(base::Deadline deadline) override;

    PeerChannel* source = nullptr;
    std::unique_lock<std::mutex> receiving;

   private:
    const std::vector<PeerChannel*>& sources_;
  };
  int receive(const Collective& op, const at::Tensor& target);

  channel::Channel channel;
  std::vector<PeerChannel*> sources{};
  channel::SerialExecutor executor{};  // last member: its thread ends before the members that it uses
};

}  // namespace lockstep::comm

// ChannelHookContext: runs the operations of a GradientHook on a channel.
#pragma once

#include <string>

#include "lockstep/comm/channel/channel.h"
#include "lockstep/comm/interface/gradient_hook.h"

namespace lockstep::comm::reducers {

/// All operations have the number `seq` and the name `label`.
class ChannelHookContext final : public HookContext {
 public:
  ChannelHookContext(channel::Channel& channel, const std::string& label, std::uint64_t seq);
  int rank() const override { return channel_.rank(); }
  int size() const override { return channel_.size(); }
  PendingPtr all_reduce(const at::Tensor& tensor) override;
  PendingPtr all_gather(const at::Tensor& output, const at::Tensor& input) override;
  void wait(Pending& pending) override;

 private:
  channel::Channel& channel_;
  Collective op_;
};

}  // namespace lockstep::comm::reducers

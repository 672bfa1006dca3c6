#include "lockstep/comm/reducers/channel_hook_context.h"

namespace lockstep::comm::reducers {

ChannelHookContext::ChannelHookContext(channel::Channel& channel, const std::string& label, std::uint64_t seq)
    : channel_(channel), op_{.kind = CollectiveKind::kAllReduce, .name = label, .seq = seq} {}

PendingPtr ChannelHookContext::all_reduce(const at::Tensor& tensor) {
  Collective op = op_;
  op.input = op.output = tensor;
  return channel_.start(op);
}

PendingPtr ChannelHookContext::all_gather(const at::Tensor& output, const at::Tensor& input) {
  Collective op = op_;
  op.kind = CollectiveKind::kAllGather;
  op.input = input;
  op.output = output;
  return channel_.start(op);
}

void ChannelHookContext::wait(Pending& pending) { channel_.wait(pending, op_, "backward() (" + op_.name + ")"); }

}  // namespace lockstep::comm::reducers

#include "lockstep/comm/reducers/gradient_hook.h"

namespace lockstep::comm {

Wire::Wire(Channel& channel, const std::string& label, std::uint64_t seq)
    : channel_(channel), op_{.kind = Kind::kAllReduce, .name = label, .seq = seq} {}

PendingPtr Wire::all_reduce(const at::Tensor& tensor) {
  Collective op = op_;
  op.input = op.output = tensor;
  return channel_.start(op);
}

PendingPtr Wire::all_gather(const at::Tensor& output, const at::Tensor& input) {
  Collective op = op_;
  op.kind = Kind::kAllGather;
  op.input = input;
  op.output = output;
  return channel_.start(op);
}

void Wire::wait(Pending& pending) { channel_.wait(pending, op_, "backward() (" + op_.name + ")"); }

}  // namespace lockstep::comm

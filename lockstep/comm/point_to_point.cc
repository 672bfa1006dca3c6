// send and recv: the sender sends a CallSignature before the data, and the receiver compares it with its own call.
#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>

#include <cstring>

#include "lockstep/base/error.h"
#include "lockstep/comm/group_impl.h"

namespace lockstep::comm {
namespace {

at::Tensor bytes_of(const channel::CallSignature& call) {
  at::Tensor bytes = at::empty({channel::kSignatureBytes}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), &call, sizeof call);
  return bytes;
}

}  // namespace

/// A send that has started: its signature and its data are in transit.
struct Group::Impl::StartedSend {
  Collective op;
  std::string text;
  PendingPtr call;
  PendingPtr data;

  void wait(channel::Channel& channel) const;
};

Group::Impl::PeerChannel& Group::Impl::get_peer_channel(CollectiveKind kind, int peer) {
  check_root(kind, peer);
  if (peer == rank)
    throw base::UsageError(std::string(comm::name(kind)) + ": rank " + std::to_string(peer) +
                           " is this rank; expected another rank of " + name);
  const bool sending = kind == CollectiveKind::kSend;
  auto& pair = peer_channels_[{sending, peer}];
  if (!pair) {
    const int from = members[static_cast<std::size_t>(sending ? rank : peer)];
    const int to = members[static_cast<std::size_t>(sending ? peer : rank)];
    pair.reset(new PeerChannel{{name + "." + std::to_string(from) + ">" + std::to_string(to),
                                {from, to},
                                sending ? 0 : 1,
                                transport_,
                                world->deadlock_detector},
                               {}});
  }
  return *pair;
}

std::shared_ptr<Group::Impl::StartedSend> Group::Impl::begin_send(const at::Tensor& tensor, channel::Channel& channel,
                                                                  int to, const CallOptions& options) {
  auto sent = std::make_shared<StartedSend>();
  sent->op = make_collective(CollectiveKind::kSend, tensor, options);
  sent->op.root = to;
  channel.begin(sent->op, tensor);
  const std::uint64_t seq = sent->op.seq;
  const channel::CallSignature call = channel::make_signature(sent->op, channel::SignatureShape(tensor));
  sent->text = describe(call) + " to rank " + std::to_string(members[static_cast<std::size_t>(to)]);
  // One operation consists of two messages, with the numbers 2 seq and 2 seq + 1.
  Collective header = sent->op;
  header.seq = 2 * seq;
  header.input = bytes_of(call);
  Collective data = sent->op;
  data.seq = 2 * seq + 1;
  data.input = tensor.contiguous();
  sent->call = channel.start(header);
  sent->data = channel.start(data);
  return sent;
}

void Group::Impl::receive(Collective op, at::Tensor target, channel::Channel& channel) {
  channel.throw_if_closed();
  const at::NoGradGuard no_grad;
  const channel::CallSignature expected = channel::make_signature(op, channel::SignatureShape(target));
  const std::string text = describe(expected) + " from rank " + std::to_string(channel.members()[0]);
  const std::uint64_t seq = op.seq;
  Collective header = op;
  header.seq = 2 * seq;
  header.output = at::empty({channel::kSignatureBytes}, at::kByte);
  const PendingPtr call_arrives = channel.start(header);
  channel.wait(*call_arrives, op, text);
  channel::CallSignature sent;
  std::memcpy(&sent, header.output.const_data_ptr(), sizeof sent);
  channel::CallSignature as_received = expected;
  as_received.kind = sent.kind;
  as_received.root = sent.root;
  channel::CallMismatch difference{};
  if (channel::find_mismatch({as_received, sent}, false, difference)) {
    try {
      throw base::DesyncError(base::Cause::kDesync, label(op), channel.members()[1], channel.members()[0],
                              "rank " + std::to_string(channel.members()[0]) + " called " + describe(sent) + ", rank " +
                                  std::to_string(channel.members()[1]) + " called " + describe(expected),
                              "sender and receiver must pass the same dtype and shape, in the same order");
    } catch (const base::CommError& error) {
      channel.fail(error);
    }
  }
  Collective data = op;
  data.seq = 2 * seq + 1;
  data.output = target.is_contiguous() ? target : at::empty(target.sizes(), target.options());
  const PendingPtr arrives = channel.start(data);
  channel.wait(*arrives, op, text);
  if (!data.output.is_same(target)) target.copy_(data.output);
  channel.end(op.flight_id);
}

void Group::Impl::StartedSend::wait(channel::Channel& channel) const {
  channel.wait(*call, op, text);
  channel.wait(*data, op, text);
  channel.end(op.flight_id);
}

Work Group::Impl::start_point_to_point(CollectiveKind kind, const at::Tensor& tensor, int peer,
                                       const CallOptions& options) {
  PeerChannel& pair = get_peer_channel(kind, peer);
  if (kind == CollectiveKind::kSend) {
    // Start the send on this thread, so that two ranks may send to each other before they receive. The executor only
    // waits for it.
    auto sent = begin_send(tensor, pair.channel, peer, options);
    std::string text = label(sent->op);
    return {pair.executor.post([sent, &pair] { sent->wait(pair.channel); }), std::move(text), rank,
            world->deadlock_detector, &pair.executor};
  }
  Collective op = make_collective(kind, tensor, options);
  op.root = peer;
  pair.channel.begin(op, tensor);
  const auto run = [this, op, tensor, &pair, stream = current_stream({.output = tensor})] {
    const c10::OptionalStreamGuard on(stream);
    receive(op, tensor, pair.channel);
  };
  return {pair.executor.post(run), label(op), rank, world->deadlock_detector, &pair.executor};
}

void Group::Impl::run_point_to_point(CollectiveKind kind, const at::Tensor& tensor, int peer,
                                     const CallOptions& options) {
  PeerChannel& pair = get_peer_channel(kind, peer);
  if (!pair.executor.is_idle())
    return start_point_to_point(kind, tensor, peer, options)
        .wait();  // bounded: the operation ends at its deadline, or by the DeadlockDetector
  if (kind == CollectiveKind::kSend) {
    return begin_send(tensor, pair.channel, peer, options)->wait(pair.channel);
  }
  Collective op = make_collective(kind, tensor, options);
  op.root = peer;
  pair.channel.begin(op, tensor);
  receive(std::move(op), tensor, pair.channel);
}

}  // namespace lockstep::comm

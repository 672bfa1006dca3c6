// send and recv: the sender sends a CallSignature before the data, and the receiver compares it with its own call.
#include "lockstep/comm/point_to_point.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>

#include <cstring>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/base/telemetry/comm_time.h"

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

  void wait(channel::Channel& channel) const {
    channel.wait(*call, op, text);
    channel.wait(*data, op, text);
    channel.end(op.flight_id);
  }
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
                               peer});
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

void Group::Impl::PeerChannel::begin_receive(Collective& op, const at::Tensor& target) {
  op.root = peer;
  const std::lock_guard lock(beginning);
  channel.begin(op, target);
}

Pending& Group::Impl::PeerChannel::next_signature() {
  if (!signature_arrives) {
    signature = at::empty({channel::kSignatureBytes}, at::kByte);
    signature_arrives = channel.start(
        {.kind = CollectiveKind::kRecv, .output = signature, .root = peer, .seq = 2 * (num_received + 1)});
  }
  return *signature_arrives;
}

void Group::Impl::PeerChannel::receive_next(const Collective& op, const at::Tensor& target) {
  channel.throw_if_closed();
  const at::NoGradGuard no_grad;
  const channel::CallSignature expected = channel::make_signature(op, channel::SignatureShape(target));
  const std::string text = describe(expected) + " from rank " + std::to_string(channel.members()[0]);
  channel.wait(next_signature(), op, text);
  signature_arrives = nullptr;
  ++num_received;
  channel::CallSignature sent;
  std::memcpy(&sent, signature.const_data_ptr(), sizeof sent);
  channel::CallSignature as_received = expected;
  as_received.seq = sent.seq;
  as_received.kind = sent.kind;
  as_received.root = sent.root;
  channel::CallMismatch difference{};
  if (channel::find_mismatch({as_received, sent}, false, difference))
    channel.throw_failure(
        base::DesyncError(base::Cause::kDesync, label(op), channel.members()[1], channel.members()[0],
                          "rank " + std::to_string(channel.members()[0]) + " called " + describe(sent) + ", rank " +
                              std::to_string(channel.members()[1]) + " called " + describe(expected),
                          "sender and receiver must pass the same dtype and shape, in the same order"));
  Collective data = op;
  data.seq = 2 * num_received + 1;
  data.output = target.is_contiguous() ? target : at::empty(target.sizes(), target.options());
  const PendingPtr arrives = channel.start(data);
  channel.wait(*arrives, op, text);
  if (!data.output.is_same(target)) at::Tensor(target).copy_(data.output);
  channel.end(op.flight_id);
}

void Group::Impl::receive(const Collective& op, const at::Tensor& target, PeerChannel& pair) {
  const std::lock_guard lock(pair.receiving);
  pair.receive_next(op, target);
}

bool Group::Impl::AnySource::Arrival::done() {
  std::size_t num_failed = 0;
  for (PeerChannel* const pair : sources_) {
    if (source) break;
    std::unique_lock lock(pair->receiving, std::try_to_lock);  // fails if a receive from this rank waits
    if (!lock || !pair->next_signature().done()) continue;
    // The connection of a rank that has left may end while another one may still send. Why it ended is found by the
    // DeadlockDetector.
    if (pair->next_signature().error() && ++num_failed < sources_.size()) continue;
    source = pair;
    receiving = std::move(lock);
  }
  return source != nullptr;
}

bool Group::Impl::AnySource::Arrival::wait_until(base::Deadline deadline) {
  return base::poll_until(deadline, std::chrono::milliseconds(1), [&] { return done(); });
}

int Group::Impl::AnySource::receive(const Collective& op, const at::Tensor& target) {
  channel.throw_if_closed();
  Arrival arrival(sources);
  channel.wait(arrival, op, describe(channel::make_signature(op, channel::SignatureShape(target))) + " from any rank");
  channel.end(op.flight_id);
  Collective from_source = op;
  arrival.source->begin_receive(from_source, target);
  arrival.source->receive_next(from_source, target);
  return arrival.source->peer;
}

Group::Impl::AnySource& Group::Impl::get_any_source() {
  if (any_source_) return *any_source_;
  if (members.size() == 1) throw base::UsageError("recv_any: the group " + name + " has no other rank");
  any_source_.reset(new AnySource{{name + ".any>" + std::to_string(members[static_cast<std::size_t>(rank)]), members,
                                   rank, transport_, world->deadlock_detector}});
  for (int peer = 0; peer < static_cast<int>(members.size()); ++peer)
    if (peer != rank) any_source_->sources.push_back(&get_peer_channel(CollectiveKind::kRecv, peer));
  return *any_source_;
}

Collective Group::Impl::begin_receive_any(const at::Tensor& tensor, const CallOptions& options, AnySource& any) {
  Collective op = make_collective(CollectiveKind::kRecv, tensor, options);
  op.root = kAnySource;
  any.channel.begin(op, tensor);
  return op;
}

int Group::Impl::run_receive_any(const at::Tensor& tensor, const CallOptions& options) {
  const base::telemetry::CommTime::Scope time(true);
  AnySource& any = get_any_source();
  if (any.executor.is_idle()) return any.receive(begin_receive_any(tensor, options, any), tensor);
  const auto source = std::make_shared<int>(kAnySource);
  start_receive_any(tensor, source, options)
      .wait();  // bounded: the operation ends at its deadline, or by the DeadlockDetector
  return *source;
}

Work Group::Impl::start_receive_any(const at::Tensor& tensor, std::shared_ptr<int> source, const CallOptions& options) {
  AnySource& any = get_any_source();
  const Collective op = begin_receive_any(tensor, options, any);
  const auto run = [op, tensor, source = std::move(source), &any, stream = current_stream({.output = tensor}),
                    thread = std::this_thread::get_id()] {
    const c10::OptionalStreamGuard on(stream);
    const channel::DeadlockDetector::ActingForThread acting(thread);
    *source = any.receive(op, tensor);
  };
  return {any.executor.post(run), label(op), rank, world->deadlock_detector, &any.executor};
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
  pair.begin_receive(op, tensor);
  const auto run = [this, op, tensor, &pair, stream = current_stream({.output = tensor})] {
    const c10::OptionalStreamGuard on(stream);
    receive(op, tensor, pair);
  };
  return {pair.executor.post(run), label(op), rank, world->deadlock_detector, &pair.executor};
}

void Group::Impl::run_point_to_point(CollectiveKind kind, const at::Tensor& tensor, int peer,
                                     const CallOptions& options) {
  const base::telemetry::CommTime::Scope time(true);
  PeerChannel& pair = get_peer_channel(kind, peer);
  if (!pair.executor.is_idle())
    return start_point_to_point(kind, tensor, peer, options)
        .wait();  // bounded: the operation ends at its deadline, or by the DeadlockDetector
  if (kind == CollectiveKind::kSend) return begin_send(tensor, pair.channel, peer, options)->wait(pair.channel);
  Collective op = make_collective(kind, tensor, options);
  pair.begin_receive(op, tensor);
  receive(op, tensor, pair);
}

}  // namespace lockstep::comm

#include "lockstep/comm/gloo/gloo.h"

#ifndef USE_C10D_GLOO
#define USE_C10D_GLOO
#endif
#include <cerrno>
#include <csignal>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/comm/gloo/c10d_store.h"

namespace lockstep::comm {
namespace {

using c10d::ProcessGroupGloo;

c10d::ReduceOp::RedOpType c10d_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::kMin: return c10d::ReduceOp::MIN;
    case ReduceOp::kMax: return c10d::ReduceOp::MAX;
    case ReduceOp::kProduct: return c10d::ReduceOp::PRODUCT;
    default: return c10d::ReduceOp::SUM;  // a mean is divided afterwards
  }
}

/// Bool moves and is reduced as bytes.
at::Tensor wire_view(const at::Tensor& tensor) {
  return tensor.defined() && tensor.scalar_type() == at::kBool ? tensor.view(at::kByte) : tensor;
}

ReduceOp wire_op(const Collective& op) {
  if (op.input.defined() && op.input.scalar_type() == at::kBool) {
    if (op.op == ReduceOp::kSum) return ReduceOp::kMax;
    if (op.op == ReduceOp::kProduct) return ReduceOp::kMin;
  }
  return op.op;
}

std::vector<at::Tensor> pieces(const at::Tensor& whole, int count) {
  return whole.defined() ? whole.flatten().chunk(count) : std::vector<at::Tensor>();
}

class GlooTransport final : public Transport {
 public:
  GlooTransport(c10::intrusive_ptr<ProcessGroupGloo> group, int rank, int size)
      : group_(std::move(group)), rank_(rank), size_(size) {}

  ~GlooTransport() override {
    bool running = false;
    for (const auto& pending : running_) running = running || !pending->done();
    // The process group's destructor would wait for what nobody will finish.
    if (running)
      abort(std::make_exception_ptr(
          base::PeerLost(base::Cause::kPeerUnreachable, "gloo", rank_, rank_, "the transport was closed")));
    for (auto& waiter : waiters_) waiter.thread.join();  // bounded: abort() has ended what they wait for, or it is done
  }

  std::string_view name() const override { return "gloo"; }
  const Capabilities& capabilities() const override {
    static const Capabilities all = everything_on_cpu();
    return all;
  }

  PendingPtr start(const Collective& op) override {
    const std::lock_guard lock(mutex_);
    auto pending = std::make_shared<Pending>();
    if (aborted_) {
      pending->finish(aborted_);
      return pending;
    }
    forget_done();
    running_.push_back(pending);
    try {
      auto work = issue_alone(op);
      if (op.kind == Kind::kSend || op.kind == Kind::kRecv)
        wait_on_thread(std::move(work), pending, op);
      else
        finish_with(*work, pending, op);
    } catch (...) {
      pending->finish(std::current_exception());
    }
    return pending;
  }

  void abort(std::exception_ptr cause) noexcept override {
    const std::lock_guard lock(mutex_);
    if (aborted_) return;
    aborted_ = cause;
    for (const auto& pending : running_) pending->finish(cause);
    for (const auto& waiter : waiters_) waiter.work->abort();
    // Its threads may be blocked in gloo for good; joining them, as its destructor does, would hang. The process ends
    // soon.
    group_.release();
  }

 private:
  /// libtorch 2.11 notes every operation in a FlightRecorder of the process, in a map that two threads must not change
  /// at once.
  c10::intrusive_ptr<c10d::Work> issue_alone(const Collective& op) {
    static std::mutex recorder;
    const std::lock_guard lock(recorder);
    return issue(op);
  }

  /// c10d offers no future for point-to-point operations, only a wait that blocks.
  struct Waiter {
    std::thread thread;
    c10::intrusive_ptr<c10d::Work> work;
    PendingPtr pending;
  };

  void forget_done() {
    std::erase_if(running_, [](const PendingPtr& p) { return p->done(); });
    std::erase_if(waiters_, [](Waiter& w) {
      if (!w.pending->done()) return false;
      w.thread.join();  // bounded: finish() is the last thing it does
      return true;
    });
  }

  c10::intrusive_ptr<c10d::Work> all_reduce(const at::Tensor& tensor, const Collective& op) {
    c10d::AllreduceOptions options;
    options.reduceOp = c10d_op(wire_op(op));
    std::vector<at::Tensor> in_place{tensor};
    return group_->allreduce(in_place, options);
  }

  c10::intrusive_ptr<c10d::Work> issue(const Collective& op) {
    const at::Tensor in = wire_view(op.input);
    const at::Tensor out = wire_view(op.output);
    std::vector<at::Tensor> input{in};
    std::vector<at::Tensor> output{out};
    const bool at_root = op.root == rank_;
    switch (op.kind) {
      case Kind::kAllReduce: return all_reduce(in, op);
      case Kind::kReduce: {
        c10d::ReduceOptions options;
        options.reduceOp = c10d_op(wire_op(op));
        options.rootRank = op.root;
        return group_->reduce(input, options);
      }
      case Kind::kBroadcast: {
        c10d::BroadcastOptions options;
        options.rootRank = op.root;
        return group_->broadcast(input, options);
      }
      case Kind::kAllGather: {
        at::Tensor flat_out = out.flatten();
        at::Tensor flat_in = in.flatten();
        return group_->_allgather_base(flat_out, flat_in);
      }
      case Kind::kReduceScatter: {
        // Gloo reduces the whole and keeps a part; doing so in a copy leaves the caller's input as it was.
        scattered_ = in.clone();
        return all_reduce(scattered_, op);
      }
      case Kind::kGather: {
        c10d::GatherOptions options;
        options.rootRank = op.root;
        std::vector<std::vector<at::Tensor>> outputs;
        if (at_root) outputs.push_back(pieces(out, size_));
        std::vector<at::Tensor> flat{in.flatten()};
        return group_->gather(outputs, flat, options);
      }
      case Kind::kScatter: {
        c10d::ScatterOptions options;
        options.rootRank = op.root;
        std::vector<std::vector<at::Tensor>> inputs;
        if (at_root) inputs.push_back(pieces(in, size_));
        std::vector<at::Tensor> flat{out.flatten()};
        return group_->scatter(flat, inputs, options);
      }
      case Kind::kAllToAll: {
        std::vector<std::int64_t> equal;
        at::Tensor flat_out = out.flatten();
        at::Tensor flat_in = in.flatten();
        return group_->alltoall_base(flat_out, flat_in, equal, equal);
      }
      case Kind::kSend: return group_->send(input, op.root, tag(op));
      case Kind::kRecv: return group_->recv(output, op.root, tag(op));
      case Kind::kBarrier: return group_->barrier();
    }
    throw base::UsageError("gloo: unknown operation");
  }

  static int tag(const Collective& op) { return static_cast<int>(op.seq & 0x7fffffff); }

  void finish_with(c10d::Work& work, const PendingPtr& pending, const Collective& op) {
    // The callback keeps the tensors alive; it runs on one of gloo's threads.
    auto scattered = std::exchange(scattered_, at::Tensor());
    work.getFuture()->addCallback(
        [pending, op, scattered, rank = rank_, size = size_](c10::ivalue::Future& future) {
          if (future.hasError()) return pending->finish(future.exception_ptr());
          try {
            const at::NoGradGuard no_grad;
            if (scattered.defined())
              wire_view(op.output).flatten().copy_(pieces(scattered, size)[static_cast<std::size_t>(rank)]);
            if (op.op == ReduceOp::kMean) (op.output.defined() ? op.output : op.input).div_(size);
            pending->finish();
          } catch (...) {
            pending->finish(std::current_exception());
          }
        },
        /*uses_future=*/false);
  }

  void wait_on_thread(c10::intrusive_ptr<c10d::Work> work, const PendingPtr& pending, const Collective& op) {
    waiters_.push_back({std::thread([work, pending, op] {
                          try {
                            work->wait();  // bounded: abort() ends it, and the caller's deadline aborts
                            pending->finish();
                          } catch (...) {
                            pending->finish(std::current_exception());
                          }
                        }),
                        work, pending});
  }

  std::mutex mutex_;  // guards everything: collectives and point-to-point come from two threads
  c10::intrusive_ptr<ProcessGroupGloo> group_;
  const int rank_;
  const int size_;
  std::exception_ptr aborted_;
  std::vector<PendingPtr> running_;
  std::vector<Waiter> waiters_;
  at::Tensor scattered_;  // between issue() and finish_with() of a reduce_scatter
};

}  // namespace

std::string gloo_missing() { return ""; }

namespace {

/// One that leaves as soon as it is connected closes its sockets, and gloo tells those that still connect to others
/// that the connection was closed.
void wait_until_all_are_connected(const GlooOptions& options) {
  const auto deadline = base::Deadline::in(options.timeout);
  // At least: a rank whose connection to the store was replaced meanwhile may have asked twice.
  if (options.store->add("connected", 1, deadline) >= options.size)
    return options.store->set("all_connected", "1", deadline);
  if (!options.store->get("all_connected", deadline))
    throw base::CommError(base::Cause::kPeerUnreachable, "connect", options.rank, -1,
                          "gloo has connected this rank in time, and not all others",
                          "LOCKSTEP_INTERFACE names the network interface to use");
}

/// Gloo writes to the sockets of peers that may have gone, and wants EPIPE for it.
void survive_broken_pipes() {
  struct sigaction now{};
  if (::sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL) ::signal(SIGPIPE, SIG_IGN);
}

}  // namespace

std::shared_ptr<Transport> make_gloo_transport(const GlooOptions& options) {
  survive_broken_pipes();
  // Gloo's own clock never decides: our deadlines do, and they know who is missing.
  constexpr auto kNever = std::chrono::hours(24 * 30);
  auto settings = ProcessGroupGloo::Options::create(kNever);
  try {
    settings->devices.push_back(options.interface.empty()
                                    ? ProcessGroupGloo::createDeviceForHostname(options.address)
                                    : ProcessGroupGloo::createDeviceForInterface(options.interface));
  } catch (const std::exception& error) {
    const std::string text = error.what();
    if (options.interface.empty())
      throw base::SystemError(
          "gloo cannot use the address " + options.address + " (" + text.substr(0, text.find('\n')) + ")",
          EADDRNOTAVAIL);
    throw base::UsageError(
        "LOCKSTEP_INTERFACE is " + base::quoted(options.interface, 80) + ": " + text.substr(0, text.find('\n')),
        "allowed is a network interface of this host that has an address; ip addr lists them");
  }
  try {
    settings->timeout = options.timeout;
    settings->threads = options.threads;
    auto group = c10::make_intrusive<ProcessGroupGloo>(make_c10d_store(options.store, options.timeout), options.rank,
                                                       options.size, settings);
    wait_until_all_are_connected(options);
    group->setTimeout(kNever);
    return std::make_shared<GlooTransport>(std::move(group), options.rank, options.size);
  } catch (const base::Error&) {
    throw;
  } catch (const std::exception& error) {
    const std::string text = error.what();
    throw base::CommError(
        base::Cause::kPeerUnreachable, "connect", options.rank, -1,
        "gloo cannot connect the ranks from " + options.address + ": " + text.substr(0, text.find('\n')),
        "LOCKSTEP_INTERFACE names the network interface to use");
  }
}

}  // namespace lockstep::comm

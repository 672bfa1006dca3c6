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

namespace lockstep::comm::gloo {
namespace {

using c10d::ProcessGroupGloo;

c10d::ReduceOp::RedOpType c10d_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::kMin: return c10d::ReduceOp::MIN;
    case ReduceOp::kMax: return c10d::ReduceOp::MAX;
    case ReduceOp::kProduct: return c10d::ReduceOp::PRODUCT;
    case ReduceOp::kMean:  // divided afterwards
    case ReduceOp::kSum: return c10d::ReduceOp::SUM;
  }
  throw base::UsageError("gloo: unknown reduce operator " + std::to_string(static_cast<int>(op)));
}

/// Gloo has no bool: it sends and reduces bool tensors as bytes.
at::Tensor as_bytes_if_bool(const at::Tensor& tensor) {
  return tensor.defined() && tensor.scalar_type() == at::kBool ? tensor.view(at::kByte) : tensor;
}

ReduceOp op_for_bytes(const Collective& op) {
  if (op.input.defined() && op.input.scalar_type() == at::kBool) {
    if (op.op == ReduceOp::kSum) return ReduceOp::kMax;
    if (op.op == ReduceOp::kProduct) return ReduceOp::kMin;
  }
  return op.op;
}

std::vector<at::Tensor> split_equally(const at::Tensor& whole, int count) {
  return whole.defined() ? whole.flatten().chunk(count) : std::vector<at::Tensor>();
}

class GlooTransport final : public Transport {
 public:
  GlooTransport(c10::intrusive_ptr<ProcessGroupGloo> group, int rank, int size)
      : group_(std::move(group)), rank_(rank), size_(size) {}

  ~GlooTransport() override {
    bool is_running = false;
    for (const auto& pending : in_flight_) is_running = is_running || !pending->done();
    // The process group's destructor would wait for operations that no peer will complete.
    if (is_running)
      abort(std::make_exception_ptr(
          base::PeerLostError(base::Cause::kPeerUnreachable, "gloo", rank_, rank_, "the transport was closed")));
    for (auto& waiter : waiters_)
      waiter.thread.join();  // bounded: abort() has ended their operations, or they are done
  }

  std::string_view name() const override { return "gloo"; }
  const Capabilities& capabilities() const override {
    static const Capabilities all = full_cpu_capabilities();
    return all;
  }

  PendingPtr start(const Collective& op) override {
    const std::lock_guard lock(mutex_);
    auto pending = std::make_shared<Pending>();
    if (aborted_) {
      pending->finish(aborted_);
      return pending;
    }
    remove_completed();
    in_flight_.push_back(pending);
    try {
      auto work = issue_serialized(op);
      if (op.kind == CollectiveKind::kSend || op.kind == CollectiveKind::kRecv)
        wait_on_thread(std::move(work), pending, op);
      else
        complete_after(*work, pending, op);
    } catch (...) {
      pending->finish(std::current_exception());
    }
    return pending;
  }

  void abort(std::exception_ptr cause) noexcept override {
    const std::lock_guard lock(mutex_);
    if (aborted_) return;
    aborted_ = cause;
    for (const auto& pending : in_flight_) pending->finish(cause);
    for (const auto& waiter : waiters_) waiter.work->abort();
    // The group's threads may block in Gloo forever, and its destructor would hang while it joins them. The group is
    // leaked; the process ends soon.
    group_.release();
  }

 private:
  /// libtorch 2.11 records every operation in a process-wide FlightRecorder, in a map that is not thread-safe.
  c10::intrusive_ptr<c10d::Work> issue_serialized(const Collective& op) {
    static std::mutex recorder_mutex;
    const std::lock_guard lock(recorder_mutex);
    return start_operation(op);
  }

  /// c10d has no future for point-to-point operations, so a thread blocks until they are done.
  struct Waiter {
    std::thread thread;
    c10::intrusive_ptr<c10d::Work> work;
    PendingPtr pending;
  };

  void remove_completed() {
    std::erase_if(in_flight_, [](const PendingPtr& p) { return p->done(); });
    std::erase_if(waiters_, [](Waiter& w) {
      if (!w.pending->done()) return false;
      w.thread.join();  // bounded: the thread ends after finish()
      return true;
    });
  }

  c10::intrusive_ptr<c10d::Work> all_reduce(const at::Tensor& tensor, const Collective& op) {
    c10d::AllreduceOptions options;
    options.reduceOp = c10d_op(op_for_bytes(op));
    std::vector<at::Tensor> in_place{tensor};
    return group_->allreduce(in_place, options);
  }

  c10::intrusive_ptr<c10d::Work> start_operation(const Collective& op) {
    const at::Tensor in = as_bytes_if_bool(op.input);
    const at::Tensor out = as_bytes_if_bool(op.output);
    std::vector<at::Tensor> input{in};
    std::vector<at::Tensor> output{out};
    const bool at_root = op.root == rank_;
    switch (op.kind) {
      case CollectiveKind::kAllReduce: return all_reduce(in, op);
      case CollectiveKind::kReduce: {
        c10d::ReduceOptions options;
        options.reduceOp = c10d_op(op_for_bytes(op));
        options.rootRank = op.root;
        return group_->reduce(input, options);
      }
      case CollectiveKind::kBroadcast: {
        c10d::BroadcastOptions options;
        options.rootRank = op.root;
        return group_->broadcast(input, options);
      }
      case CollectiveKind::kAllGather: {
        at::Tensor flat_out = out.flatten();
        at::Tensor flat_in = in.flatten();
        return group_->_allgather_base(flat_out, flat_in);
      }
      case CollectiveKind::kReduceScatter: {
        // Gloo reduces the whole tensor in place; a copy leaves the caller's input unchanged.
        reduced_copy_ = in.clone();
        return all_reduce(reduced_copy_, op);
      }
      case CollectiveKind::kGather: {
        c10d::GatherOptions options;
        options.rootRank = op.root;
        std::vector<std::vector<at::Tensor>> outputs;
        if (at_root) outputs.push_back(split_equally(out, size_));
        std::vector<at::Tensor> flat{in.flatten()};
        return group_->gather(outputs, flat, options);
      }
      case CollectiveKind::kScatter: {
        c10d::ScatterOptions options;
        options.rootRank = op.root;
        std::vector<std::vector<at::Tensor>> inputs;
        if (at_root) inputs.push_back(split_equally(in, size_));
        std::vector<at::Tensor> flat{out.flatten()};
        return group_->scatter(flat, inputs, options);
      }
      case CollectiveKind::kAllToAll: {
        std::vector<std::int64_t> equal;
        at::Tensor flat_out = out.flatten();
        at::Tensor flat_in = in.flatten();
        return group_->alltoall_base(flat_out, flat_in, equal, equal);
      }
      case CollectiveKind::kSend: return group_->send(input, op.root, tag(op));
      case CollectiveKind::kRecv: return group_->recv(output, op.root, tag(op));
      case CollectiveKind::kBarrier: return group_->barrier();
    }
    throw base::UsageError("gloo: unknown operation " + std::to_string(static_cast<int>(op.kind)));
  }

  static int tag(const Collective& op) { return static_cast<int>(op.seq & 0x7fffffff); }

  void complete_after(c10d::Work& work, const PendingPtr& pending, const Collective& op) {
    // The callback keeps the tensors alive. It runs on one of Gloo's threads.
    auto reduced_copy = std::exchange(reduced_copy_, at::Tensor());
    work.getFuture()->addCallback(
        [pending, op, reduced_copy, rank = rank_, size = size_](c10::ivalue::Future& future) {
          if (future.hasError()) return pending->finish(future.exception_ptr());
          try {
            const at::NoGradGuard no_grad;
            if (reduced_copy.defined())
              as_bytes_if_bool(op.output).flatten().copy_(
                  split_equally(reduced_copy, size)[static_cast<std::size_t>(rank)]);
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

  std::mutex mutex_;  // guards all members: different threads start collectives, sends and receives
  c10::intrusive_ptr<ProcessGroupGloo> group_;
  const int rank_;
  const int size_;
  std::exception_ptr aborted_;
  std::vector<PendingPtr> in_flight_;
  std::vector<Waiter> waiters_;
  at::Tensor reduced_copy_;  // of a reduce_scatter, between start_operation() and complete_after()
};

}  // namespace

std::string gloo_unavailable_reason() { return ""; }

namespace {

/// Waits until all ranks are connected. A rank that closed its sockets earlier would fail the ranks that still connect:
/// Gloo reports the closed connection to them, even if they connect to other ranks.
void wait_until_all_connected(const GlooOptions& options) {
  const auto deadline = base::Deadline::in(options.timeout);
  // ">=", because a rank whose connection to the store was replaced meanwhile may have added twice.
  if (options.store->add("connected", 1, deadline) >= options.size)
    return options.store->set("all_connected", "1", deadline);
  if (!options.store->get("all_connected", deadline))
    throw base::CommError(base::Cause::kPeerUnreachable, "connect", options.rank, -1,
                          "gloo connected this rank in time, but not all other ranks",
                          "set LOCKSTEP_INTERFACE to the network interface to use");
}

/// Gloo writes to the sockets of peers that may have ended, and expects EPIPE instead of a signal.
void ignore_sigpipe() {
  struct sigaction current{};
  if (::sigaction(SIGPIPE, nullptr, &current) == 0 && current.sa_handler == SIG_DFL) ::signal(SIGPIPE, SIG_IGN);
}

}  // namespace

std::shared_ptr<Transport> make_gloo_transport(const GlooOptions& options) {
  ignore_sigpipe();
  // Gloo's own timeouts must not expire: operations have deadlines, whose errors name the missing ranks.
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
        "set it to a network interface of this host that has an address (ip addr lists them)");
  }
  try {
    settings->timeout = options.timeout;
    settings->threads = options.threads;
    auto group = c10::make_intrusive<ProcessGroupGloo>(make_c10d_store(options.store, options.timeout), options.rank,
                                                       options.size, settings);
    wait_until_all_connected(options);
    group->setTimeout(kNever);
    return std::make_shared<GlooTransport>(std::move(group), options.rank, options.size);
  } catch (const base::Error&) {
    throw;
  } catch (const std::exception& error) {
    const std::string text = error.what();
    throw base::CommError(
        base::Cause::kPeerUnreachable, "connect", options.rank, -1,
        "gloo cannot connect the ranks from " + options.address + ": " + text.substr(0, text.find('\n')),
        "set LOCKSTEP_INTERFACE to the network interface to use");
  }
}

}  // namespace lockstep::comm::gloo

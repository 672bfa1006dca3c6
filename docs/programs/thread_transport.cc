// The program of docs/internals/adding-a-transport.md: a complete transport whose ranks are threads of one process. The
// last rank that starts an operation executes it for all ranks.
#include <ATen/ATen.h>

#include <iostream>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/comm/interface/transport.h"

namespace {

using namespace lockstep::comm;
using lockstep::base::Deadline;

// docs: begin capabilities
const Capabilities kCapabilities{
    .kinds = {CollectiveKind::kAllReduce, CollectiveKind::kBroadcast, CollectiveKind::kAllGather,
              CollectiveKind::kBarrier},
    .dtypes = {at::kFloat, at::kByte},
    .devices = {at::kCPU},
};
// docs: end capabilities

// docs: begin rendezvous
/// The state that the ranks share: the operations that not all of them have started.
struct Rendezvous {
  struct Participant {
    const Collective op;
    PendingPtr pending;
  };
  explicit Rendezvous(int num_ranks) : size(num_ranks) {}

  const int size;
  std::mutex mutex;                                         // guards the members below
  std::map<std::uint64_t, std::map<int, Participant>> ops;  // by seq, then by rank
  std::exception_ptr aborted;
};
// docs: end rendezvous

// docs: begin operations
/// Executes an operation that all ranks have started. Adds in the order of the ranks, so the result has the same bits
/// in every run.
void execute(const std::map<int, Rendezvous::Participant>& ranks) {
  const Collective& first = ranks.at(0).op;
  at::Tensor result;
  switch (first.kind) {
    case CollectiveKind::kAllReduce:
      result = first.input.clone();
      for (const auto& [rank, entry] : ranks)
        if (rank > 0) result.add_(entry.op.input);
      break;
    case CollectiveKind::kBroadcast: result = ranks.at(first.root).op.input.clone(); break;
    case CollectiveKind::kAllGather: {
      std::vector<at::Tensor> parts;
      for (const auto& [rank, entry] : ranks) parts.push_back(entry.op.input.flatten());
      result = at::cat(parts);
      break;
    }
    default: return;  // a barrier moves no data
  }
  for (const auto& [rank, entry] : ranks) entry.op.output.copy_(result.view_as(entry.op.output));
}
// docs: end operations

// docs: begin transport
class ThreadTransport final : public Transport {
 public:
  ThreadTransport(std::shared_ptr<Rendezvous> rendezvous, int rank) : rendezvous_(std::move(rendezvous)), rank_(rank) {}

  std::string_view name() const override { return "thread"; }
  const Capabilities& capabilities() const override { return kCapabilities; }

  PendingPtr start(const Collective& op) override {
    const auto pending = std::make_shared<Pending>();
    const std::lock_guard lock(rendezvous_->mutex);
    if (rendezvous_->aborted) {
      pending->finish(rendezvous_->aborted);
      return pending;
    }
    auto& ranks = rendezvous_->ops[op.seq];
    ranks.emplace(rank_, Rendezvous::Participant{op, pending});
    if (static_cast<int>(ranks.size()) < rendezvous_->size) return pending;
    std::exception_ptr error;
    try {
      execute(ranks);
    } catch (...) {
      error = std::current_exception();  // becomes the Pending's error; start() does not throw it
    }
    for (const auto& [rank, entry] : ranks) entry.pending->finish(error);
    rendezvous_->ops.erase(op.seq);
    return pending;
  }

  void abort(std::exception_ptr cause) noexcept override {
    const std::lock_guard lock(rendezvous_->mutex);
    if (rendezvous_->aborted) return;
    rendezvous_->aborted = cause;
    for (const auto& [seq, ranks] : rendezvous_->ops)
      for (const auto& [rank, entry] : ranks) entry.pending->finish(cause);
  }

 private:
  const std::shared_ptr<Rendezvous> rendezvous_;
  const int rank_;
};
// docs: end transport

void require(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(what);
}

// docs: begin check
void check_rank(int rank, const std::shared_ptr<Rendezvous>& rendezvous) {
  ThreadTransport transport(rendezvous, rank);
  const auto run = [&](CollectiveKind kind, std::uint64_t seq, const at::Tensor& input, const at::Tensor& output) {
    const Deadline deadline = Deadline::in(std::chrono::seconds(20));
    const PendingPtr pending =
        transport.start({.kind = kind, .input = input, .output = output, .root = 1, .seq = seq, .deadline = deadline});
    require(pending->wait_until(deadline), "the operation ends");
    if (pending->error()) std::rethrow_exception(pending->error());
  };
  const at::Tensor number = at::full({2}, rank + 1.0, at::kFloat);
  run(CollectiveKind::kAllReduce, 1, number, number);
  require(number.eq(6).all().item<bool>(), "1 + 2 + 3 is 6");
  const at::Tensor own = at::full({1}, rank, at::kByte), all = at::empty({3}, at::kByte);
  run(CollectiveKind::kAllGather, 2, own, all);
  require(all.equal(at::arange(3, at::kByte)), "the parts are in the order of the ranks");
  run(CollectiveKind::kBroadcast, 3, own, own);
  require(own.item<int>() == 1, "rank 1's value");
  run(CollectiveKind::kBarrier, 4, {}, {});
}
// docs: end check

void check_abort() {
  const auto rendezvous = std::make_shared<Rendezvous>(2);
  ThreadTransport transport(rendezvous, 0);
  const PendingPtr pending = transport.start({.kind = CollectiveKind::kBarrier, .seq = 1});
  require(!pending->done(), "rank 1 has not started the barrier");
  transport.abort(std::make_exception_ptr(lockstep::base::UsageError("aborted by the test")));
  transport.abort(nullptr);
  require(pending->done() && pending->error(), "abort() ends pending operations");
  require(transport.start({.kind = CollectiveKind::kBarrier, .seq = 2})->error() == pending->error(),
          "abort() ends later operations");
}

}  // namespace

int main() try {
  const auto rendezvous = std::make_shared<Rendezvous>(3);
  std::vector<std::thread> ranks;
  std::atomic<int> num_passed = 0;
  for (int rank = 0; rank < 3; ++rank)
    ranks.emplace_back([rank, rendezvous, &num_passed] {
      try {
        check_rank(rank, rendezvous);
        ++num_passed;
      } catch (const std::exception& error) {
        std::cerr << "rank " << rank << ": " << error.what() << std::endl;
      }
    });
  for (std::thread& rank : ranks) rank.join();  // bounded: each of its waits has a deadline
  check_abort();
  if (num_passed == 3) std::cout << "3 ranks done" << std::endl;
  return num_passed == 3 ? 0 : 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}

#include "lockstep/comm/hierarchy/hierarchy.h"

#include <atomic>
#include <mutex>

#include "lockstep/base/error.h"
#include "lockstep/comm/hierarchy/cross_host_group.h"
#include "lockstep/comm/shm/progress_engine.h"
#include "lockstep/comm/hierarchy/host_plan.h"
#include "lockstep/comm/hierarchy/large_collective.h"
#include "lockstep/comm/hierarchy/small_collective.h"
#include "lockstep/comm/shm/control_block.h"

namespace lockstep::comm {
namespace {

using base::Deadline;

class HierarchyTransport final : public Transport {
 public:
  explicit HierarchyTransport(const HierarchyOptions& options)
      : store_(options.store),
        rank_(options.rank),
        plan_(plan_hosts(options.hosts)),
        place_(plan_.places[static_cast<std::size_t>(rank_)]) {
    const auto world = [&](std::vector<int> members) {
      for (int& member : members) member = options.members[static_cast<std::size_t>(member)];
      return members;
    };
    const auto meet = [&](const std::string& name) {
      job::PrefixStore store(name, store_);
      const auto& here = plan_.hosts[static_cast<std::size_t>(place_.host)];
      return Boards::meet(options.neighbours, store, world(here), place_.local, Deadline::in(options.timeout));
    };
    short_.boards = meet("short");
    for (std::size_t i = 0; i < kTracks; ++i) long_[i].boards = meet("long" + std::to_string(i));
    // Nobody waits for a neighbour any more: where the first connection is MPI's, all ranks must come to it.
    if (place_.local == 0) leaders_ = options.make_outer(Leg::kSmall, "leaders", world(plan_.column(0)));
    for (std::size_t i = 0; i < kTracks && place_.local < plan_.num_columns; ++i) {
      Track& track = long_[i];
      const std::string name = "column" + std::to_string(place_.local) + "." + std::to_string(i);
      track.outer = options.make_outer(Leg::kLarge, name, world(plan_.column(place_.local)));
      track.column = std::make_unique<Column>(track.outer, place_.host, static_cast<int>(plan_.hosts.size()), aborted_);
    }
    flat_ = options.make_outer(Leg::kFlat, "flat", options.members);
  }
  /// What is under this one is not aborted, which would leave threads of it behind: it aborts what is still under way
  /// by itself.
  ~HierarchyTransport() override {
    aborted_ = true;
    end_drivers(std::make_exception_ptr(
        base::PeerLost(base::Cause::kPeerUnreachable, "hierarchy", rank_, rank_, "the transport was closed")));
  }

  std::string_view name() const override { return "hierarchy"; }
  const Capabilities& capabilities() const override {
    static const Capabilities all = everything_on_cpu({at::kFloat, at::kBFloat16, at::kHalf});
    return all;
  }

  PendingPtr start(const Collective& op) override {
    switch (op.kind) {
      case Kind::kAllReduce:
      case Kind::kReduce:
      case Kind::kReduceScatter:
      case Kind::kBroadcast:
      case Kind::kBarrier: return ShortOperation::takes(op) ? start_short(op) : start_long(op);
      case Kind::kAllGather: return ShortOperation::takes(op) ? start_short(op) : flat_->start(op);
      default: return flat_->start(op);
    }
  }

  void abort(std::exception_ptr cause) noexcept override {
    const std::lock_guard lock(abort_mutex_);
    if (aborted_.exchange(true)) return;
    end_drivers(cause);
    for (Track& track : long_)
      if (track.outer) track.outer->abort(cause);
    if (leaders_) leaders_->abort(cause);
    if (flat_) flat_->abort(cause);
  }

 private:
  /// Operations that go one after another.
  struct Track {
    std::unique_ptr<Boards> boards;
    std::uint32_t number = 0;          // of operations that have been started, the same on all ranks of a host
    std::shared_ptr<Transport> outer;  // of this rank's column, when it is in one; of long operations only
    std::unique_ptr<Column> column;    // likewise
    Driver driver;                     // last: its thread ends before what it uses
  };
  // Long operations take turns: while the last pieces of one travel, the first of the next do too, and the wire is not
  // idle in between.
  static constexpr std::size_t kTracks = 2;

  void end_drivers(const std::exception_ptr& cause) noexcept {
    short_.driver.end(cause);
    for (Track& track : long_) track.driver.end(cause);
  }

  PendingPtr start_short(const Collective& op) {
    auto operation =
        std::make_shared<ShortOperation>(op, *short_.boards, ++short_.number, plan_, rank_, leaders_.get(), results_);
    return short_.driver.add([operation](Deadline deadline) { return operation->advance(deadline); },
                             /*is_long=*/false);
  }
  PendingPtr start_long(const Collective& op) {
    Track& track = long_[num_long_++ % kTracks];
    auto operation =
        std::make_shared<LongOperation>(op, *track.boards, ++track.number, plan_, rank_, track.column.get());
    return track.driver.add([operation](Deadline deadline) { return operation->advance(deadline); }, /*is_long=*/true);
  }

  const std::shared_ptr<job::Store> store_;
  const int rank_;
  const HostPlan plan_;
  const HostPlan::Place place_;
  std::shared_ptr<Transport> leaders_;  // of the first ranks of the hosts, when it is one
  std::shared_ptr<Transport> flat_;
  std::atomic<bool> aborted_{false};
  Results results_;
  std::size_t num_long_ = 0;  // operations, the same on all ranks
  std::mutex abort_mutex_;    // held by abort()
  // Last: their threads end before what they use.
  Track short_;
  Track long_[kTracks];
};

}  // namespace

std::shared_ptr<Transport> make_hierarchy_transport(const HierarchyOptions& options) {
  return std::make_shared<HierarchyTransport>(options);
}

}  // namespace lockstep::comm

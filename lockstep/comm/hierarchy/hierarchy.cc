#include "lockstep/comm/hierarchy/hierarchy.h"

#include <atomic>
#include <mutex>

#include "lockstep/base/error.h"
#include "lockstep/comm/hierarchy/column.h"
#include "lockstep/comm/hierarchy/driver.h"
#include "lockstep/comm/hierarchy/host_plan.h"
#include "lockstep/comm/hierarchy/long_operation.h"
#include "lockstep/comm/hierarchy/short_operation.h"
#include "lockstep/comm/shm/board.h"

namespace lockstep::comm {
namespace {

using base::Deadline;

class HierarchyTransport final : public Transport {
 public:
  explicit HierarchyTransport(const HierarchyOptions& options)
      : store_(options.store), rank_(options.rank), plan_(plan_hosts(options.hosts)),
        place_(plan_.places[static_cast<std::size_t>(rank_)]) {
    const auto world = [&](std::vector<int> members) {
      for (int& member : members) member = options.members[static_cast<std::size_t>(member)];
      return members;
    };
    const auto& here = plan_.hosts[static_cast<std::size_t>(place_.host)];
    boards_ = Boards::meet(options.neighbours, *store_, world(here), place_.local, Deadline::in(options.timeout));
    if (place_.local < plan_.num_columns)
      outer_ = options.make_outer(Leg::kLarge, "column" + std::to_string(place_.local), world(plan_.column(place_.local)));
    if (place_.local == 0) leaders_ = options.make_outer(Leg::kSmall, "leaders", world(plan_.column(0)));
    if (place_.local == 0 && !leaders_) leaders_ = outer_;
    flat_ = options.make_outer(Leg::kFlat, "flat", options.members);
    if (outer_) column_ = std::make_unique<Column>(outer_, place_.host, static_cast<int>(plan_.hosts.size()), aborted_);
  }
  ~HierarchyTransport() override {
    abort(std::make_exception_ptr(base::PeerLost(base::Cause::kPeerUnreachable, "hierarchy", rank_, rank_, "the transport was closed")));
  }

  std::string_view name() const override { return "hierarchy"; }
  const Capabilities& capabilities() const override {
    static const Capabilities all = [] {
      Capabilities can = everything_on_cpu();
      can.wires = {at::kFloat, at::kBFloat16, at::kHalf};
      return can;
    }();
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
    driver_.end(cause);
    for (const auto& transport : {outer_, leaders_, flat_})
      if (transport) transport->abort(cause);
  }

 private:
  PendingPtr start_short(const Collective& op) {
    auto operation = std::make_shared<ShortOperation>(op, *boards_, ++number_, plan_, rank_, leaders_.get(), results_);
    return driver_.add([operation](Deadline deadline) { return operation->advance(deadline); }, /*is_long=*/false);
  }
  PendingPtr start_long(const Collective& op) {
    auto operation = std::make_shared<LongOperation>(op, *boards_, ++number_, plan_, rank_, column_.get());
    return driver_.add([operation](Deadline deadline) { return operation->advance(deadline); }, /*is_long=*/true);
  }

  const std::shared_ptr<job::Store> store_;
  const int rank_;
  const HostPlan plan_;
  const HostPlan::Place place_;
  std::unique_ptr<Boards> boards_;
  std::shared_ptr<Transport> outer_;    // of this rank's column, when it is in one
  std::shared_ptr<Transport> leaders_;  // of the first ranks of the hosts, when it is one
  std::shared_ptr<Transport> flat_;
  std::atomic<bool> aborted_{false};
  std::unique_ptr<Column> column_;
  Results results_;
  std::uint32_t number_ = 0;  // of operations that go through the boards, the same on all ranks of a host
  std::mutex abort_mutex_;  // held by abort()
  Driver driver_;  // last: its thread ends before what it uses
};

}  // namespace

std::shared_ptr<Transport> make_hierarchy_transport(const HierarchyOptions& options) {
  return std::make_shared<HierarchyTransport>(options);
}

}  // namespace lockstep::comm

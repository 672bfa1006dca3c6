#include "lockstep/comm/group_access.h"

#include <algorithm>
#include <mutex>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/process_owned.h"
#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/base/timeouts.h"
#include "lockstep/comm/group_impl.h"
#include "lockstep/comm/interface/gradient_reducer.h"
#include "lockstep/comm/reducers/bucket_plan.h"
#include "lockstep/comm/reducers/bucketed_reducer.h"
#include "lockstep/comm/reducers/decorators.h"
#include "lockstep/comm/reducers/in_place_gradient_reducer.h"
#include "lockstep/comm/stop_signal.h"

namespace lockstep::comm {
namespace {

/// The reducer of a group of one rank, as on a host with one rank whose hosts are averaged, where every gradient is its
/// own mean. Copies nothing: the sink receives the gradient that was passed to ready().
class SingleRankReducer final : public GradientReducer {
 public:
  explicit SingleRankReducer(std::size_t num_gradients) : gradients_(num_gradients) {}
  void begin(const StepIdentity& step, std::vector<Collective>, ChunkSink*) override {
    gradients_.assign(gradients_.size(), {});
    joined_ = step.joined;
    stop_requested_ = step.stop_requested;
  }
  at::Tensor ready(std::size_t index, const at::Tensor& gradient, bool fresh) override {
    gradients_[index] = {gradient, fresh, true};
    return {};
  }
  bool is_ready(std::size_t index) const override { return gradients_[index].ready; }
  Participation finish(GradientSink& sink) override {
    if (joined_) return {};
    for (std::size_t i = 0; i < gradients_.size(); ++i)
      if (gradients_[i].fresh) sink.consume(i, gradients_[i].tensor);
    gradients_.assign(gradients_.size(), {});
    ++stats_.reductions;
    return {.active = 1, .stop_requested = stop_requested_};
  }
  bool has_begun_on_all_ranks() const override { return true; }
  void abandon(const std::string&) noexcept override { gradients_.assign(gradients_.size(), {}); }
  ReducerStats stats() const override { return stats_; }

 private:
  struct Gradient {
    at::Tensor tensor;
    bool fresh = false;
    bool ready = false;
  };
  std::vector<Gradient> gradients_;
  bool joined_ = false;
  bool stop_requested_ = false;
  ReducerStats stats_;
};

/// Adds each of the four parts without a carry into the next one.
std::uint16_t add_parts(std::uint16_t a, std::uint16_t b) {
  std::uint16_t sum = 0;
  for (int shift = 0; shift < 16; shift += 4)
    sum = static_cast<std::uint16_t>(sum | (((a >> shift) + (b >> shift)) & 0xf) << shift);
  return sum;
}

}  // namespace

void GroupAccess::set_steps(const Group& group, std::int64_t steps) {
  const std::int64_t before = group.impl_->steps.exchange(steps, std::memory_order_relaxed);
  base::telemetry::RankPage::this_process().steps.fetch_add(steps - before, std::memory_order_relaxed);
}

std::shared_ptr<const void> GroupAccess::on_step(const Group& group, std::function<void()> observer) {
  auto owned = std::make_shared<const std::function<void()>>(std::move(observer));
  const std::lock_guard lock(group.impl_->steps_mutex);
  std::erase_if(group.impl_->step_observers, [](const auto& weak) { return weak.expired(); });
  group.impl_->step_observers.emplace_back(owned);
  return owned;
}

void GroupAccess::set_stop_agreed(const Group& group) { group.impl_->world->stop_agreed = true; }

void GroupAccess::count_batch(const Group& group, std::uint32_t sample_order_hash, std::uint16_t sample_order_parts) {
  std::uint16_t parts = group.impl_->sample_order_parts.load(std::memory_order_relaxed);
  while (!group.impl_->sample_order_parts.compare_exchange_weak(parts, add_parts(parts, sample_order_parts),
                                                                std::memory_order_relaxed)) {
  }
  group.impl_->sample_order_hash.fetch_add(sample_order_hash, std::memory_order_relaxed);
  group.impl_->batches.fetch_add(1, std::memory_order_relaxed);
  base::telemetry::RankPage::this_process().batches.fetch_add(1, std::memory_order_relaxed);
}

StepIdentity GroupAccess::step_identity(const Group& group) {
  const Group::Impl& impl = *group.impl_;
  return {.steps = impl.steps.load(std::memory_order_relaxed),
          .batches = impl.batches.load(std::memory_order_relaxed),
          .sample_order_hash = impl.sample_order_hash.load(std::memory_order_relaxed),
          .sample_order_parts = impl.sample_order_parts.load(std::memory_order_relaxed),
          .stop_requested = has_stop_signal()};
}

Group GroupAccess::make_group(const Group& group, std::string name, std::vector<int> world_ranks) {
  const std::shared_ptr<World>& world = group.impl_->world;
  const auto own = std::find(world_ranks.begin(), world_ranks.end(), world->identity.rank);
  if (own == world_ranks.end())
    throw base::UsageError("group " + name + ": rank " + std::to_string(world->identity.rank) +
                           " is not one of its ranks");
  for (const int rank : world_ranks)
    if (rank < 0 || rank >= world->identity.world_size)
      throw base::UsageError("group " + name + ": rank " + std::to_string(rank) + "; expected 0 to " +
                             std::to_string(world->identity.world_size - 1));
  const int rank = static_cast<int>(own - world_ranks.begin());
  return Group(base::make_process_owned<Group::Impl>(world, std::move(name), std::move(world_ranks), rank));
}

JobStart GroupAccess::job_start(const Group& group) {
  const job::identity::Identity& identity = group.impl_->world->identity;
  return {identity.job, identity.generation};
}

std::shared_ptr<job::Store> GroupAccess::store(const Group& group) {
  return std::make_shared<job::PrefixStore>("of group/" + group.name(), group.impl_->world->store);
}

std::string GroupAccess::new_value_key(const Group& group) {
  return "values/" + group.impl_->name + "/" + std::to_string(group.impl_->num_value_keys++);
}

std::vector<std::string> GroupAccess::leave_value(const Group& group, const std::string& key, std::string_view value) {
  const Group::Impl& impl = *group.impl_;
  job::PrefixStore store(key, impl.world->store);
  const auto deadline = base::Deadline::in(base::kStoreAnswerTimeout);
  store.set(std::to_string(impl.rank), value, deadline);
  if (store.add("count", 1, deadline) < group.size()) return {};
  std::vector<std::string> values;
  for (int rank = 0; rank < group.size(); ++rank)
    values.push_back(store.find(std::to_string(rank), deadline).value_or(""));
  return values;
}

void GroupAccess::fail(const Group& group, const base::CommError& error) { group.impl_->fail(error); }

Work GroupAccess::watch(const Group& group, WatchedCall call, PendingPtr done) {
  return group.impl_->watch(std::move(call), std::move(done));
}

void GroupAccess::abandon(const Group& group, const std::string& why) noexcept { group.impl_->abandon(why); }

std::unique_ptr<GradientReducer> Group::Impl::make_reducer(std::string reducer_name, std::vector<GradientSpec> specs,
                                                           reducers::ReducerOptions options) {
  if (members.size() == 1 && !world->is_alone_on_nccl()) return std::make_unique<SingleRankReducer>(specs.size());
  const std::string id = name + ".ddp" + std::to_string(num_reducers_++);
  const auto transport = world->make_transport(id, members, split_parent(0));
  comm::check_wire_dtype(*transport, "make_gradient_reducer", options.wire_dtype);
  std::vector<at::Tensor> examples;
  for (const GradientSpec& spec : specs) examples.push_back(spec.example);
  // A hook requires buckets.
  auto table = options.hook ? nullptr : transport->make_gradient_table(examples);
  if (options.hook && rank == 0)
    base::log_info("gradients of " + reducer_name + " are packed into buckets for the hook " + options.hook->name());
  auto channel = std::make_unique<channel::Channel>(id, members, rank, transport, world->deadlock_detector);
  if (table)
    return std::make_unique<reducers::InPlaceGradientReducer>(std::move(reducer_name), std::move(specs),
                                                              std::move(channel), std::move(table));
  if (options.bucket_bytes.empty())
    options.bucket_bytes = reducers::measure_bucket_bytes(*channel, examples.front().device());
  return std::make_unique<reducers::BucketedReducer>(std::move(reducer_name), std::move(specs), std::move(channel),
                                                     std::move(options));
}

std::unique_ptr<GradientReducer> GroupAccess::make_gradient_reducer(const Group& group, std::string name,
                                                                    std::vector<GradientSpec> specs,
                                                                    reducers::ReducerOptions options) {
  std::vector<std::string> names;
  for (const GradientSpec& spec : specs) names.push_back(spec.name);
  const bool check_finite = options.check_finite;
  auto reducer = group.impl_->make_reducer(std::move(name), std::move(specs), std::move(options));
  const World& world = *group.impl_->world;
  const int rank = world.identity.rank;
  if (check_finite)
    reducer = reducers::with_finite_check(std::move(reducer), std::move(names), rank,
                                          [group](const base::CommError& error) { fail(group, error); });
  const job::Injection& injection = world.injection;
  const bool here = injection.fault != job::Fault::kNone && injection.rank == rank;
  return here ? reducers::with_fault_injection(std::move(reducer), injection) : std::move(reducer);
}

}  // namespace lockstep::comm

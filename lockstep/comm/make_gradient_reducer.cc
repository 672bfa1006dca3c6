// GroupAccess::make_gradient_reducer(): chooses the reducer of a list of gradients and its decorators.
#include "lockstep/base/log.h"
#include "lockstep/comm/group_access.h"
#include "lockstep/comm/group_impl.h"
#include "lockstep/comm/interface/gradient_reducer.h"
#include "lockstep/comm/reducers/bucket_plan.h"
#include "lockstep/comm/reducers/bucketed_reducer.h"
#include "lockstep/comm/reducers/fault_injection.h"
#include "lockstep/comm/reducers/in_place_gradient_reducer.h"

namespace lockstep::comm {
namespace {

/// The reducer of a world of one rank, where every gradient is its own mean. Copies nothing: the sink receives the
/// gradient that was passed to ready().
class SingleRankReducer final : public GradientReducer {
 public:
  explicit SingleRankReducer(std::vector<GradientSpec> specs) : specs_(std::move(specs)), gradients_(specs_.size()) {}
  void begin(const StepIdentity& step, std::vector<Collective>, ChunkSink*) override {
    gradients_.assign(specs_.size(), {});
    joined_ = step.joined;
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
    gradients_.assign(specs_.size(), {});
    ++stats_.reductions;
    return {.active = 1};
  }
  bool has_begun_on_all_ranks() const override { return true; }
  void abandon(const std::string&) noexcept override { gradients_.assign(specs_.size(), {}); }
  ReducerStats stats() const override { return stats_; }

 private:
  struct Gradient {
    at::Tensor tensor;
    bool fresh = false;
    bool ready = false;
  };
  std::vector<GradientSpec> specs_;
  std::vector<Gradient> gradients_;
  bool joined_ = false;
  ReducerStats stats_;
};

}  // namespace

std::unique_ptr<GradientReducer> Group::Impl::make_reducer(std::string reducer_name, std::vector<GradientSpec> specs,
                                                           reducers::ReducerOptions options) {
  if (members.size() == 1 && !world->is_alone_on_nccl()) return std::make_unique<SingleRankReducer>(std::move(specs));
  const std::string id = name + ".ddp" + std::to_string(num_reducers_++);
  const auto transport = world->make_transport(id, members, split_parent(0));
  comm::check_wire_dtype(*transport, "make_gradient_reducer", options.wire_dtype);
  std::vector<at::Tensor> examples;
  for (const GradientSpec& spec : specs) examples.push_back(spec.example);
  // A hook requires buckets.
  auto reducer = options.hook ? nullptr : transport->make_in_place_reducer(examples);
  if (options.hook && rank == 0)
    base::log_info("gradients of " + reducer_name + " are packed into buckets for the hook " + options.hook->name());
  auto channel = std::make_unique<channel::Channel>(id, members, rank, transport, world->deadlock_detector);
  if (reducer)
    return std::make_unique<reducers::InPlaceGradientReducer>(std::move(reducer_name), std::move(specs),
                                                              std::move(channel), std::move(reducer));
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

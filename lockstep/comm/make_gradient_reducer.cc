// The one place where it is decided how gradients travel.
#include "lockstep/base/log.h"
#include "lockstep/comm/group.h"
#include "lockstep/comm/group_impl.h"
#include "lockstep/comm/reducers/bucket_size.h"
#include "lockstep/comm/reducers/bucketed_reducer.h"
#include "lockstep/comm/reducers/fault_injection.h"
#include "lockstep/comm/reducers/finite_check.h"
#include "lockstep/comm/reducers/in_place_gradient_reducer.h"
#include "lockstep/comm/reducers/single_rank_reducer.h"

namespace lockstep::comm {

std::unique_ptr<GradientReducer> Group::make_gradient_reducer(std::string name, std::vector<Part> parts,
                                                              ReducerOptions options) {
  std::vector<std::string> names;
  for (const Part& spec : parts) names.push_back(spec.name);
  const bool check_finite = options.check_finite;
  auto exchange = make_undecorated_reducer(std::move(name), std::move(parts), std::move(options));
  const int rank = impl_->world->identity.rank;
  if (check_finite)
    exchange = with_finite_check(std::move(exchange), std::move(names), rank,
                                 [group = *this](const base::CommError& error) mutable { group.fail(error); });
  const job::Injection& injection = impl_->world->injection;
  const bool here = injection.fault != job::Fault::kNone && injection.rank == rank;
  return here ? with_fault_injection(std::move(exchange), injection) : std::move(exchange);
}

std::unique_ptr<GradientReducer> Group::make_undecorated_reducer(std::string name, std::vector<Part> parts,
                                                                 ReducerOptions options) {
  if (size() == 1) return std::make_unique<SingleRankReducer>(std::move(parts));
  const World& world = *impl_->world;
  const std::string id = impl_->name + ".ddp" + std::to_string(impl_->num_reducers++);
  const auto transport = world.make_transport(id, impl_->members, impl_->split_parent(0));
  check_wire_dtype(*transport, "make_exchange", options.wire);
  std::vector<at::Tensor> likes;
  for (const Part& spec : parts) likes.push_back(spec.like);
  // A hook wants buckets.
  auto reducer = options.hook ? nullptr : transport->make_in_place_reducer(likes);
  if (options.hook && rank() == 0)
    base::log_info("gradients of " + name + " are packed into buckets for the hook " + options.hook->name());
  auto channel = std::make_unique<Channel>(id, impl_->members, impl_->rank, transport, world.deadlock_detector);
  if (reducer)
    return std::make_unique<InPlaceGradientReducer>(std::move(name), std::move(parts), std::move(channel),
                                                    std::move(reducer));
  if (options.bucket_bytes.empty()) options.bucket_bytes = measure_bucket_bytes(*channel, likes.front().device());
  return std::make_unique<BucketedReducer>(std::move(name), std::move(parts), std::move(channel), std::move(options));
}

}  // namespace lockstep::comm

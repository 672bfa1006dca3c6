// The one place where it is decided how gradients travel.
#include "lockstep/base/log.h"
#include "lockstep/comm/reducers/bucket_size.h"
#include "lockstep/comm/reducers/in_place_gradient_reducer.h"
#include "lockstep/comm/reducers/finite_check.h"
#include "lockstep/comm/group.h"
#include "lockstep/comm/group_impl.h"
#include "lockstep/comm/reducers/fault_injection.h"
#include "lockstep/comm/reducers/single_rank_reducer.h"
#include "lockstep/comm/reducers/bucketed_reducer.h"

namespace lockstep::comm {

std::unique_ptr<Exchange> Group::make_exchange(std::string name, std::vector<Part> parts, ExchangeOptions options) {
  std::vector<std::string> names;
  for (const Part& part : parts) names.push_back(part.name);
  const bool check_finite = options.check_finite;
  auto exchange = make_plain_exchange(std::move(name), std::move(parts), std::move(options));
  const int rank = impl_->world->identity.rank;
  if (check_finite)
    exchange = with_finite_check(std::move(exchange), std::move(names), rank,
                                 [group = *this](const base::CommError& error) mutable { group.fail(error); });
  const job::Injection& injection = impl_->world->injection;
  const bool here = injection.fault != job::Fault::kNone && injection.rank == rank;
  return here ? with_injection(std::move(exchange), injection) : std::move(exchange);
}

std::unique_ptr<Exchange> Group::make_plain_exchange(std::string name, std::vector<Part> parts,
                                                     ExchangeOptions options) {
  if (size() == 1) return std::make_unique<LocalExchange>(std::move(parts));
  const World& world = *impl_->world;
  const std::string id = impl_->name + ".ddp" + std::to_string(impl_->num_exchanges++);
  const auto transport = world.make_transport(id, impl_->members, impl_->descent(0));
  check_wire(*transport, "make_exchange", options.wire);
  std::vector<at::Tensor> likes;
  for (const Part& part : parts) likes.push_back(part.like);
  // A hook wants buckets.
  auto reducer = options.hook ? nullptr : transport->make_in_place_reducer(likes);
  if (options.hook && rank() == 0)
    base::log_info("gradients of " + name + " are packed into buckets for the hook " + options.hook->name());
  auto channel = std::make_unique<Channel>(id, impl_->members, impl_->rank, transport, world.watch);
  if (reducer)
    return std::make_unique<DirectExchange>(std::move(name), std::move(parts), std::move(channel), std::move(reducer));
  if (options.bucket_bytes.empty()) options.bucket_bytes = measure_bucket_bytes(*channel, likes.front().device());
  return std::make_unique<PackingExchange>(std::move(name), std::move(parts), std::move(channel), std::move(options));
}

}  // namespace lockstep::comm

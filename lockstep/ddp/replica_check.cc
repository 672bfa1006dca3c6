#include "lockstep/ddp/replica_check.h"

#include <ATen/ops/zeros.h>

#include <cstring>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/comm/group_access.h"

namespace lockstep::ddp {
namespace {

/// Number of reductions after construction in which the replicas' parameters are compared: an optimizer that was
/// constructed before its parameters were equal makes them diverge within its first updates. Hashing costs 0.1 ms per
/// megabyte.
constexpr std::int64_t kInitialComparedReductions = 8;

}  // namespace

ReplicaCheck::ReplicaCheck(NamedTensors parameters, comm::Group group, int every)
    : parameters_(std::move(parameters)),
      group_(std::move(group)),
      every_(every),
      store_key_(comm::GroupAccess::new_value_key(group_)) {
  const auto count = static_cast<std::int64_t>(parameters_.size());
  hashes_ = at::zeros({count}, at::kLong);
  all_hashes_ = at::zeros({count * group_.size()}, at::kLong);
}

void ReplicaCheck::hash() {
  const auto hashes = hash_tensors(parameters_);
  std::copy(hashes.begin(), hashes.end(), hashes_.mutable_data_ptr<std::int64_t>());
}

bool ReplicaCheck::is_due(std::int64_t number) const {
  return every_ > 0 && number > 0 && (number <= kInitialComparedReductions || number % every_ == 0);
}

void ReplicaCheck::on_step_end(std::int64_t next) {
  if (next == step_end_) return;  // of several steps between two reductions, the first one is that of all ranks
  const std::int64_t reductions_per_step = next - std::exchange(step_end_, next);
  for (std::int64_t number = next; number < next + reductions_per_step; ++number)
    if (is_due(number)) return hash();
}

std::optional<comm::Collective> ReplicaCheck::hashes_if_due(std::int64_t number) {
  if (!is_due(number)) return std::nullopt;
  if (step_end_ == 0) hash();
  return comm::Collective{
      .kind = comm::CollectiveKind::kAllGather, .name = "hashes", .input = hashes_, .output = all_hashes_};
}

std::string ReplicaCheck::describe_difference(const std::vector<std::int64_t>& hashes, int& outlier_rank) const {
  std::vector<int> ranks;
  for (int rank = 0; rank < group_.size(); ++rank) ranks.push_back(group_.global_rank(rank));
  return describe_divergence(parameters_, hashes, ranks, outlier_rank);
}

void ReplicaCheck::check_exchanged() const {
  const auto* first = all_hashes_.const_data_ptr<std::int64_t>();
  int outlier_rank = -1;
  const std::string text = describe_difference({first, first + all_hashes_.numel()}, outlier_rank);
  if (!text.empty())
    comm::GroupAccess::fail(
        group_,
        {base::Cause::kReplicaDiverged, "DistributedDataParallel", group_.global_rank(group_.rank()), outlier_rank,
         text,
         "use the same optimizer, learning rates and number of steps on all ranks; never write a parameter on one rank "
         "only; call lockstep::broadcast_optimizer_state() for an optimizer that was made before "
         "DistributedDataParallel and derives state from the parameters. If parameters differ on purpose during "
         "backward(), end each step with Group::step(), or set DdpOptions.compare_replicas_every to 0"});
}

void ReplicaCheck::compare_now() {
  hash();
  group_.all_gather(all_hashes_, hashes_, {.name = "hashes"});
  check_exchanged();
}

void ReplicaCheck::compare_at_end() noexcept {
  try {
    hash();
    const std::size_t bytes = hashes_.nbytes();
    const auto values =
        comm::GroupAccess::leave_value(group_, store_key_, {static_cast<const char*>(hashes_.const_data_ptr()), bytes});
    std::vector<std::int64_t> all(static_cast<std::size_t>(hashes_.numel()) * values.size());
    for (std::size_t rank = 0; rank < values.size(); ++rank) {
      if (values[rank].size() != bytes) return;
      std::memcpy(all.data() + rank * static_cast<std::size_t>(hashes_.numel()), values[rank].data(), bytes);
    }
    int outlier_rank = -1;
    const std::string text = values.empty() ? "" : describe_difference(all, outlier_rank);
    if (!text.empty())
      base::log_warning(std::string(base::name(base::Cause::kReplicaDiverged)) +
                        " when the DistributedDataParallel ended, " + text +
                        ". Unless a rank changed it on purpose after the last step, the ranks have trained different "
                        "models since the last comparison (DdpOptions.compare_replicas_every)");
  } catch (const std::exception&) {
    // Without the store, the ranks cannot be compared.
  }
}

}  // namespace lockstep::ddp

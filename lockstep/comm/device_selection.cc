#include "lockstep/comm/device_selection.h"

#include <algorithm>
#include <map>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"
#include "lockstep/base/log.h"
#include "lockstep/base/parse.h"
#include "lockstep/comm/world.h"

namespace lockstep::comm {
namespace {

constexpr char kFieldSeparator = '\x1f';
constexpr const char* kDecisionKey = "gpu/verdict";

std::string gpu_key(int rank) { return "gpu/" + std::to_string(rank); }

/// Returns why the ranks cannot use NCCL, "" if they can. `reports` has one string per rank: the GPU's UUID, the host,
/// the version of NCCL, and why this rank cannot use NCCL.
std::string find_nccl_obstacle(const std::vector<std::string>& reports) {
  std::map<std::string, std::vector<int>> users;
  std::vector<std::vector<std::string>> fields;
  for (std::size_t rank = 0; rank < reports.size(); ++rank) {
    fields.push_back(base::split(reports[rank], kFieldSeparator));
    fields.back().resize(4);
    users[fields.back()[0]].push_back(static_cast<int>(rank));
  }
  for (const auto& [uuid, ranks] : users) {
    if (ranks.size() == 1) continue;
    std::string list;
    for (const int rank : ranks) list += (list.empty() ? "" : ",") + std::to_string(rank);
    const auto& report = fields[static_cast<std::size_t>(ranks.front())];
    return "ranks " + list + " share one GPU, " + uuid + " of host " + report[1];
  }
  for (std::size_t rank = 0; rank < fields.size(); ++rank) {
    if (!fields[rank][3].empty()) return "rank " + std::to_string(rank) + ": " + fields[rank][3];
    if (fields[rank][2] != fields[0][2])
      return "rank 0 has NCCL " + fields[0][2] + ", rank " + std::to_string(rank) + " has " + fields[rank][2];
  }
  return "";
}

}  // namespace

DeviceRequest parse_device(const std::string& asked) {
  if (asked == "auto") return {};
  if (asked == "cpu") return {.cpu = true};
  if (asked == "cuda") return {.gpu = true};
  const auto index = asked.starts_with("cuda:") ? base::parse_int(asked.substr(5)) : std::nullopt;
  if (!index || *index < 0 || *index > 127)
    throw base::UsageError("device (LOCKSTEP_DEVICE) is " + base::quoted(asked, 80) +
                           "; expected auto, cpu, cuda or cuda:N with N from 0 to 127");
  return {.gpu = true, .index = static_cast<int>(*index)};
}

bool detect_gpus(World& world, const DeviceRequest& request) {
  if (request.cpu) {
    world.gpu_unavailable_reason = "LOCKSTEP_DEVICE, or InitOptions.device, is cpu";
    return false;
  }
  const VisibleGpus gpus = visible_gpus();
  world.gpu_unavailable_reason = gpus.missing;
  if (request.gpu && gpus.count == 0)
    throw base::UsageError("device (LOCKSTEP_DEVICE) is cuda, but there is no GPU: " + gpus.missing);
  if (request.index >= gpus.count && request.index >= 0)
    throw base::UsageError("device (LOCKSTEP_DEVICE) is cuda:" + std::to_string(request.index) +
                           ", but this rank sees " + std::to_string(gpus.count) +
                           " GPUs; expected cuda:0 to cuda:" + std::to_string(gpus.count - 1));
  if (gpus.driver_broken) base::log_warning("GPUs are not used: " + gpus.missing);
  if (gpus.count == 0) return false;
  load_cuda();
  world.num_gpus = gpus.count;
  return true;
}

void select_gpu(World& world, const DeviceRequest& request) {
  const int index = request.index >= 0 ? request.index : world.identity.local_rank % world.num_gpus;
  set_current_gpu(index);
  world.gpu = describe_gpu(index);
  world.device = at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(index));
}

void negotiate_gpu_transport(World& world, const std::string& asked, const std::string& nccl_version,
                             const std::string& nccl_unavailable_reason, base::Deadline deadline) {
  const job::Identity& id = world.identity;
  const auto read_key = [&](const std::string& key, int from) {
    const auto value = world.store->get(key, deadline);
    if (!value)
      throw base::CommError(base::Cause::kJoinTimeout, "init", id.rank, from,
                            "rank " + std::to_string(from) + " did not report its GPU in time");
    return *value;
  };
  world.store->set(gpu_key(id.rank),
                   world.gpu.uuid + kFieldSeparator + base::host_name() + kFieldSeparator + nccl_version +
                       kFieldSeparator + nccl_unavailable_reason,
                   deadline);
  if (id.rank == 0) {
    std::vector<std::string> reports;
    for (int rank = 0; rank < id.world_size; ++rank) reports.push_back(read_key(gpu_key(rank), rank));
    world.store->set(kDecisionKey, find_nccl_obstacle(reports) + kFieldSeparator, deadline);
  }
  std::string obstacle = read_key(kDecisionKey, 0);
  obstacle.resize(obstacle.find(kFieldSeparator));
  const bool named = asked != "auto" && asked != "nccl";
  if (asked == "nccl" && !obstacle.empty())
    throw base::UsageError(
        "transport nccl: " + obstacle,
        "give each rank a GPU of its own, or choose another transport, which copies GPU tensors through host memory",
        base::Cause::kConfigMismatch);
  world.uses_nccl = !named && obstacle.empty();
  const std::string through = "through host memory over " + world.transport;
  world.gpu_transport_text = world.uses_nccl ? "by NCCL " + nccl_version : through;
  if (id.rank == 0 && !obstacle.empty() && !named)
    base::log_warning(obstacle + ": GPU tensors go " + through + ", which is slower than NCCL");
}

}  // namespace lockstep::comm

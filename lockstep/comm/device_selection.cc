#include "lockstep/comm/device_selection.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/base/byte_codec.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/net/socket.h"
#include "lockstep/base/parse.h"
#include "lockstep/comm/world.h"

namespace lockstep::comm {
namespace {

constexpr const char* kDecisionKey = "gpu/nccl";

std::string gpu_key(int rank) { return "gpu/" + std::to_string(rank); }

/// What each rank publishes about its GPU.
struct GpuReport {
  std::string uuid;
  std::string host;
  NcclSupport nccl;
};

std::string encode(const GpuReport& report) {
  std::string bytes;
  base::put_texts(bytes, {report.uuid, report.host, report.nccl.version, report.nccl.unavailable_reason,
                          report.nccl.cannot_share_reason});
  return bytes;
}

GpuReport decode_gpu_report(std::string_view bytes) {
  base::ByteReader reader(bytes, "init: a rank's report of its GPU");
  std::vector<std::string> texts = reader.texts();
  reader.end();
  if (texts.size() != 5)
    throw base::Error(base::Cause::kProtocol,
                      "init: a rank's report of its GPU has " + std::to_string(texts.size()) + " fields; expected 5");
  return {.uuid = std::move(texts[0]),
          .host = std::move(texts[1]),
          .nccl = {.version = std::move(texts[2]),
                   .unavailable_reason = std::move(texts[3]),
                   .cannot_share_reason = std::move(texts[4])}};
}

/// Why the ranks cannot use NCCL, and the ranks that the reason concerns.
enum class NcclObstacle : std::uint8_t {
  kNone,          // they can; no ranks
  kSharedGpu,     // the ranks that share one GPU
  kUnavailable,   // the first rank that cannot use NCCL
  kOtherVersion,  // the first rank whose version differs from that of rank 0
};

/// The decision of rank 0 for all ranks.
struct NcclDecision {
  NcclObstacle obstacle = NcclObstacle::kNone;
  std::vector<int> ranks;
};

std::string encode(const NcclDecision& decision) {
  std::string bytes;
  base::put_number(bytes, decision.obstacle);
  base::put_number(bytes, static_cast<std::uint32_t>(decision.ranks.size()));
  for (const int rank : decision.ranks) base::put_number(bytes, static_cast<std::int32_t>(rank));
  return bytes;
}

NcclDecision decode_nccl_decision(std::string_view bytes) {
  base::ByteReader reader(bytes, "init: rank 0's decision about NCCL");
  const auto obstacle = reader.number<std::uint8_t>();
  if (obstacle > static_cast<std::uint8_t>(NcclObstacle::kOtherVersion))
    throw base::Error(base::Cause::kProtocol,
                      "init: rank 0's decision about NCCL is " + std::to_string(obstacle) + "; expected 0 to 3");
  NcclDecision decision{static_cast<NcclObstacle>(obstacle), std::vector<int>(reader.count(sizeof(std::int32_t)))};
  for (int& rank : decision.ranks) rank = reader.number<std::int32_t>();
  reader.end();
  return decision;
}

NcclDecision find_nccl_obstacle(const std::vector<GpuReport>& reports) {
  std::map<std::string, std::vector<int>> users;
  for (std::size_t rank = 0; rank < reports.size(); ++rank) users[reports[rank].uuid].push_back(static_cast<int>(rank));
  for (const auto& [uuid, ranks] : users) {
    const bool all_can_share = std::all_of(ranks.begin(), ranks.end(), [&](int rank) {
      return reports[static_cast<std::size_t>(rank)].nccl.cannot_share_reason.empty();
    });
    if (ranks.size() > 1 && !all_can_share) return {NcclObstacle::kSharedGpu, ranks};
  }
  for (std::size_t rank = 0; rank < reports.size(); ++rank) {
    if (!reports[rank].nccl.unavailable_reason.empty()) return {NcclObstacle::kUnavailable, {static_cast<int>(rank)}};
    if (reports[rank].nccl.version != reports[0].nccl.version)
      return {NcclObstacle::kOtherVersion, {static_cast<int>(rank)}};
  }
  return {};
}

/// Returns why the ranks cannot use NCCL, "" if they can. `report_of` returns the report of a rank.
template <typename ReportOf>
std::string explain(const NcclDecision& decision, const ReportOf& report_of) {
  if (decision.obstacle == NcclObstacle::kNone) return "";
  const int rank = decision.ranks.at(0);
  const GpuReport report = report_of(rank);
  const std::string list = base::joined(decision.ranks, ",");
  switch (decision.obstacle) {
    case NcclObstacle::kNone: break;
    case NcclObstacle::kSharedGpu:
      return "ranks " + list + " share one GPU, " + report.uuid + " of host " + report.host +
             (report.nccl.cannot_share_reason.empty() ? "" : ", and " + report.nccl.cannot_share_reason);
    case NcclObstacle::kUnavailable: return "rank " + list + ": " + report.nccl.unavailable_reason;
    case NcclObstacle::kOtherVersion:
      return "rank 0 has NCCL " + report_of(0).nccl.version + ", rank " + list + " has " + report.nccl.version;
  }
  return "";
}

}  // namespace

DeviceRequest parse_device(const std::string& asked) {
  const auto index = base::device_index(asked);
  if (!index) throw base::UsageError("device is " + base::quoted(asked, 80) + "; expected " + base::kDevices);
  return {.cpu = asked == "cpu", .gpu = asked.starts_with("cuda"), .index = *index};
}

bool detect_gpus(World& world, const DeviceRequest& request) {
  if (request.cpu) {
    world.gpu_unavailable_reason = "LOCKSTEP_DEVICE, or InitOptions.device, is cpu";
    return false;
  }
  const gpu::VisibleGpus gpus = gpu::visible_gpus();
  world.gpu_unavailable_reason = gpus.missing;
  if (request.gpu && gpus.count == 0)
    throw base::UsageError("device (LOCKSTEP_DEVICE) is cuda, but there is no GPU: " + gpus.missing);
  if (request.index >= gpus.count && request.index >= 0)
    throw base::UsageError("device (LOCKSTEP_DEVICE) is cuda:" + std::to_string(request.index) +
                           ", but this rank sees " + std::to_string(gpus.count) +
                           " GPUs; expected cuda:0 to cuda:" + std::to_string(gpus.count - 1));
  if (gpus.driver_broken) base::log_warning("GPUs are not used: " + gpus.missing);
  if (gpus.count == 0) return false;
  gpu::load_cuda();
  world.num_gpus = gpus.count;
  return true;
}

void select_gpu(World& world, const DeviceRequest& request) {
  const int index = request.index >= 0 ? request.index : world.identity.local_rank % world.num_gpus;
  gpu::set_current_gpu(index);
  world.gpu = gpu::describe_gpu(index);
  world.device = at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(index));
}

void negotiate_gpu_transport(World& world, const std::string& asked, const NcclSupport& nccl, base::Deadline deadline) {
  const job::identity::Identity& id = world.identity;
  const auto read_key = [&](const std::string& key, int from) {
    const auto value = world.store->get(key, deadline);
    if (!value)
      throw base::CommError(base::Cause::kJoinTimeout, "init", id.rank, from,
                            "rank " + std::to_string(from) + " did not report its GPU in time");
    return *value;
  };
  const auto report_of = [&](int rank) { return decode_gpu_report(read_key(gpu_key(rank), rank)); };
  world.store->set(gpu_key(id.rank), encode(GpuReport{world.gpu.uuid, base::net::host_name(), nccl}), deadline);
  if (id.rank == 0) {
    std::vector<GpuReport> reports;
    for (int rank = 0; rank < id.world_size; ++rank) reports.push_back(report_of(rank));
    world.store->set(kDecisionKey, encode(find_nccl_obstacle(reports)), deadline);
  }
  const std::string obstacle = explain(decode_nccl_decision(read_key(kDecisionKey, 0)), report_of);
  const bool named = asked != "auto" && asked != "nccl";
  if (asked == "nccl" && !obstacle.empty())
    throw base::UsageError(
        "transport nccl: " + obstacle,
        "give each rank a GPU of its own, or choose another transport, which copies GPU tensors through host memory",
        base::Cause::kConfigMismatch);
  world.uses_nccl = !named && obstacle.empty();
  const std::string through = "through host memory over " + world.transport;
  world.gpu_transport_text = world.uses_nccl ? "by NCCL " + nccl.version : through;
  if (id.rank == 0 && !obstacle.empty() && !named)
    base::log_warning(obstacle + ": GPU tensors go " + through + ", which is slower than NCCL");
}

}  // namespace lockstep::comm

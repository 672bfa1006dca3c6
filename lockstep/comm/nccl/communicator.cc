#include "lockstep/comm/nccl/communicator.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <thread>

#include "lockstep/base/deadline.h"
#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/telemetry/rank_page.h"

namespace lockstep::comm::nccl {
namespace {

using base::Deadline;

constexpr auto kStoreTimeout = std::chrono::seconds(5);
constexpr auto kFinalizeTimeout = std::chrono::seconds(10);
constexpr auto kPollInterval = std::chrono::milliseconds(1);
constexpr const char* kUniqueIdKey = "id";

/// Communicators made by a split share nothing with their parent (splitShare is 0), so that aborting one group does not
/// affect another.
ncclConfig_t nonblocking_config() {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  return config;
}

}  // namespace

NcclCommunicator::NcclCommunicator(const NcclOptions& options)
    : options_(options),
      location_{.rank = options.members[static_cast<std::size_t>(options.rank)],
                .gpu = options.gpu,
                .host = options.host,
                .address = options.address,
                .interface = base::Env::this_process().nccl_socket_ifname.value_or(""),
                .visible_gpus = base::Env::this_process().cuda_visible_devices.value_or("")} {}

NcclCommunicator::~NcclCommunicator() { close(); }

void NcclCommunicator::check(ncclResult_t result, const std::string& op, const std::string& call) const {
  if (result == ncclSuccess || result == ncclInProgress) return;
  const char* last_error = nccl_.GetLastError(comm_);
  std::rethrow_exception(to_exception({.result = result,
                                       .op = op,
                                       .call = call,
                                       .last_error = last_error ? last_error : "",
                                       .cuda_error = gpu::peek_cuda_error()},
                                      location_));
}

void NcclCommunicator::throw_cuda_failure(const std::string& op, const std::string& call) const {
  check(ncclUnhandledCudaError, op, call);
  throw base::UsageError(call);  // not reached
}

bool NcclCommunicator::is_ready(const std::string& op, const std::string& call) const {
  ncclResult_t state = ncclSuccess;
  check(nccl_.CommGetAsyncError(comm_, &state), op, "ncclCommGetAsyncError");
  check(state, op, call);
  return state == ncclSuccess;
}

void NcclCommunicator::split(int color, int key, ncclComm_t* child) {
  ncclConfig_t config = nonblocking_config();
  const std::string call = "ncclCommSplit(color " + std::to_string(color) + ", key " + std::to_string(key) + ")";
  check(nccl_.CommSplit(comm_, color, key, child, &config), "split", call);
}

void NcclCommunicator::set_split_comm(ncclComm_t split_comm) {
  comm_ = split_comm;
  stage_ = Stage::kConnecting;
}

void NcclCommunicator::init_rank(const std::string& op, const std::string& id) {
  ncclUniqueId unique_id{};
  id.copy(unique_id.internal, sizeof unique_id.internal);
  ncclConfig_t config = nonblocking_config();
  const int size = static_cast<int>(options_.members.size());
  check(nccl_.CommInitRankConfig(&comm_, size, unique_id, options_.rank, &config), op,
        "ncclCommInitRankConfig(rank " + std::to_string(options_.rank) + " of " + std::to_string(size) + ")");
}

bool NcclCommunicator::connect(const std::string& op) {
  if (stage_ == Stage::kConnected) return true;
  if (stage_ == Stage::kNoUniqueId) {
    std::optional<std::string> id;
    if (options_.rank == 0) {
      ncclUniqueId unique_id{};
      check(nccl_.GetUniqueId(&unique_id), op, "ncclGetUniqueId()");
      id = std::string(unique_id.internal, sizeof unique_id.internal);
      options_.store->set(kUniqueIdKey, *id, Deadline::in(kStoreTimeout));
    } else {
      id = options_.store->find(kUniqueIdKey, Deadline::in(kStoreTimeout));
    }
    if (!id) return false;
    stage_ = Stage::kConnecting;
    init_rank(op, *id);
  }
  if (!is_ready(op, "connecting " + std::to_string(options_.members.size()) + " ranks")) return false;
  const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(options_.gpu.index));
  stream_ = c10::impl::VirtualGuardImpl(at::kCUDA).getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  stage_ = Stage::kConnected;
  return true;
}

void NcclCommunicator::abort() noexcept {
  if (!comm_) return;
  abort(comm_);
  comm_ = nullptr;
  stage_ = Stage::kClosed;
}

void NcclCommunicator::abort(ncclComm_t comm) noexcept {
  // ncclCommAbort() may wait for the GPU or for NCCL's threads. If the GPU is broken, that wait never ends.
  if (comm) std::thread([end = NcclLibrary::loaded().CommAbort, comm] { end(comm); }).detach();
}

void NcclCommunicator::close() noexcept {
  if (!comm_ || stage_ != Stage::kConnected) return abort();
  const Deadline deadline = Deadline::in(kFinalizeTimeout);
  ncclResult_t state = nccl_.CommFinalize(comm_);
  while ((state == ncclSuccess || state == ncclInProgress) && !deadline.expired() &&
         base::telemetry::RankPage::this_process().stop_requested.load() == 0) {
    if (nccl_.CommGetAsyncError(comm_, &state) != ncclSuccess) break;
    if (state == ncclSuccess) {
      nccl_.CommDestroy(comm_);
      comm_ = nullptr;
      stage_ = Stage::kClosed;
      return;
    }
    std::this_thread::sleep_for(kPollInterval);
  }
  abort();
}

}  // namespace lockstep::comm::nccl

#include "lockstep/comm/nccl/communicator.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <thread>

#include "lockstep/base/deadline.h"
#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/telemetry/rank_page.h"

namespace lockstep::comm {
namespace {

using base::Deadline;

constexpr auto kStoreAnswers = std::chrono::seconds(5);
constexpr auto kOthersLetGo = std::chrono::seconds(10);
constexpr auto kPause = std::chrono::milliseconds(1);
constexpr const char* kName = "id";

/// Operations of one group end by themselves, whatever becomes of another: children share nothing with their parent
/// (splitShare).
ncclConfig_t configuration() {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  return config;
}

}  // namespace

Communicator::Communicator(const NcclOptions& options)
    : options_(options),
      place_{.rank = options.members[static_cast<std::size_t>(options.rank)],
             .gpu = options.gpu,
             .host = options.host,
             .address = options.address,
             .interface = base::Env::process().nccl_socket_ifname.value_or(""),
             .visible_gpus = base::Env::process().cuda_visible_devices.value_or("")} {}

Communicator::~Communicator() { close(); }

void Communicator::check(ncclResult_t result, const std::string& op, const std::string& call) const {
  if (result == ncclSuccess || result == ncclInProgress) return;
  const char* said = nccl_.get_last_error(comm_);
  std::rethrow_exception(
      explain({.result = result, .op = op, .call = call, .said = said ? said : "", .cuda_error = pending_cuda_error()},
              place_));
}

void Communicator::cuda_failed(const std::string& op, const std::string& call) const {
  check(ncclUnhandledCudaError, op, call);
  throw base::UsageError(call);  // not reached
}

bool Communicator::settled(const std::string& op, const std::string& call) const {
  ncclResult_t state = ncclSuccess;
  check(nccl_.comm_get_async_error(comm_, &state), op, "ncclCommGetAsyncError");
  check(state, op, call);
  return state == ncclSuccess;
}

void Communicator::split(int color, int key, ncclComm_t* child) {
  ncclConfig_t config = configuration();
  const std::string call = "ncclCommSplit(color " + std::to_string(color) + ", key " + std::to_string(key) + ")";
  check(nccl_.comm_split(comm_, color, key, child, &config), "split", call);
}

void Communicator::adopt(ncclComm_t made) {
  comm_ = made;
  stage_ = Stage::kConnecting;
}

void Communicator::initialise(const std::string& op, const std::string& id) {
  ncclUniqueId name{};
  id.copy(name.internal, sizeof name.internal);
  ncclConfig_t config = configuration();
  const int size = static_cast<int>(options_.members.size());
  check(nccl_.comm_init_rank_config(&comm_, size, name, options_.rank, &config), op,
        "ncclCommInitRankConfig(rank " + std::to_string(options_.rank) + " of " + std::to_string(size) + ")");
}

bool Communicator::connect(const std::string& op) {
  if (stage_ == Stage::kConnected) return true;
  if (stage_ == Stage::kWithoutName) {
    std::optional<std::string> id;
    if (options_.rank == 0) {
      ncclUniqueId name{};
      check(nccl_.get_unique_id(&name), op, "ncclGetUniqueId()");
      id = std::string(name.internal, sizeof name.internal);
      options_.store->set(kName, *id, Deadline::in(kStoreAnswers));
    } else {
      id = options_.store->find(kName, Deadline::in(kStoreAnswers));
    }
    if (!id) return false;
    stage_ = Stage::kConnecting;
    initialise(op, *id);
  }
  if (!settled(op, "connecting " + std::to_string(options_.members.size()) + " ranks")) return false;
  const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(options_.gpu.index));
  stream_ = c10::impl::VirtualGuardImpl(at::kCUDA).getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  stage_ = Stage::kConnected;
  return true;
}

void Communicator::abort() noexcept {
  if (!comm_) return;
  // It may wait for the GPU or for NCCL's threads, which a broken GPU leaves hanging.
  std::thread([end = nccl_.comm_abort, comm = comm_] { end(comm); }).detach();
  comm_ = nullptr;
  stage_ = Stage::kGone;
}

void Communicator::close() noexcept {
  if (!comm_ || stage_ != Stage::kConnected) return abort();
  const Deadline limit = Deadline::in(kOthersLetGo);
  ncclResult_t state = nccl_.comm_finalize(comm_);
  while ((state == ncclSuccess || state == ncclInProgress) && !limit.expired() &&
         base::RankPage::process().stop.load() == 0) {
    if (nccl_.comm_get_async_error(comm_, &state) != ncclSuccess) break;
    if (state == ncclSuccess) {
      nccl_.comm_destroy(comm_);
      comm_ = nullptr;
      stage_ = Stage::kGone;
      return;
    }
    std::this_thread::sleep_for(kPause);
  }
  abort();
}

}  // namespace lockstep::comm

#include "lockstep/comm/nccl/library.h"

#include <dlfcn.h>

#include "lockstep/comm/nccl/nccl.h"

namespace lockstep::comm {
namespace {

/// Communicators that do not block, and what they are told: since 2.18. Structures grow with versions, and NCCL reads
/// older ones.
constexpr int kOldest = NCCL_VERSION(2, 18, 1);

NcclLibrary find() {
  NcclLibrary nccl;
  const auto look = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(RTLD_DEFAULT, name));
    if (!function && nccl.missing.empty()) nccl.missing = name;
  };
  look(nccl.get_version, "ncclGetVersion");
  look(nccl.get_unique_id, "ncclGetUniqueId");
  look(nccl.get_error_string, "ncclGetErrorString");
  look(nccl.get_last_error, "ncclGetLastError");
  look(nccl.comm_init_rank_config, "ncclCommInitRankConfig");
  look(nccl.comm_split, "ncclCommSplit");
  look(nccl.comm_get_async_error, "ncclCommGetAsyncError");
  look(nccl.comm_finalize, "ncclCommFinalize");
  look(nccl.comm_destroy, "ncclCommDestroy");
  look(nccl.comm_abort, "ncclCommAbort");
  look(nccl.all_reduce, "ncclAllReduce");
  look(nccl.reduce, "ncclReduce");
  look(nccl.broadcast, "ncclBroadcast");
  look(nccl.all_gather, "ncclAllGather");
  look(nccl.reduce_scatter, "ncclReduceScatter");
  look(nccl.send, "ncclSend");
  look(nccl.recv, "ncclRecv");
  look(nccl.group_start, "ncclGroupStart");
  look(nccl.group_end, "ncclGroupEnd");
  if (nccl.get_version) nccl.get_version(&nccl.version);
  return nccl;
}

std::string readable(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version % 10000 / 100) + "." +
         std::to_string(version % 100);
}

}  // namespace

const NcclLibrary& NcclLibrary::loaded() {
  static const NcclLibrary nccl = find();
  return nccl;
}

std::string nccl_missing() {
  const NcclLibrary& nccl = NcclLibrary::loaded();
  if (!nccl.get_version) return "libtorch's library for GPUs has brought no NCCL";
  if (nccl.version < kOldest) return "NCCL " + std::to_string(nccl.version) + " is loaded; 2.18 or newer is needed";
  if (!nccl.missing.empty()) return "NCCL " + readable(nccl.version) + " has no " + nccl.missing;
  // A configuration of a newer header than the library knows is refused by it.
  if (nccl.version < NCCL_VERSION_CODE)
    return "NCCL " + readable(nccl.version) + " is loaded, but this build was made for " + readable(NCCL_VERSION_CODE);
  return "";
}

std::string nccl_version() { return readable(NcclLibrary::loaded().version); }

}  // namespace lockstep::comm

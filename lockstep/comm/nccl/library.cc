#include "lockstep/comm/nccl/library.h"

#include <dlfcn.h>

#include "lockstep/base/env.h"
#include "lockstep/comm/nccl/nccl.h"

namespace lockstep::comm::nccl {
namespace {

/// Nonblocking communicators and their configuration exist since 2.18. Newer versions of NCCL accept the smaller
/// structures of older ones.
constexpr int kMinVersion = NCCL_VERSION(2, 18, 1);

/// Several ranks may use one GPU since 2.30, if NCCL_MULTI_RANK_GPU_ENABLE is 1.
constexpr int kSharedGpuVersion = NCCL_VERSION(2, 30, 0);

NcclLibrary load_symbols() {
  NcclLibrary nccl;
#define LOCKSTEP_NCCL_LOAD(name)                                                          \
  nccl.name = reinterpret_cast<decltype(nccl.name)>(::dlsym(RTLD_DEFAULT, "nccl" #name)); \
  if (!nccl.name && nccl.missing_symbol.empty()) nccl.missing_symbol = "nccl" #name;
  LOCKSTEP_NCCL_FUNCTIONS(LOCKSTEP_NCCL_LOAD)
#undef LOCKSTEP_NCCL_LOAD
  if (nccl.GetVersion) nccl.GetVersion(&nccl.version);
  return nccl;
}

std::string version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version % 10000 / 100) + "." +
         std::to_string(version % 100);
}

}  // namespace

const NcclLibrary& NcclLibrary::loaded() {
  static const NcclLibrary nccl = load_symbols();
  return nccl;
}

std::string nccl_unavailable_reason() {
  const NcclLibrary& nccl = NcclLibrary::loaded();
  if (!nccl.GetVersion) return "libtorch_cuda has loaded no NCCL";
  if (nccl.version < kMinVersion) return "NCCL " + std::to_string(nccl.version) + " is loaded; expected 2.18 or newer";
  if (!nccl.missing_symbol.empty())
    return "NCCL " + version_text(nccl.version) + " has no function " + nccl.missing_symbol;
  // NCCL rejects the configuration structure of a newer header.
  if (nccl.version < NCCL_VERSION_CODE)
    return "NCCL " + version_text(nccl.version) + " is loaded; expected " + version_text(NCCL_VERSION_CODE) +
           ", the version of this build, or newer";
  return "";
}

std::string cannot_share_gpu_reason() {
  if (NcclLibrary::loaded().version < kSharedGpuVersion)
    return "NCCL " + nccl_version() + " does not support that; expected " + version_text(kSharedGpuVersion) +
           " or newer";
  if (base::Env::this_process().nccl_multi_rank_gpu_enable.value_or("") != "1")
    return "NCCL_MULTI_RANK_GPU_ENABLE is not 1; lockstep run --share-gpus sets it";
  return "";
}

std::string nccl_version() { return version_text(NcclLibrary::loaded().version); }

}  // namespace lockstep::comm::nccl

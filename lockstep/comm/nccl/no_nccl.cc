// nccl.h for a build without NCCL.
#include "lockstep/base/error.h"
#include "lockstep/comm/nccl/nccl.h"

namespace lockstep::comm::nccl {

std::string nccl_unavailable_reason() {
  return "this build has no NCCL (install a libtorch for CUDA and the wheel nvidia-nccl, and build again)";
}
std::string cannot_share_gpu_reason() { return nccl_unavailable_reason(); }
std::string nccl_version() { return ""; }
std::shared_ptr<Transport> make_nccl_transport(NcclOptions) { throw base::UsageError(nccl_unavailable_reason()); }
void skip_nccl_split(Transport&) { throw base::UsageError(nccl_unavailable_reason()); }

}  // namespace lockstep::comm::nccl

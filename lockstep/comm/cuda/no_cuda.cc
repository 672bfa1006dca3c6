#include "lockstep/base/error.h"
#include "lockstep/comm/cuda/cuda.h"
#include "lockstep/comm/cuda/device_transport.h"

namespace lockstep::comm {
namespace {

constexpr const char* kMissing = "this build's libtorch has no CUDA (the wheel torch for CUDA brings it)";

}  // namespace

VisibleGpus visible_gpus() { return {.missing = kMissing}; }
void load_cuda() { throw base::UsageError(kMissing); }
Gpu describe_gpu(int) { throw base::UsageError(kMissing); }
void choose_gpu(int) { throw base::UsageError(kMissing); }
std::string cuda_error_name(int) { return ""; }
int pending_cuda_error() { return 0; }
std::shared_ptr<Transport> make_device_transport(DeviceTransportOptions) { throw base::UsageError(kMissing); }
std::shared_ptr<Transport> nccl_of(Transport&) { return nullptr; }

}  // namespace lockstep::comm

// cuda.h and device_transport.h for a libtorch without CUDA.
#include "lockstep/base/error.h"
#include "lockstep/comm/gpu/cuda.h"
#include "lockstep/comm/gpu/device_transport.h"

namespace lockstep::comm::gpu {
namespace {

constexpr const char* kNoCuda = "this build's libtorch has no CUDA (install the torch wheel for CUDA and build again)";

}  // namespace

VisibleGpus visible_gpus() { return {.missing = kNoCuda}; }
void load_cuda() { throw base::UsageError(kNoCuda); }
Gpu describe_gpu(int) { throw base::UsageError(kNoCuda); }
void set_current_gpu(int) { throw base::UsageError(kNoCuda); }
std::string cuda_error_name(int) { return ""; }
int peek_cuda_error() { return 0; }
std::shared_ptr<Transport> make_device_transport(DeviceTransportOptions) { throw base::UsageError(kNoCuda); }
std::shared_ptr<Transport> nccl_transport_of(Transport&) { return nullptr; }

}  // namespace lockstep::comm::gpu

#include "lockstep/comm/nccl/failure.h"

#include <nccl.h>

#include <algorithm>
#include <cstdlib>

#include "lockstep/base/error.h"

namespace lockstep::comm::nccl {
namespace {

using base::Cause;

constexpr std::size_t kMaxErrorText = 400;
constexpr const char* kMoreMessages = "set NCCL_DEBUG=WARN for more messages of NCCL";

// Errors of the CUDA runtime, grouped by their remedy.
constexpr int kOutOfMemoryErrors[] = {2};
// Driver too old, no code for this GPU, code too new, mismatch of libraries, compatibility mode.
constexpr int kDriverErrors[] = {35, 209, 222, 803, 804};
// Invalid device, no device, invalid ordinal.
constexpr int kDeviceIndexErrors[] = {10, 100, 101};
// Device unavailable, ECC, MPS.
constexpr int kDeviceInUseErrors[] = {46, 214, 805, 806, 807, 808, 809, 810};

template <std::size_t n>
bool is_in(const int (&list)[n], int error) {
  return std::find(list, list + n, error) != list + n;
}

std::string hint_for(int error, const NcclLocation& location) {
  const std::string memory =
      "free memory on the GPU for NCCL (nvidia-smi lists the processes that use it), or use a smaller batch";
  const std::string driver =
      "update NVIDIA's driver if it is too old for this libtorch (lockstep doctor reports the required version)";
  const std::string index = "check that cuda:" + std::to_string(location.gpu.index) +
                            " exists (CUDA_VISIBLE_DEVICES is " +
                            (location.visible_gpus.empty() ? "not set" : location.visible_gpus) +
                            "), and start as many ranks as there are GPUs";
  const std::string shared = "check whether another process has exclusive use of the GPU (nvidia-smi -q -d COMPUTE)";
  if (is_in(kOutOfMemoryErrors, error)) return memory;
  if (is_in(kDriverErrors, error)) return driver;
  if (is_in(kDeviceIndexErrors, error)) return index;
  if (is_in(kDeviceInUseErrors, error)) return shared;
  return memory + "; " + driver + "; " + index + "; " + shared + "; " + kMoreMessages;
}

std::string to_one_line(std::string last_error) {
  while (!last_error.empty() && (last_error.back() == '\n' || last_error.back() == ' ')) last_error.pop_back();
  if (last_error.size() > kMaxErrorText) last_error = "..." + last_error.substr(last_error.size() - kMaxErrorText);
  std::string line;
  for (const char c : last_error)
    line += c == '\n' ? "; " : static_cast<unsigned char>(c) < ' ' ? "?" : std::string(1, c);
  return line;
}

std::string describe_interface(const NcclLocation& location) {
  return (location.interface.empty() ? std::string("an interface that NCCL selected (NCCL_SOCKET_IFNAME is not set)")
                                     : "interface " + location.interface) +
         " of host " + location.host +
         (location.address.empty() ? "" : ", whose address for the other ranks is " + location.address);
}

}  // namespace

int parse_cuda_error(std::string_view last_error) {
  constexpr std::string_view kWords = "Cuda failure ";
  const std::size_t at = last_error.rfind(kWords);
  return at == std::string_view::npos ? 0 : std::atoi(std::string(last_error.substr(at + kWords.size(), 12)).c_str());
}

std::exception_ptr to_exception(const NcclFailure& failure, const NcclLocation& location) {
  const std::string last_error = failure.last_error.empty() ? "" : "; NCCL reports: " + to_one_line(failure.last_error);
  const std::string where = failure.op + ": " + failure.call + " failed on rank " + std::to_string(location.rank) +
                            ", cuda:" + std::to_string(location.gpu.index) + " (" + location.gpu.uuid + ", " +
                            location.gpu.name + ") of host " + location.host + ": ";
  const auto local_error = [&](Cause cause, const std::string& what, const std::string& hint) {
    return std::make_exception_ptr(
        base::CommError(cause, failure.op, location.rank, location.rank, where + what + last_error, hint));
  };
  switch (failure.result) {
    case ncclUnhandledCudaError: {
      const int parsed_error = parse_cuda_error(failure.last_error);
      const int error = parsed_error != 0 ? parsed_error : failure.cuda_error;
      const std::string name = gpu::cuda_error_name(error);
      const std::string cuda = error == 0 ? "a CUDA call failed"
                                          : "CUDA reports " + (name.empty() ? "error " + std::to_string(error) : name);
      return local_error(Cause::kResource, cuda, hint_for(error, location));
    }
    case ncclSystemError:
      return std::make_exception_ptr(base::Error(
          Cause::kPeerUnreachable, where + "a system call failed on " + describe_interface(location) + last_error,
          std::string("check that the hosts reach each other on this interface (lockstep doctor -H ...), or set "
                      "LOCKSTEP_INTERFACE and NCCL_SOCKET_IFNAME to another one; also check firewalls, the size of "
                      "/dev/shm, and the limits of open files and locked memory (ulimit -n, -l); ") +
              kMoreMessages));
    case ncclRemoteError:
      return std::make_exception_ptr(base::Error(
          Cause::kPeerUnreachable,
          where + "another rank has ended or cannot be reached on " + describe_interface(location) + last_error,
          "look for the error of that rank, which is the cause"));
    case ncclInvalidUsage:
      return local_error(Cause::kConfigMismatch, "NCCL rejects the call as invalid usage",
                         std::string("check that no two ranks use one GPU and that all ranks have the same version of "
                                     "NCCL (lockstep doctor); ") +
                             kMoreMessages);
    default:
      return local_error(Cause::kInternal, "NCCL returned result " + std::to_string(failure.result),
                         std::string(kMoreMessages) + ", and report the error");
  }
}

}  // namespace lockstep::comm::nccl

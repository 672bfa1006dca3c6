#include "lockstep/comm/nccl/failure.h"

#include <nccl.h>

#include <algorithm>
#include <cstdlib>

#include "lockstep/base/error.h"

namespace lockstep::comm {
namespace {

using base::Cause;

constexpr std::size_t kMaxErrorText = 400;

/// Errors of CUDA by what is to be done about them.
constexpr int kOutOfMemoryErrors[] = {2};
constexpr int kDriverErrors[] = {
    35, 209, 222, 803, 804};  // too old, no code for this GPU, code too new, mismatch of libraries, compatibility mode
constexpr int kDeviceIndexErrors[] = {10, 100, 101};                           // invalid device, none, invalid ordinal
constexpr int kDeviceInUseErrors[] = {46, 214, 805, 806, 807, 808, 809, 810};  // unavailable, ECC, MPS

template <std::size_t n>
bool is_in(const int (&list)[n], int error) {
  return std::find(list, list + n, error) != list + n;
}

std::string hint_for(int error, const NcclLocation& location) {
  const std::string memory = "is the GPU's memory full? nvidia-smi shows who uses it; a smaller batch leaves NCCL room";
  const std::string driver = "is NVIDIA's driver too old for this libtorch? lockstep doctor says which one it needs";
  const std::string index = "is cuda:" + std::to_string(location.gpu.index) + " there? CUDA_VISIBLE_DEVICES is " +
                            (location.visible_gpus.empty() ? "not set" : location.visible_gpus) +
                            "; start as many ranks as GPUs";
  const std::string shared = "does another process have the GPU for itself (nvidia-smi -q -d COMPUTE)?";
  if (is_in(kOutOfMemoryErrors, error)) return memory;
  if (is_in(kDriverErrors, error)) return driver;
  if (is_in(kDeviceIndexErrors, error)) return index;
  if (is_in(kDeviceInUseErrors, error)) return shared;
  return memory + "; " + driver + "; " + index + "; " + shared + "; NCCL_DEBUG=WARN makes NCCL say more";
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
  return (location.interface.empty() ? std::string("an interface that NCCL chose (NCCL_SOCKET_IFNAME is not set)")
                                     : "interface " + location.interface) +
         " of host " + location.host +
         (location.address.empty() ? "" : ", whose address for the others is " + location.address);
}

}  // namespace

int parse_cuda_error(std::string_view last_error) {
  constexpr std::string_view kWords = "Cuda failure ";
  const std::size_t at = last_error.rfind(kWords);
  return at == std::string_view::npos ? 0 : std::atoi(std::string(last_error.substr(at + kWords.size(), 12)).c_str());
}

std::exception_ptr to_exception(const NcclFailure& failure, const NcclLocation& location) {
  const std::string last_error = failure.last_error.empty() ? "" : "; NCCL says: " + to_one_line(failure.last_error);
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
      const std::string name = cuda_error_name(error);
      const std::string cuda = error == 0 ? "CUDA refused something"
                                          : "CUDA says " + (name.empty() ? "error " + std::to_string(error) : name);
      return local_error(Cause::kResource, cuda, hint_for(error, location));
    }
    case ncclSystemError:
      return std::make_exception_ptr(base::Error(
          Cause::kPeerUnreachable,
          where + "a call of the system failed, on " + describe_interface(location) + last_error,
          "do the hosts reach each other there (lockstep doctor -H ...)? LOCKSTEP_INTERFACE and NCCL_SOCKET_IFNAME "
          "name another interface; also look at firewalls, at the size of /dev/shm, and at "
          "the limits of open files and locked memory (ulimit -n, -l); NCCL_DEBUG=WARN makes NCCL say more"));
    case ncclRemoteError:
      return std::make_exception_ptr(base::Error(
          Cause::kPeerUnreachable,
          where + "another rank has ended or cannot be reached, on " + describe_interface(location) + last_error,
          "what that rank says is the cause"));
    case ncclInvalidUsage:
      return local_error(
          Cause::kConfigMismatch, "NCCL does not take this use of it",
          "do two ranks use one GPU, or ranks different versions of NCCL (lockstep doctor)? NCCL_DEBUG=WARN "
          "makes NCCL say more");
    default:
      return local_error(Cause::kInternal, "result " + std::to_string(failure.result),
                         "NCCL_DEBUG=WARN makes NCCL say more; please report it");
  }
}

}  // namespace lockstep::comm

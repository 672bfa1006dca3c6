#include "lockstep/comm/nccl/failure.h"

#include <nccl.h>

#include <algorithm>
#include <cstdlib>

#include "lockstep/base/error.h"

namespace lockstep::comm {
namespace {

using base::Cause;

constexpr std::size_t kLongestSaid = 400;

/// Errors of CUDA by what is to be done about them.
constexpr int kMemory[] = {2};
constexpr int kDriver[] = {
    35, 209, 222, 803, 804};  // too old, no code for this GPU, code too new, mismatch of libraries, compatibility mode
constexpr int kIndex[] = {10, 100, 101};                            // invalid device, none, invalid ordinal
constexpr int kShared[] = {46, 214, 805, 806, 807, 808, 809, 810};  // unavailable, ECC, MPS

template <std::size_t n>
bool is_in(const int (&list)[n], int error) {
  return std::find(list, list + n, error) != list + n;
}

std::string hint_for(int error, const NcclPlace& place) {
  const std::string memory = "is the GPU's memory full? nvidia-smi shows who uses it; a smaller batch leaves NCCL room";
  const std::string driver = "is NVIDIA's driver too old for this libtorch? lockstep doctor says which one it needs";
  const std::string index = "is cuda:" + std::to_string(place.gpu.index) + " there? CUDA_VISIBLE_DEVICES is " +
                            (place.visible_gpus.empty() ? "not set" : place.visible_gpus) +
                            "; start as many ranks as GPUs";
  const std::string shared = "does another process have the GPU for itself (nvidia-smi -q -d COMPUTE)?";
  if (is_in(kMemory, error)) return memory;
  if (is_in(kDriver, error)) return driver;
  if (is_in(kIndex, error)) return index;
  if (is_in(kShared, error)) return shared;
  return memory + "; " + driver + "; " + index + "; " + shared + "; NCCL_DEBUG=WARN makes NCCL say more";
}

std::string one_line(std::string said) {
  while (!said.empty() && (said.back() == '\n' || said.back() == ' ')) said.pop_back();
  if (said.size() > kLongestSaid) said = "..." + said.substr(said.size() - kLongestSaid);
  std::string line;
  for (const char c : said) line += c == '\n' ? "; " : static_cast<unsigned char>(c) < ' ' ? "?" : std::string(1, c);
  return line;
}

std::string interface_of(const NcclPlace& place) {
  return (place.interface.empty() ? std::string("an interface that NCCL chose (NCCL_SOCKET_IFNAME is not set)")
                                  : "interface " + place.interface) +
         " of host " + place.host + (place.address.empty() ? "" : ", whose address for the others is " + place.address);
}

}  // namespace

int cuda_error_in(std::string_view said) {
  constexpr std::string_view kWords = "Cuda failure ";
  const std::size_t at = said.rfind(kWords);
  return at == std::string_view::npos ? 0 : std::atoi(std::string(said.substr(at + kWords.size(), 12)).c_str());
}

std::exception_ptr explain(const NcclFailure& failure, const NcclPlace& place) {
  const std::string said = failure.said.empty() ? "" : "; NCCL says: " + one_line(failure.said);
  const std::string where = failure.op + ": " + failure.call + " failed on rank " + std::to_string(place.rank) +
                            ", cuda:" + std::to_string(place.gpu.index) + " (" + place.gpu.uuid + ", " +
                            place.gpu.name + ") of host " + place.host + ": ";
  const auto own = [&](Cause cause, const std::string& what, const std::string& hint) {
    return std::make_exception_ptr(
        base::CommError(cause, failure.op, place.rank, place.rank, where + what + said, hint));
  };
  switch (failure.result) {
    case ncclUnhandledCudaError: {
      const int told = cuda_error_in(failure.said);
      const int error = told != 0 ? told : failure.cuda_error;
      const std::string name = cuda_error_name(error);
      const std::string cuda = error == 0 ? "CUDA refused something"
                                          : "CUDA says " + (name.empty() ? "error " + std::to_string(error) : name);
      return own(Cause::kResource, cuda, hint_for(error, place));
    }
    case ncclSystemError:
      return std::make_exception_ptr(base::Error(
          Cause::kPeerUnreachable, where + "a call of the system failed, on " + interface_of(place) + said,
          "do the hosts reach each other there (lockstep doctor -H ...)? LOCKSTEP_INTERFACE and NCCL_SOCKET_IFNAME "
          "name another interface; also look at firewalls, at the size of /dev/shm, and at "
          "the limits of open files and locked memory (ulimit -n, -l); NCCL_DEBUG=WARN makes NCCL say more"));
    case ncclRemoteError:
      return std::make_exception_ptr(
          base::Error(Cause::kPeerUnreachable,
                      where + "another rank has ended or cannot be reached, on " + interface_of(place) + said,
                      "what that rank says is the cause"));
    case ncclInvalidUsage:
      return own(Cause::kConfigMismatch, "NCCL does not take this use of it",
                 "do two ranks use one GPU, or ranks different versions of NCCL (lockstep doctor)? NCCL_DEBUG=WARN "
                 "makes NCCL say more");
    default:
      return own(Cause::kInternal, "result " + std::to_string(failure.result),
                 "NCCL_DEBUG=WARN makes NCCL say more; please report it");
  }
}

}  // namespace lockstep::comm

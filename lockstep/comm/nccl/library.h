// The functions of the NCCL library that libtorch_cuda has loaded.
#pragma once

#include <nccl.h>

#include <string>

namespace lockstep::comm::nccl {

/// Lists the functions of NCCL that Lockstep calls, without the prefix nccl.
// clang-format off
#define LOCKSTEP_NCCL_FUNCTIONS(X)                                                               \
  X(GetVersion) X(GetUniqueId) X(GetLastError) X(CommInitRankConfig) X(CommSplit)                \
  X(CommGetAsyncError) X(CommFinalize) X(CommDestroy) X(CommAbort) X(AllReduce) X(Reduce)        \
  X(Broadcast) X(AllGather) X(ReduceScatter) X(Send) X(Recv) X(GroupStart) X(GroupEnd)
// clang-format on

struct NcclLibrary {
#define LOCKSTEP_NCCL_MEMBER(name) decltype(&nccl##name) name = nullptr;
  LOCKSTEP_NCCL_FUNCTIONS(LOCKSTEP_NCCL_MEMBER)
#undef LOCKSTEP_NCCL_MEMBER
  std::string missing_symbol;  ///< the first function that was not found, or empty
  int version = 0;

  /// Looks the functions up at the first call. load_cuda() must have been called before.
  static const NcclLibrary& loaded();
};

}  // namespace lockstep::comm::nccl

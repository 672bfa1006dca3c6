// The functions of libmpi, and the MPI state of this process: MPI is initialised and finalised once, and one thread at
// a time calls it. Programs do not link libmpi: it is loaded when the transport mpi is first used, so they start
// without it, and on machines that lack it.
#pragma once

#define OMPI_SKIP_MPICXX 1  // the C++ bindings are not linked
#define MPICH_SKIP_MPICXX 1
#include <ATen/core/Tensor.h>
#include <mpi.h>

#include <mutex>

#include "lockstep/comm/interface/collective.h"
#include "lockstep/comm/mpi/library.h"

namespace lockstep::comm::mpi {

/// Lists the functions of MPI that Lockstep calls, without the prefix MPI_.
// clang-format off
#define LOCKSTEP_MPI_FUNCTIONS(X)                                                                      \
  X(Comm_create_group) X(Comm_free) X(Comm_group) X(Comm_rank) X(Comm_set_errhandler) X(Comm_size)     \
  X(Comm_split_type) X(Error_string) X(Finalize) X(Finalized) X(Group_free) X(Group_incl)              \
  X(Iallgather) X(Iallreduce) X(Ialltoall) X(Ibarrier) X(Ibcast) X(Igather) X(Init_thread)             \
  X(Initialized) X(Irecv) X(Ireduce) X(Ireduce_scatter_block) X(Iscatter) X(Isend) X(Op_create)        \
  X(Query_thread) X(Test)
// clang-format on

/// The functions, and the handles that MPI predefines: in Open MPI these are addresses of variables in libmpi.
struct Api {
#define LOCKSTEP_MPI_MEMBER(name) decltype(&MPI_##name) name = nullptr;
  LOCKSTEP_MPI_FUNCTIONS(LOCKSTEP_MPI_MEMBER)
#undef LOCKSTEP_MPI_MEMBER
  MPI_Comm world = {}, no_comm = {};
  MPI_Request no_request = {};
  MPI_Info no_info = {};
  MPI_Errhandler errors_return = {};
  MPI_Datatype float64 = {}, float32 = {}, int64 = {}, int32 = {}, int8 = {}, uint16 = {}, uint8 = {};
  MPI_Op sum = {}, min = {}, max = {}, product = {};
};

/// Returns those of the MPI library that the process has loaded, or else of the one that the dynamic linker finds;
/// loads it at the first call. Throws UsageError if there is none, and UsageError (kConfigMismatch) if it lacks one of
/// them.
const Api& api();

/// The MPI library of the build, from mpi.h or from the library that CMake found. The name is empty if it is unknown.
MpiLibrary build_time_mpi();
/// The loaded MPI library; loads it as api() does. MPI need not be initialised.
MpiLibrary loaded_mpi();

/// One object per process, because MPI's state is global.
class MpiRuntime {
 public:
  /// Initialises MPI at the first call. Throws UsageError if the loaded library is not the one of the build, or if MPI
  /// does not support MPI_THREAD_SERIALIZED.
  static MpiRuntime& this_process();

  /// Must be held during every call of MPI.
  std::mutex& mutex() { return mutex_; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  /// Returns false once MPI has been finalised; none of its functions may be called then.
  bool is_usable() const;

  MPI_Datatype type(at::ScalarType dtype) const;
  MPI_Op op(ReduceOp op, at::ScalarType dtype) const;

 private:
  MpiRuntime();

  std::mutex mutex_;
  int rank_ = 0;
  int size_ = 1;
  MPI_Op narrow_ops_[2][4] = {};  // for float16 and bfloat16: sum, minimum, maximum, product
};

/// Throws std::runtime_error with MPI's text unless `code` is MPI_SUCCESS.
void check_mpi_result(int code, const char* what);

}  // namespace lockstep::comm::mpi

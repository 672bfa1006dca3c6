// The functions and handles of libmpi. Programs do not link it: it is loaded when the transport mpi is first used, so
// they start without it, and on machines that lack it.
#pragma once

#define OMPI_SKIP_MPICXX 1  // the C++ bindings are not linked
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

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

}  // namespace lockstep::comm::mpi

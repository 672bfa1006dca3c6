// This process's use of MPI: begun once, ended once, one thread at a time in it.
#pragma once

#define OMPI_SKIP_MPICXX 1  // C++ bindings, which are not linked
#define MPICH_SKIP_MPICXX 1
#include <ATen/core/Tensor.h>
#include <mpi.h>

#include <mutex>
#include <string>
#include <vector>

#include "lockstep/comm/interface/collective.h"
#include "lockstep/comm/mpi/library.h"

namespace lockstep::comm {

/// What mpi.h, or the library when the build was configured, said of itself; without a name when neither did.
MpiLibrary build_time_mpi();
/// What the library of this process says. MPI need not be initialised.
MpiLibrary loaded_mpi();

/// MPI is global by nature, and so is this.
class MpiRuntime {
 public:
  /// Initialises MPI at the first call. Throws UsageError when it is another library than that of the build, and when
  /// it does not let threads take turns.
  static MpiRuntime& this_process();

  /// Held around every call of MPI.
  std::mutex& mutex() { return mutex_; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  /// False once MPI has been finalised: then none of its functions may be called.
  bool is_usable() const;

  MPI_Datatype type(at::ScalarType dtype) const;
  MPI_Op op(ReduceOp op, at::ScalarType dtype) const;

 private:
  MpiRuntime();

  std::mutex mutex_;
  int rank_ = 0;
  int size_ = 1;
  MPI_Op narrow_ops_[2][4] = {};  // of float16 and bfloat16: sum, minimum, maximum, product
};

/// Throws std::runtime_error with MPI's text unless `code` is MPI_SUCCESS.
void check_mpi_result(int code, const char* what);

}  // namespace lockstep::comm

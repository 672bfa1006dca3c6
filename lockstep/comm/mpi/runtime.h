// The MPI state of this process: MPI is initialised and finalised once, and one thread at a time calls it.
#pragma once

#include <ATen/core/Tensor.h>

#include <mutex>
#include <string>
#include <vector>

#include "lockstep/comm/interface/collective.h"
#include "lockstep/comm/mpi/api.h"

namespace lockstep::comm::mpi {

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

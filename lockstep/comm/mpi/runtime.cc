#include "lockstep/comm/mpi/runtime.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <future>
#include <stdexcept>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/base/thread.h"
#include "lockstep/comm/mpi/mpi.h"

namespace lockstep::comm::mpi {
namespace {

constexpr auto kFinalizeTimeout = std::chrono::seconds(5);

struct AddOp {
  static float apply(float a, float b) { return a + b; }
};
struct MinOp {
  static float apply(float a, float b) { return b < a ? b : a; }
};
struct MaxOp {
  static float apply(float a, float b) { return a < b ? b : a; }
};
struct MultiplyOp {
  static float apply(float a, float b) { return a * b; }
};

/// MPI has neither float16 nor bfloat16, so their bits are sent as uint16.
template <typename Narrow, typename Op>
void reduce_narrow(void* in, void* in_out, int* count, MPI_Datatype*) {
  const auto* from = static_cast<const Narrow*>(in);
  auto* to = static_cast<Narrow*>(in_out);
  for (int i = 0; i < *count; ++i)
    to[i] = static_cast<Narrow>(Op::apply(static_cast<float>(from[i]), static_cast<float>(to[i])));
}

template <typename Narrow>
void create_ops(MPI_Op (&ops)[4]) {
  MPI_User_function* const functions[] = {reduce_narrow<Narrow, AddOp>, reduce_narrow<Narrow, MinOp>,
                                          reduce_narrow<Narrow, MaxOp>, reduce_narrow<Narrow, MultiplyOp>};
  for (int i = 0; i < 4; ++i) check_mpi_result(api().Op_create(functions[i], /*commutes=*/1, &ops[i]), "MPI_Op_create");
}

pid_t mpi_process = 0;  // that has initialized MPI

/// Waits for MPI_Finalize() for at most kFinalizeTimeout, because it waits for the other ranks, which may never call
/// it.
void finalize_mpi() {
  if (::getpid() != mpi_process) return;  // a child that the rank has forked
  int finalized = 0;
  api().Finalized(&finalized);
  if (finalized) return;
  std::promise<void> ended;
  auto end = ended.get_future();
  base::start_thread([ended = std::move(ended)]() mutable {
    api().Finalize();
    ended.set_value();
  }).detach();
  end.wait_for(kFinalizeTimeout);
}

/// The index of an operator in the tables of this file. A mean is a sum that is divided afterwards.
std::size_t op_index(ReduceOp op) {
  switch (op) {
    case ReduceOp::kMin: return 1;
    case ReduceOp::kMax: return 2;
    case ReduceOp::kProduct: return 3;
    case ReduceOp::kMean:
    case ReduceOp::kSum: return 0;
  }
  throw base::UsageError("mpi: unknown reduce operator " + std::to_string(static_cast<int>(op)));
}

}  // namespace

void check_mpi_result(int code, const char* what) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  api().Error_string(code, text, &length);
  throw std::runtime_error(std::string(what) + ": " + std::string(text, static_cast<std::size_t>(length)));
}

MpiRuntime& MpiRuntime::this_process() {
  // Never destroyed: transports in static objects outlive main().
  static MpiRuntime* const runtime = new MpiRuntime;
  return *runtime;
}

MpiRuntime::MpiRuntime() {
  check_mpi_library();
  int ready = 0;
  api().Initialized(&ready);
  int level = MPI_THREAD_SINGLE;
  if (ready) {
    api().Query_thread(&level);
  } else {
    check_mpi_result(api().Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &level), "MPI_Init_thread");
    mpi_process = ::getpid();
    std::atexit(finalize_mpi);
  }
  if (level < MPI_THREAD_SERIALIZED)
    throw base::UsageError("transport mpi: MPI was initialised with thread level " + std::to_string(level) +
                           "; expected MPI_THREAD_SERIALIZED or MPI_THREAD_MULTIPLE");
  api().Comm_set_errhandler(api().world, api().errors_return);
  api().Comm_rank(api().world, &rank_);
  api().Comm_size(api().world, &size_);
  create_ops<c10::Half>(narrow_ops_[0]);
  create_ops<c10::BFloat16>(narrow_ops_[1]);
}

bool MpiRuntime::is_usable() const {
  int finalized = 0;
  api().Finalized(&finalized);
  return finalized == 0;
}

MPI_Datatype MpiRuntime::type(at::ScalarType dtype) const {
  switch (dtype) {
    case at::kDouble: return api().float64;
    case at::kFloat: return api().float32;
    case at::kLong: return api().int64;
    case at::kInt: return api().int32;
    case at::kChar: return api().int8;
    case at::kHalf:
    case at::kBFloat16: return api().uint16;
    case at::kByte:
    case at::kBool: return api().uint8;
    default:
      throw base::UsageError("mpi: dtype " + std::string(c10::toString(dtype)) + "; expected one that Group accepts");
  }
}

MPI_Op MpiRuntime::op(ReduceOp op, at::ScalarType dtype) const {
  const MPI_Op plain[] = {api().sum, api().min, api().max, api().product};
  const MPI_Op of_bools[] = {api().max, api().min, api().max, api().min};
  const std::size_t index = op_index(op);
  if (dtype == at::kBool) return of_bools[index];
  if (dtype == at::kHalf) return narrow_ops_[0][index];
  if (dtype == at::kBFloat16) return narrow_ops_[1][index];
  return plain[index];
}

}  // namespace lockstep::comm::mpi

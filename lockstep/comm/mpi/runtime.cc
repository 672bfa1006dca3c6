#include "lockstep/comm/mpi/runtime.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <future>
#include <stdexcept>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/base/thread.h"
#include "lockstep/comm/mpi/mpi.h"

namespace lockstep::comm::mpi {
namespace {

/// Returns the address of a symbol of a loaded library, or nullptr. A preloaded library comes first.
void* find(const char* symbol) { return ::dlsym(RTLD_DEFAULT, symbol); }

void* find_or_throw(const std::string& symbol) {
  if (void* const address = find(symbol.c_str())) return address;
  throw base::UsageError("the MPI library that is loaded has no " + symbol + ", which " + to_string(build_time_mpi()) +
                             ", the MPI of this build, has",
                         "use the MPI of the build, or build with the one that is loaded",
                         base::Cause::kConfigMismatch);
}

/// Open MPI and the plugins that it loads find each other's symbols only if libmpi is global. It stays loaded.
void load_library() {
  if (find("MPI_Init_thread")) return;
  for (const char* const name : {LOCKSTEP_MPI_SONAME, LOCKSTEP_MPI_FILE})
    if (::dlopen(name, RTLD_NOW | RTLD_GLOBAL)) return;
  const char* const why = ::dlerror();
  throw base::UsageError("the MPI library " LOCKSTEP_MPI_SONAME " of " + to_string(build_time_mpi()) +
                             " cannot be loaded: " + (why ? why : "unknown reason"),
                         "install that MPI, or set LD_LIBRARY_PATH to the folder of its library");
}

#ifdef OMPI_MAJOR_VERSION
#define LOCKSTEP_MPI_HANDLE(handle, variable) static_cast<decltype(handle)>(find_or_throw(variable))
#else  // numbers
#define LOCKSTEP_MPI_HANDLE(handle, variable) (handle)
#endif

Api load_api() {
  Api all;
  load_library();
#define LOCKSTEP_MPI_LOAD(name) all.name = reinterpret_cast<decltype(all.name)>(find_or_throw("MPI_" #name));
  LOCKSTEP_MPI_FUNCTIONS(LOCKSTEP_MPI_LOAD)
#undef LOCKSTEP_MPI_LOAD
  all.world = LOCKSTEP_MPI_HANDLE(MPI_COMM_WORLD, "ompi_mpi_comm_world");
  all.no_comm = LOCKSTEP_MPI_HANDLE(MPI_COMM_NULL, "ompi_mpi_comm_null");
  all.no_request = LOCKSTEP_MPI_HANDLE(MPI_REQUEST_NULL, "ompi_request_null");
  all.no_info = LOCKSTEP_MPI_HANDLE(MPI_INFO_NULL, "ompi_mpi_info_null");
  all.errors_return = LOCKSTEP_MPI_HANDLE(MPI_ERRORS_RETURN, "ompi_mpi_errors_return");
  all.float64 = LOCKSTEP_MPI_HANDLE(MPI_DOUBLE, "ompi_mpi_double");
  all.float32 = LOCKSTEP_MPI_HANDLE(MPI_FLOAT, "ompi_mpi_float");
  all.int64 = LOCKSTEP_MPI_HANDLE(MPI_INT64_T, "ompi_mpi_int64_t");
  all.int32 = LOCKSTEP_MPI_HANDLE(MPI_INT32_T, "ompi_mpi_int32_t");
  all.int8 = LOCKSTEP_MPI_HANDLE(MPI_INT8_T, "ompi_mpi_int8_t");
  all.uint16 = LOCKSTEP_MPI_HANDLE(MPI_UINT16_T, "ompi_mpi_uint16_t");
  all.uint8 = LOCKSTEP_MPI_HANDLE(MPI_UINT8_T, "ompi_mpi_uint8_t");
  all.sum = LOCKSTEP_MPI_HANDLE(MPI_SUM, "ompi_mpi_op_sum");
  all.min = LOCKSTEP_MPI_HANDLE(MPI_MIN, "ompi_mpi_op_min");
  all.max = LOCKSTEP_MPI_HANDLE(MPI_MAX, "ompi_mpi_op_max");
  all.product = LOCKSTEP_MPI_HANDLE(MPI_PROD, "ompi_mpi_op_prod");
  return all;
}

constexpr auto kFinalizeTimeout = std::chrono::seconds(5);

float smaller(float a, float b) { return std::min(a, b); }
float larger(float a, float b) { return std::max(a, b); }

/// MPI has neither float16 nor bfloat16, so their bits are sent as uint16.
template <typename Narrow, auto op>
void reduce_narrow(void* in, void* in_out, int* count, MPI_Datatype*) {
  const auto* from = static_cast<const Narrow*>(in);
  auto* to = static_cast<Narrow*>(in_out);
  for (int i = 0; i < *count; ++i)
    to[i] = static_cast<Narrow>(op(static_cast<float>(from[i]), static_cast<float>(to[i])));
}

template <typename Narrow>
void create_ops(MPI_Op (&ops)[4]) {
  MPI_User_function* const functions[] = {reduce_narrow<Narrow, std::plus<float>{}>, reduce_narrow<Narrow, smaller>,
                                          reduce_narrow<Narrow, larger>,
                                          reduce_narrow<Narrow, std::multiplies<float>{}>};
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

const Api& api() {
  static const Api all = load_api();
  return all;
}

MpiLibrary build_time_mpi() {
#ifdef OMPI_MAJOR_VERSION
  return {"Open MPI", std::to_string(OMPI_MAJOR_VERSION) + "." + std::to_string(OMPI_MINOR_VERSION)};
#else
  return parse_mpi_library(LOCKSTEP_MPI_BUILT_WITH);
#endif
}

MpiLibrary loaded_mpi() {
  load_library();  // not api(): a library of another implementation may lack some
  const auto get_version =
      reinterpret_cast<decltype(&MPI_Get_library_version)>(find_or_throw("MPI_Get_library_version"));
  char text[MPI_MAX_LIBRARY_VERSION_STRING + 1] = {};
  int length = 0;
  get_version(text, &length);
  return parse_mpi_library(text);
}

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

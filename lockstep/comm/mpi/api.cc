#include "lockstep/comm/mpi/api.h"

#include <dlfcn.h>

#include <string>

#include "lockstep/base/error.h"

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

}  // namespace lockstep::comm::mpi

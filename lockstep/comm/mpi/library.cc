#include "lockstep/comm/mpi/library.h"

#include <algorithm>
#include <regex>

namespace lockstep::comm::mpi {
namespace {

constexpr std::string_view kOpenMpi = "Open MPI";
constexpr std::size_t kMaxNameLength = 60;

}  // namespace

MpiLibrary parse_mpi_library(std::string_view text) {
  text = text.substr(0, text.find('\n'));
  static const std::regex version("[ \\t]v?([0-9]+\\.[0-9]+)");
  std::cmatch found;
  const bool has_version = std::regex_search(text.data(), text.data() + text.size(), found, version);
  const std::size_t before_version = has_version ? static_cast<std::size_t>(found.position(1)) : text.size();
  // The first words of the known implementations and their names.
  constexpr std::string_view kNames[][2] = {{"Open MPI", kOpenMpi},
                                            {"Intel(R) MPI", "Intel MPI"},
                                            {"MVAPICH", "MVAPICH"},
                                            {"CRAY MPICH", "Cray MPICH"},
                                            {"MPICH", "MPICH"}};
  MpiLibrary library{.name = std::string(text.substr(0, std::min(before_version, kMaxNameLength)))};
  for (const auto& [mark, name] : kNames)
    if (text.starts_with(mark)) {
      library.name = name;
      break;
    }
  while (!library.name.empty() && (library.name.back() == ' ' || library.name.back() == '\t')) library.name.pop_back();
  if (has_version) library.version = found.str(1);
  return library;
}

std::string to_string(const MpiLibrary& library) {
  return library.version.empty() ? library.name : library.name + " " + library.version;
}

std::string mpi_library_mismatch(const MpiLibrary& built, const MpiLibrary& loaded) {
  if (built.name.empty() || (built.name == loaded.name && built.version == loaded.version)) return "";
  return "this program was built with " + to_string(built) + ", but the MPI library that is loaded is " +
         to_string(loaded);
}

std::string mpi_launcher_mismatch(const base::Env& env, const MpiLibrary& library) {
  const bool open_mpi = library.name == kOpenMpi;
  const std::string ours = "this program's MPI is " + to_string(library);
  if (env.ompi_comm_world_rank)
    return open_mpi ? "" : "the ranks were started by Open MPI's mpirun (OMPI_COMM_WORLD_RANK is set), but " + ours;
  if (env.pmix_rank) return "";
  if (!env.pmi_rank)
    return "the ranks were not started by an MPI launcher (none of OMPI_COMM_WORLD_RANK, PMIX_RANK and PMI_RANK is "
           "set)";
  if (!open_mpi) return "";
  return "the ranks were started by a launcher of another MPI (MPICH's mpiexec and srun --mpi=pmi2 set PMI_RANK; "
         "neither OMPI_COMM_WORLD_RANK nor PMIX_RANK is set), but " +
         ours;
}

}  // namespace lockstep::comm::mpi

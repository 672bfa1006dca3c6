#include "lockstep/comm/mpi/library.h"

#include <algorithm>
#include <cctype>

namespace lockstep::comm::mpi {
namespace {

constexpr std::string_view kOpenMpi = "Open MPI";
constexpr std::size_t kMaxNameLength = 60;

bool is_digit(std::string_view text, std::size_t at) {
  return at < text.size() && std::isdigit(static_cast<unsigned char>(text[at])) != 0;
}

/// Returns the end of the number that begins at `at`.
std::size_t skip_digits(std::string_view text, std::size_t at) {
  while (is_digit(text, at)) ++at;
  return at;
}

/// Returns the position of the first number like "4.1" that follows a space or " v"; npos if there is none.
std::size_t find_version(std::string_view text) {
  for (std::size_t at = 1; at < text.size(); ++at) {
    if (!is_digit(text, at)) continue;
    const std::size_t before = text[at - 1] == 'v' && at > 1 ? at - 2 : at - 1;
    const std::size_t dot = skip_digits(text, at);
    if ((text[before] == ' ' || text[before] == '\t') && dot < text.size() && text[dot] == '.' &&
        is_digit(text, dot + 1))
      return at;
    at = dot;
  }
  return std::string_view::npos;
}

}  // namespace

MpiLibrary parse_mpi_library(std::string_view text) {
  text = text.substr(0, text.find('\n'));
  const std::size_t version = find_version(text);
  // The first words of the known implementations and their names.
  constexpr std::string_view kNames[][2] = {{"Open MPI", kOpenMpi},
                                            {"Intel(R) MPI", "Intel MPI"},
                                            {"MVAPICH", "MVAPICH"},
                                            {"CRAY MPICH", "Cray MPICH"},
                                            {"MPICH", "MPICH"}};
  MpiLibrary library{.name = std::string(text.substr(0, std::min(version, kMaxNameLength)))};
  for (const auto& [mark, name] : kNames)
    if (text.starts_with(mark)) {
      library.name = name;
      break;
    }
  while (!library.name.empty() && (library.name.back() == ' ' || library.name.back() == '\t')) library.name.pop_back();
  if (version == std::string_view::npos) return library;
  const std::size_t dot = skip_digits(text, version);
  library.version = text.substr(version, skip_digits(text, dot + 1) - version);
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

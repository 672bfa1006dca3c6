// Which MPI: the one that this build was made with, the one that is loaded, and the one whose launcher has started the
// ranks.
#pragma once

#include <string>
#include <string_view>

#include "lockstep/base/env.h"

namespace lockstep::comm {

/// "Open MPI" 4.1; without a number where there is none.
struct MpiLibrary {
  std::string name;
  std::string version;  ///< major and minor
};

/// What MPI_Get_library_version() says, read: its first words up to a version, the version's first two numbers. Takes
/// the texts of Open MPI, MPICH, Intel MPI, MVAPICH and Cray MPICH; of others the name is the first line.
MpiLibrary parse_mpi_library(std::string_view text);

std::string to_string(const MpiLibrary& library);

/// "" when a program that was built with `built` can use `loaded`: the same name, and the same major and minor version,
/// or nobody knows what it was built with. Else what is wrong.
std::string mpi_library_mismatch(const MpiLibrary& built, const MpiLibrary& loaded);

/// "" when the ranks were started by a launcher whose MPI can be `library`, as far as `env` tells; else why not. Open
/// MPI speaks its own and PMIx, the others PMI; started by another, each rank would be a world of one, or MPI would end
/// the process.
std::string mpi_launcher_mismatch(const base::Env& env, const MpiLibrary& library);

}  // namespace lockstep::comm

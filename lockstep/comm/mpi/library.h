// Compares three MPI implementations: the one of the build, the loaded one, and the one whose launcher started the
// ranks.
#pragma once

#include <string>
#include <string_view>

#include "lockstep/base/env.h"

namespace lockstep::comm::mpi {

/// The name and version of an MPI implementation, for example "Open MPI" and "4.1".
struct MpiLibrary {
  std::string name;
  std::string version;  ///< major and minor version; empty if unknown
};

/// Parses the text of MPI_Get_library_version(): the words before the version, and the first two numbers of the
/// version. Recognizes Open MPI, MPICH, Intel MPI, MVAPICH and Cray MPICH; for other texts the name is the first line.
MpiLibrary parse_mpi_library(std::string_view text);

std::string to_string(const MpiLibrary& library);

/// Returns an empty string if a program that was built with `built` can use `loaded`: the name and the major and minor
/// version are equal, or the library of the build is unknown. Otherwise returns the reason.
std::string mpi_library_mismatch(const MpiLibrary& built, const MpiLibrary& loaded);

/// Returns an empty string if, according to `env`, a launcher that fits `library` started the ranks; otherwise the
/// reason. Open MPI uses its own protocol and PMIx, the other implementations use PMI. With the launcher of another
/// implementation each rank would be a world of one, or MPI would end the process.
std::string mpi_launcher_mismatch(const base::Env& env, const MpiLibrary& library);

}  // namespace lockstep::comm::mpi

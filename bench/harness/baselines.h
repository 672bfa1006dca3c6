// The peers that this machine has.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::bench {

/// An MPI that was found, with the measuring program (peers/mpi_all_reduce.c) compiled by it.
struct Mpi {
  std::string name;  ///< "openmpi-4.1.4", "mpich-5.0.2", "intel-mpi-2021.19"
  std::string mpirun;
  std::map<std::string, std::string> env;  ///< that it wants when it is not in PATH
  std::string program;
};

/// Where peers' sources and scripts are: beside the installed program, else in the source tree.
std::string baselines_folder();

/// The python that is given, else the one of scripts/setup.sh in the source tree, else python3 in PATH; nothing when
/// that has no torch. Throws UsageError when the given one has none.
std::optional<std::string> find_python(const std::string& given);

/// The MPI in the folder `prefix`, or in PATH when that is empty; compiles the program into `folder`. Nothing when PATH
/// has none. Throws UsageError when `prefix` has none, and when the program does not compile.
std::optional<Mpi> find_mpi(const std::string& prefix, const std::string& folder);

/// "mpirun (Open MPI) 4.1.4 ..." -> "openmpi-4.1.4"; "" for what it does not know. Pure.
std::string mpi_name(const std::string& version_text);

/// Whether this MPI is an Open MPI, by its name.
bool is_open_mpi(const Mpi& mpi);

/// mpirun and its options for so many ranks, as its documentation wants them: bound as it binds by default;
/// oversubscribed when there are more ranks than cores.
std::vector<std::string> mpirun_arguments(const Mpi& mpi, int ranks);

}  // namespace lockstep::bench

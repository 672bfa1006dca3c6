// The baseline implementations that are installed on this machine: MPI and PyTorch in Python.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::bench {

/// An installed MPI, with the measuring program (bench/baselines/mpi_all_reduce.c) compiled for it.
struct Mpi {
  std::string name;  ///< "openmpi-4.1.4", "mpich-5.0.2", "intel-mpi-2021.19"
  std::string mpirun;
  std::map<std::string, std::string> env;  ///< variables that it needs when it is not in PATH
  std::string program;
};

/// Returns the folder with the sources and scripts of the baselines: beside the installed program, else in the source
/// tree.
std::string baselines_folder();

/// Returns a Python interpreter with torch: `given`, else the one that scripts/setup.sh installs in the source tree,
/// else python3 in PATH; nullopt if none has torch. Throws UsageError when `given` cannot import torch. Blocks while it
/// tries.
std::optional<std::string> find_python(const std::string& given);

/// Returns the MPI in `prefix`, or in PATH when `prefix` is empty, and compiles its program into `folder`; nullopt when
/// PATH has none. Throws UsageError when `prefix` has none or the program does not compile. Blocks while it compiles.
std::optional<Mpi> find_mpi(const std::string& prefix, const std::string& folder);

/// "mpirun (Open MPI) 4.1.4 ..." -> "openmpi-4.1.4"; "" for an unknown MPI. Pure.
std::string mpi_name(const std::string& version_text);

/// Returns whether this is Open MPI, by its name.
bool is_open_mpi(const Mpi& mpi);

/// Returns mpirun and its options for `ranks` ranks, with its default binding; with Open MPI, oversubscribed when there
/// are more ranks than cores.
std::vector<std::string> mpirun_arguments(const Mpi& mpi, int ranks);

}  // namespace lockstep::bench

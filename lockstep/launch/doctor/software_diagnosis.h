// Turns facts about the software of hosts (the program, its libraries, torch, the driver, MPI) into findings. Pure.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "lockstep/launch/doctor/diagnosis.h"

namespace lockstep::launcher::doctor {

/// The versions of software on one host, parsed from the output of tools.
struct Software {
  std::string libtorch, libtorch_cuda, probe_nccl;    ///< from lockstep-probe; empty: unknown, or none
  std::string python, torch, torch_cuda, torch_nccl;  ///< from the program's Python interpreter
  std::string python_error, python_prefix;
  std::string active_environment;               ///< VIRTUAL_ENV or CONDA_PREFIX, if Python is not that one's
  std::string no_cuda;                          ///< why torch.cuda.is_available() is false
  std::map<std::string, std::string> packages;  ///< versions of those that the script imports; empty: missing
  std::vector<std::string> missing;             ///< libraries of the program that were not found
  int num_libraries = 0;                        ///< number of libraries that were found
  std::string program_libtorch;                 ///< path of the libtorch that the program loads
  struct Gpu {
    std::string name, driver;
    std::uint64_t mib = 0;
  };
  std::vector<Gpu> gpus;
  std::string open_mpi;  ///< version, such as "4.1.4"
};

/// Parses the output of the tools. What cannot be parsed stays empty.
Software parse_software(const HostFacts& facts);

/// Returns the major version of the oldest driver that runs programs for this CUDA version ("12.8"); 0 if unknown. The
/// source is the table of minor version compatibility in NVIDIA's "CUDA Compatibility".
int min_driver_for(const std::string& cuda);

/// Returns the version in a text, such as "4.1.4" in "mpirun (Open MPI) 4.1.4"; empty if there is none.
std::string find_version(const std::string& text);

/// Returns the findings about the software of each host. result[i] belongs to doctor_facts.hosts[i].
std::vector<std::vector<Finding>> diagnose_software(const DoctorFacts& doctor_facts);

}  // namespace lockstep::launcher::doctor

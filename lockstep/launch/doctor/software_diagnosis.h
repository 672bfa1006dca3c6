// Findings about the software of hosts: the program, its libraries, torch, the driver, MPI. Pure.
#pragma once

#include <string>
#include <vector>

#include "lockstep/launch/doctor/diagnosis.h"

namespace lockstep::launcher {

/// The parsed output of tools.
struct Software {
  std::string libtorch, libtorch_cuda, probe_nccl;    ///< of lockstep-probe; empty: unknown, or none
  std::string python, torch, torch_cuda, torch_nccl;  ///< of the program's Python
  std::string python_error;
  std::vector<std::string> missing;  ///< libraries of the program that were not found
  int num_libraries = 0;             ///< number of libraries that were found
  std::string program_libtorch;      ///< path of the libtorch that the program loads
  struct Gpu {
    std::string name, driver;
    std::uint64_t mib = 0;
  };
  std::vector<Gpu> gpus;
  std::string open_mpi;  ///< version, such as "4.1.4"
};

Software parse_software(const HostFacts& facts);

/// The oldest driver that runs programs for this CUDA version ("12.8"); 0: unknown. From NVIDIA's "CUDA Compatibility",
/// table of minor version compatibility.
int min_driver_for(const std::string& cuda);

/// The version in a text, such as "4.1.4" in "mpirun (Open MPI) 4.1.4"; empty if there is none.
std::string find_version(const std::string& text);

/// The findings about the software of each host: result[i] belongs to doctor_facts.hosts[i].
std::vector<std::vector<Finding>> diagnose_software(const DoctorFacts& doctor_facts);

}  // namespace lockstep::launcher

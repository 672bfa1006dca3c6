// The doctor's view of what runs on a host: the program, its libraries, torch, the driver, MPI. Pure.
#pragma once

#include <string>
#include <vector>

#include "lockstep/launch/doctor/diagnosis.h"

namespace lockstep::launcher {

/// What tools have said, read.
struct Software {
  std::string libtorch, libtorch_cuda, probe_nccl;    ///< of lockstep-probe; empty: not known, or none
  std::string python, torch, torch_cuda, torch_nccl;  ///< of the program's Python
  std::string python_error;
  std::vector<std::string> missing;  ///< libraries of the program that were not found
  int num_libraries = 0;             ///< that were
  std::string program_libtorch;      ///< file that the program loads
  struct Gpu {
    std::string name, driver;
    std::uint64_t mib = 0;
  };
  std::vector<Gpu> gpus;
  std::string open_mpi;  ///< version: "4.1.4"
};

Software parse_software(const HostFacts& found);

/// The oldest driver with which programs for this CUDA ("12.8") run; 0: not known. By NVIDIA's "CUDA Compatibility",
/// table of minor version compatibility.
int min_driver_for(const std::string& cuda);

/// "4.1.4" in "mpirun (Open MPI) 4.1.4"; empty when there is none.
std::string find_version(const std::string& text);

/// The findings about software of each host: result[i] of ward.hosts[i].
std::vector<std::vector<Finding>> diagnose_software(const DoctorFacts& doctor_facts);

}  // namespace lockstep::launcher

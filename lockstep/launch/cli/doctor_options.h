// What `lockstep doctor` was asked for.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/launch/cli/host_options.h"

namespace lockstep::launcher {

struct DoctorOptions : HostOptions {
  bool json = false;                        ///< one object instead of a table
  bool mpi = false;                         ///< look for what mpirun needs as well
  std::uint64_t model_bytes = 250'000'000;  ///< of gradients, that a step sends
  std::vector<std::string> command;         ///< the program that is meant to run, and its arguments; may be empty
};

/// Reads the words after the verb. The help text, when that was asked for, into `help`. Throws UsageError.
DoctorOptions parse_doctor_options(std::vector<std::string> words, std::string& help);

}  // namespace lockstep::launcher

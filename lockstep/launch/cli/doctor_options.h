// The options of `lockstep doctor`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/launch/cli/host_options.h"

namespace lockstep::launcher {

struct DoctorOptions : HostOptions {
  bool json = false;                        ///< print one JSON object instead of a table
  bool mpi = false;                         ///< also check what mpirun needs
  std::uint64_t model_bytes = 250'000'000;  ///< gradient bytes that one step sends
  std::vector<std::string> command;         ///< the program to be run later, and its arguments; may be empty
};

/// Parses the words after `lockstep doctor`. Stores the help text in `help` if --help is among them. Throws UsageError
/// or FormatError.
DoctorOptions parse_doctor_options(std::vector<std::string> words, std::string& help);

}  // namespace lockstep::launcher

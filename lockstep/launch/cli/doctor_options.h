// The options of `lockstep doctor`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/launch/cli/host_options.h"

namespace lockstep::launcher::cli {

struct DoctorOptions : HostOptions {
  bool json = false;                        ///< print one JSON object instead of a table
  bool mpi = false;                         ///< also check the requirements of mpirun
  std::uint64_t model_bytes = 250'000'000;  ///< gradient bytes that one step sends
  std::vector<std::string> command = {};    ///< the program to check, and its arguments; may be empty
};

/// Parses the words after `lockstep doctor`. If --help is among them, stores the help text in `help` and ignores the
/// other words. Throws UsageError or FormatError.
DoctorOptions parse_doctor_options(std::vector<std::string> words, std::string& help);

}  // namespace lockstep::launcher::cli

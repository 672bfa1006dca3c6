// The command line of horovodrun, for `lockstep horovodrun`.
#pragma once

#include <string>
#include <vector>

namespace lockstep::launcher::cli {

inline constexpr const char* kHorovodrunUsage =
    "usage: lockstep horovodrun [options of horovodrun] program [arguments...]\n"
    "\n"
    "Starts the program as lockstep run does, with the arguments of horovodrun: -np, -H, --hostfile,\n"
    "--network-interfaces, --output-filename, --start-timeout and --stall-check-shutdown-time-seconds.\n"
    "Options that tune Horovod are ignored. A Python script imports lockstep.horovod instead of\n"
    "horovod.torch.\n"
    "\n"
    "  Example: lockstep horovodrun -np 4 -H alpha:2,beta:2 python train.py\n";

/// Returns the arguments of `lockstep run` for those of horovodrun. Throws UsageError for an unknown option, and for
/// one that Lockstep does in another way, with that way as the hint. Pure.
std::vector<std::string> translate_horovodrun(const std::vector<std::string>& words);

}  // namespace lockstep::launcher::cli

// What an agent finds on its host when the doctor asks: facts only. What they mean is diagnosis.h's.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/base/net/socket.h"
#include "lockstep/launch/plan/job_plan.h"
#include "lockstep/launch/process/tools.h"

namespace lockstep::launcher {

/// What to look at.
struct HostFactsRequest {
  std::vector<std::string>
      command;  ///< the program that is meant to run, found as on the launcher's host, and its arguments; empty: none
  std::string directory;                 ///< that it starts in; empty: the agent's own
  bool extends_own_environment = false;  ///< as JobPlan has it
  Environment environment;
  bool mpi = false;
};

/// The file that a program is: of an interpreter the script.
struct ProgramFile {
  std::string path;
  std::string error;   ///< why it cannot run; empty: it can
  std::string hash;    ///< of what is in it; empty: it could not be read within 10 s
  std::string loader;  ///< of a dynamic ELF file, the program that loads it
  std::string python;  ///< that runs it; empty: it is no script of Python
};

struct HostFacts {
  ProgramFile program;
  ToolResult libraries;   ///< what the loader says of the program, as ldd shows it
  ToolResult python;      ///< a line of JSON: python, torch, cuda, nccl, or error
  ToolResult probe;       ///< of lockstep-probe: a line of JSON
  ToolResult nvidia_smi;  ///< nvidia-smi: name, memory in MiB and driver of each GPU, with commas between
  ToolResult resolved;    ///< getent ahosts of the host's own name
  std::string orted;      ///< in the agent's own PATH; empty: not there, or not asked for
  ToolResult mpirun;      ///< its version: of the one beside orted, which cannot be asked itself

  std::vector<base::InterfaceAddress> addresses;
  int cpus_online = 0;
  std::uint64_t memory_bytes = 0, available_bytes = 0;
  std::string limited_by;                           ///< what leaves no more memory
  std::uint64_t shm_bytes = 0, shm_free_bytes = 0;  ///< of /dev/shm; 0: there is none
  std::int64_t memlock_bytes = 0;                   ///< -1: no limit
  std::uint64_t files_soft = 0, files_hard = 0;
  bool infiniband = false;                                                 ///< it has such a device, RoCE as well
  std::uint64_t huge_pages = 0, huge_pages_free = 0, huge_page_bytes = 0;  ///< reserved ones
  std::string transparent_huge_pages;  ///< always, madvise or never; empty: not known
  double copy_bytes_per_s = 0;         ///< one core copying 64 MiB, the best of three
};

/// Looks at this host. Programs that it runs get 60 s at most, all at once, and are ended when the other end of `quit`
/// is closed. Call it from the main thread.
HostFacts collect_host_facts(const HostFactsRequest& order, int quit);

/// Of a file on this host. `environment` is what the program would get. Never throws for what is wrong with the file.
ProgramFile inspect_program(const std::vector<std::string>& command, const std::string& directory,
                            const Environment& environment);

}  // namespace lockstep::launcher

// Collects facts about a host for `lockstep doctor`. diagnosis.h judges them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/base/net/socket.h"
#include "lockstep/launch/process/tools.h"

namespace lockstep::launcher::doctor {

/// A program for `python -c`, with the path of the user's script as its argument, or none. It prints one line of JSON:
///
///   python, prefix       the version and sys.prefix
///   environment          VIRTUAL_ENV or CONDA_PREFIX, if it is another one than prefix
///   torch, cuda, nccl    versions; or error, if torch cannot be imported
///   no_cuda              why torch.cuda.is_available() is false
///   packages             {name: version} of the packages that the script, and the modules beside it, import at the top
///                        of a file or a function; "" for one that is missing, "?" without a known version. An import
///                        in a try block may be missing.
///
/// It parses the script and does not run it.
extern const char* const kPythonFacts;

struct HostFactsRequest {
  std::vector<std::string>
      command;            ///< the program to inspect, as found on the launcher's host, and its arguments; empty: none
  std::string directory;  ///< its working directory; empty: the agent's own
  bool extends_own_environment = false;  ///< as in JobPlan
  process::Environment environment;
  bool mpi = false;  ///< look for Open MPI as well
};

/// The file of a program. If the program is an interpreter, the file is the script that it runs.
struct ProgramFile {
  std::string path;
  std::string error;   ///< why it cannot run; empty: it can run
  std::string hash;    ///< hash of the content; empty: not read within 10 s
  std::string loader;  ///< path of the loader, if it is a dynamic ELF file
  std::string python;  ///< path of the Python interpreter that runs it; empty: it is not a Python script
};

struct HostFacts {
  ProgramFile program;
  process::ToolResult libraries;   ///< the loader's output for the program, as ldd prints it
  process::ToolResult python;      ///< the versions of Python, torch, CUDA and NCCL, or an error: one line of JSON
  process::ToolResult probe;       ///< the output of lockstep-probe: one line of JSON
  process::ToolResult nvidia_smi;  ///< name, memory in MiB and driver of each GPU, separated by commas
  process::ToolResult resolved;    ///< the output of getent ahosts for the host's own name
  std::string orted;               ///< path of orted in the agent's own PATH; empty: not found, or not requested
  process::ToolResult mpirun;      ///< version of the mpirun next to orted, because orted cannot report its own

  std::vector<base::net::InterfaceAddress> addresses;
  int cpus_online = 0;
  std::uint64_t memory_bytes = 0, available_bytes = 0;
  std::string memory_cgroup;  ///< the control group that limits available_bytes; empty if the host does
  std::uint64_t shm_bytes = 0, shm_free_bytes = 0;  ///< of /dev/shm; 0: not mounted
  std::int64_t memlock_bytes = 0;                   ///< -1: no limit
  std::uint64_t files_soft = 0, files_hard = 0;
  bool infiniband = false;  ///< the host has an InfiniBand or RoCE device
  std::uint64_t huge_pages = 0, huge_pages_free = 0, huge_page_bytes = 0;  ///< reserved huge pages
  std::string transparent_huge_pages;                                      ///< always, madvise or never; empty: unknown
  double copy_bytes_per_s = 0;  ///< speed at which one core copies 64 MiB: the best of three runs
};

/// Collects the facts about this host. Blocks for at most 60 s while all tools run at once, and for at most 10 s while
/// it hashes the program. It kills the tools when the other end of `quit` is closed. Call it from the main thread.
HostFacts collect_host_facts(const HostFactsRequest& request, int quit);

/// Inspects a program on this host. `environment` is the environment that the program would get. Returns a problem with
/// the file in ProgramFile::error and does not throw it.
ProgramFile inspect_program(const std::vector<std::string>& command, const std::string& directory,
                            const process::Environment& environment);

}  // namespace lockstep::launcher::doctor

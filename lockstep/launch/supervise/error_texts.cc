#include "lockstep/launch/supervise/error_texts.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"

namespace lockstep::launcher::supervise {
namespace {

constexpr const char* kSharedMemoryFull =
    "/dev/shm is full: enlarge it (docker run --shm-size=8g, or in a pod an emptyDir with medium: Memory), or use "
    "fewer workers";

constexpr const char* kNoSharedMemory =
    "/dev/shm is not mounted, or not writable: mount a tmpfs there (in a pod an emptyDir with medium: Memory), or use "
    "num_workers=0";

const std::vector<KnownError> kTable = {
    {"bdb.BdbQuit", "breakpoint() has read the end of its input: start with lockstep run --stdin 0, or --stdin all"},
    {"Duplicate GPU detected",
     "two ranks use one GPU: call torch.cuda.set_device(int(os.environ[\"LOCAL_RANK\"])) before init_process_group()"},
    {"unhandled cuda error",
     "the line after \"Last error\" has the cause; often the driver is too old for this CUDA, or the GPU is full or "
     "used by another rank: see lockstep doctor, and run with NCCL_DEBUG=WARN"},
    {"unhandled system error",
     "a socket or a file of NCCL failed: check NCCL_SOCKET_IFNAME, the size of /dev/shm (docker run --shm-size) and "
     "ulimit -n, and run with NCCL_DEBUG=WARN"},
    {"ncclInternalError", "run with NCCL_DEBUG=WARN, which prints the cause; often a network interface is missing"},
    {"Unable to find interface for",
     "GLOO_SOCKET_IFNAME or the host's name is wrong; leave it unset, as lockstep run sets it, or see ip addr"},
    {"Unable to find address for", "GLOO_SOCKET_IFNAME names an interface that this host does not have: see ip addr"},
    {"op.preamble.length <= op.nbytes",
     "ranks passed tensors of different sizes to one collective, or made different calls: look for a call inside 'if "
     "rank == 0'"},
    {"gloo::EnforceNotMet",
     "the text after the file name has the condition that failed; often the ranks made different calls, or the network "
     "interface is wrong (GLOO_SOCKET_IFNAME)"},
    {"Detected mismatch between collectives on ranks",
     "every rank must make the same calls in the same order: look for a call inside 'if rank == 0'"},
    {"modified by an inplace operation",
     "with two forward passes before one backward(), DistributedDataParallel changes buffers of BatchNorm: pass "
     "broadcast_buffers=False, or use lockstep.DistributedDataParallel; otherwise "
     "torch.autograd.set_detect_anomaly(True) names the operation"},
    {"Expected to have finished reduction in the prior iteration",
     "a parameter has no gradient in this step: pass find_unused_parameters=True, or use "
     "lockstep.DistributedDataParallel, which needs no option for that"},
    {"Expected to mark a variable ready only once",
     "a parameter is used in two nested backward passes: use checkpoint(..., use_reentrant=False), or "
     "lockstep.DistributedDataParallel"},
    {"CUDA out of memory",
     "lower the batch size; if only GPU 0 is full, pass map_location to torch.load() and call torch.cuda.set_device() "
     "with LOCAL_RANK first"},
    {"CUBLAS_STATUS_ALLOC_FAILED",
     "the GPU's memory is full: lower the batch size, or look for other processes with nvidia-smi"},
    {"invalid device ordinal",
     "a rank uses a GPU that does not exist: take LOCAL_RANK instead of RANK, and start no more ranks than GPUs"},
    {"device-side assert triggered",
     "an index is out of range, often a label that is not below the number of classes: run with "
     "CUDA_LAUNCH_BLOCKING=1, or on the CPU"},
    {"an illegal memory access was encountered",
     "run with CUDA_LAUNCH_BLOCKING=1 to find the operation, and with compute-sanitizer for own kernels"},
    {"Torch not compiled with CUDA enabled", "this torch is for CPUs only: install one for CUDA (pytorch.org)"},
    {"NVIDIA driver on your system is too old", "update the driver, or install a torch for an older CUDA"},
    {"Found no NVIDIA driver", "this host has no GPU or no driver: run nvidia-smi there"},
    {"no CUDA-capable device is detected",
     "CUDA_VISIBLE_DEVICES hides all GPUs, or the container has none: see nvidia-smi"},
    {"Cannot re-initialize CUDA in forked subprocess",
     "do not use CUDA in workers of a DataLoader, or start them with multiprocessing_context=\"spawn\""},
    {"Distributed package doesn't have NCCL built in", "use the backend \"gloo\", or install a torch with CUDA"},
    {"No backend type associated with device type cpu",
     "NCCL takes tensors on GPUs only: move the tensor, or use init_process_group(\"cpu:gloo,cuda:nccl\")"},
    {"address already in use",
     "another job, or another rank of a script that starts processes by itself (mp.spawn), has MASTER_PORT: do not set "
     "it, as lockstep run finds a free port; start such a script with -n 1"},
    {"environment variable RANK expected", "start the script with lockstep run"},
    {"Default process group has not been initialized", "call torch.distributed.init_process_group() first"},
    {"initialize the default process group twice", "call init_process_group() once, or test is_initialized() before"},
    {"Watchdog caught collective operation timeout",
     "a rank did not reach this collective: `lockstep run --hang-timeout` ends the job earlier, and names it"},
    {"Timed out waiting for clients", "not all ranks have reached init_process_group(): see the first failure above"},
    {"unrecognized arguments: --local",
     "the script does not know this argument: leave out --pass-local-rank, or read os.environ[\"LOCAL_RANK\"]"},
    {"arguments are required: --local",
     "add --pass-local-rank=NAME to lockstep run, with this name, or read os.environ[\"LOCAL_RANK\"]"},
    {"No module named 'amp_C'", "Apex was built without its extensions; torch.amp and fused=True replace it"},
    {"No module named 'apex'", "torch.amp.autocast and torch.amp.GradScaler replace it"},
    {"No module named 'horovod", "import lockstep.horovod as hvd replaces import horovod.torch as hvd"},
    {"No module named",
     "the interpreter that lockstep run found lacks this package: activate its environment, or name the interpreter "
     "with its path; lockstep doctor compares the hosts"},
    {"Missing key(s) in state_dict: \"module.",
     "the model is wrapped and the file is not: load it into model.module, or before DistributedDataParallel"},
    {"Unexpected key(s) in state_dict: \"module.",
     "the file was saved from a wrapped model: remove \"module.\" from its names, or save model.module"},
    {"Weights only load failed", "the file has more than tensors: pass weights_only=False if you trust it"},
    {"'DistributedDataParallel' object has no attribute",
     "the model is wrapped: use model.module, or keep a variable for the model itself"},
    {"Device index must not be negative",
     "the script expects the rank as an argument: add --pass-local-rank to lockstep run, or read "
     "os.environ[\"LOCAL_RANK\"]"},
    {"getpwuid", "this user has no name here, as in a container that runs as another user: set USER and HOME"},
    {"No usable temporary directory",
     "set TMPDIR to a folder that this user can write to: in a pod, mount an emptyDir there"},
    {"unable to open shared memory object", kNoSharedMemory},
    {"_multiprocessing.SemLock(", kNoSharedMemory},
    {"unable to allocate shared memory", kSharedMemoryFull},
    {"unable to write to file </torch_", kSharedMemoryFull},
    {"bytes from file </torch_", kSharedMemoryFull},
    {"insufficient shared memory", kSharedMemoryFull},
    {"killed by signal: Bus error", kSharedMemoryFull},
    {"killed by signal: Killed",
     "a worker of the DataLoader was killed, most likely because the host's memory was full: use fewer workers"},
    {"killed by signal: ", "a worker of the DataLoader died: num_workers=0 shows where"},
    {"exited unexpectedly",
     "a worker of the DataLoader ended: num_workers=0 shows its error; if there is none, the host or /dev/shm was "
     "full"},
    {"can't start new thread", "raise ulimit -u, or pids.max of the control group (docker run --pids-limit)"},
    {"Too many open files", "raise ulimit -n, or call torch.multiprocessing.set_sharing_strategy(\"file_system\")"},
    {"OutOfMemoryError: arena: ", "use a smaller model or a smaller batch, or fewer ranks on this host"},
    {"can't allocate memory",
     "the host, or the limit of this job, has no memory left: lower the batch size, or run fewer ranks"},
    {"No space left on device", "a disk or /dev/shm is full: see df"},
    {"Read-only file system",
     "write to a folder on a volume, which --cwd can name; for temporary files set TMPDIR, in a pod to an emptyDir"},
    {"Expected all tensors to be on the same device", "move the batch and the model to the GPU of this rank"},
    {"Mismatched allreduce tensor shapes", "ranks passed tensors of different shapes under one name to Horovod"},
    {"Horovod has not been initialized", "call hvd.init() first"},
    {"Horovod has been shut down", "another rank ended first: see its last lines above", true},
    {"ncclRemoteError", "another rank ended first: see its last lines above", true},
    {"NCCL communicator was aborted", "another rank ended first: see its last lines above", true},
    {"remote process has exited", "another rank ended first: see its last lines above", true},
    {"Connection closed by peer", "another rank ended first: see its last lines above", true},
    {"Connection reset by peer", "another rank ended first: see its last lines above", true},
    {"Broken pipe", "another process ended first: see the last lines above", true},
};

}  // namespace

const std::vector<KnownError>& known_errors() { return kTable; }

std::vector<KnownError> parse_known_errors(std::string_view file, std::string_view name) {
  std::vector<KnownError> rows;
  int number = 0;
  for (const std::string& line : base::split(file, '\n')) {
    ++number;
    if (line.empty() || line[0] == '#') continue;
    const std::size_t tab = line.find('\t');
    if (tab == std::string::npos || tab == 0 || tab + 1 == line.size())
      throw base::UsageError(std::string(name) + ":" + std::to_string(number) + ": " + base::quoted(line, 80) +
                             "; expected a part of an error's text, a tab, and the remedy");
    rows.push_back({line.substr(0, tab), line.substr(tab + 1)});
  }
  return rows;
}

std::vector<KnownError> read_own_errors() {
  const auto& path = base::Env::this_process().lockstep_error_hints;
  if (!path) return {};
  std::error_code unknown;
  std::ifstream file;
  if (std::filesystem::is_regular_file(*path, unknown)) file.open(*path);  // a fifo would block
  std::string text(std::size_t{1} << 20, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (!file.is_open() || file.gcount() == static_cast<std::streamsize>(text.size()))
    throw base::UsageError("LOCKSTEP_ERROR_HINTS is " + base::quoted(*path, 256) +
                           "; expected a file that can be read, of at most 1 MiB");
  text.resize(static_cast<std::size_t>(file.gcount()));
  return parse_known_errors(text, *path);
}

std::vector<KnownError> own_errors_or_none() {
  try {
    return read_own_errors();
  } catch (const base::Error&) {
    return {};
  }
}

const KnownError* find_known_error(std::string_view lines, const std::vector<KnownError>& table) {
  const auto found = std::ranges::find_if(table, [&](const KnownError& row) {
    // Without regard to case: "Address already in use" and "EADDRINUSE: address already in use".
    return std::search(lines.begin(), lines.end(), row.text.begin(), row.text.end(), [](char a, char b) {
             return std::tolower(static_cast<unsigned char>(a)) == std::tolower(static_cast<unsigned char>(b));
           }) != lines.end();
  });
  return found == table.end() ? nullptr : &*found;
}

bool is_victim(std::string_view text) {
  static const std::vector<KnownError> rows = [] {
    std::vector<KnownError> victims = known_errors();
    std::erase_if(victims, [](const KnownError& row) { return !row.is_victim; });
    return victims;
  }();
  return find_known_error(text, rows) != nullptr;
}

int lost_port(std::string_view text) {
  const std::size_t end = text.rfind("]:");
  if (end == std::string_view::npos) return 0;
  const std::size_t digits = end + 2, size = text.find_first_not_of("0123456789", digits) - digits;
  const auto port = base::parse_int(text.substr(digits, size));
  return port && *port > 0 && *port < 65536 ? static_cast<int>(*port) : 0;
}

}  // namespace lockstep::launcher::supervise

#include "lockstep/launch/supervise/error_texts.h"

#include <algorithm>
#include <cctype>
#include <fstream>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"

namespace lockstep::launcher::supervise {
namespace {

constexpr std::size_t kMaxMessageBytes = 400;

const std::vector<KnownError> kTable = {
    {"Duplicate GPU detected",
     "two ranks use one GPU: call torch.cuda.set_device(int(os.environ[\"LOCAL_RANK\"])) before "
     "init_process_group()"},
    {"unhandled cuda error",
     "the line after \"Last error\" has the cause; often the driver is too old for this CUDA, or the GPU is full or "
     "used by another rank: see lockstep doctor, and run with NCCL_DEBUG=WARN"},
    {"unhandled system error",
     "a socket or a file of NCCL failed: check NCCL_SOCKET_IFNAME, the size of /dev/shm (docker run --shm-size) and "
     "ulimit -n, and run with NCCL_DEBUG=WARN"},
    {"ncclInternalError", "run with NCCL_DEBUG=WARN, which prints the cause; often a network interface is missing"},
    {"Unable to find interface for",
     "GLOO_SOCKET_IFNAME or the host's name is wrong; leave it unset, as lockstep "
     "run sets it, or see ip addr"},
    {"Unable to find address for", "GLOO_SOCKET_IFNAME names an interface that this host does not have: see ip addr"},
    {"op.preamble.length <= op.nbytes",
     "ranks passed tensors of different sizes to one collective, or made different calls: look for a call inside "
     "'if rank == 0'"},
    {"gloo::EnforceNotMet",
     "the text after the file name has the condition that failed; often the ranks made "
     "different calls, or the network interface is wrong (GLOO_SOCKET_IFNAME)"},
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
     "lower the batch size; if only GPU 0 is full, pass map_location to torch.load() and call "
     "torch.cuda.set_device() "
     "with LOCAL_RANK first"},
    {"CUBLAS_STATUS_ALLOC_FAILED",
     "the GPU's memory is full: lower the batch size, or look for other processes with "
     "nvidia-smi"},
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
     "CUDA_VISIBLE_DEVICES hides all GPUs, or the container has none: see "
     "nvidia-smi"},
    {"Cannot re-initialize CUDA in forked subprocess",
     "do not use CUDA in workers of a DataLoader, or start them with multiprocessing_context=\"spawn\""},
    {"Distributed package doesn't have NCCL built in", "use the backend \"gloo\", or install a torch with CUDA"},
    {"No backend type associated with device type cpu",
     "NCCL takes tensors on GPUs only: move the tensor, or use init_process_group(\"cpu:gloo,cuda:nccl\")"},
    {"address already in use", "another job has MASTER_PORT: do not set it; lockstep run finds a free port"},
    {"environment variable RANK expected", "start the script with lockstep run"},
    {"Default process group has not been initialized", "call torch.distributed.init_process_group() first"},
    {"initialize the default process group twice", "call init_process_group() once, or test is_initialized() before"},
    {"Watchdog caught collective operation timeout",
     "a rank did not reach this collective: `lockstep run --hang-timeout` ends the job earlier, and names it"},
    {"Timed out waiting for clients", "not all ranks have reached init_process_group(): see the first failure above"},
    {"unrecognized arguments: --local",
     "the script does not know this argument: leave out --local-rank-argument, or read os.environ[\"LOCAL_RANK\"]"},
    {"arguments are required: --local",
     "add --local-rank-argument with this name to lockstep run, or read "
     "os.environ[\"LOCAL_RANK\"]"},
    {"No module named 'amp_C'", "Apex was built without its extensions; torch.amp and fused=True replace it"},
    {"No module named 'apex'", "torch.amp.autocast and torch.amp.GradScaler replace it"},
    {"No module named",
     "the interpreter that lockstep run found lacks this package: activate its environment, or "
     "name the interpreter with its path; lockstep doctor compares the hosts"},
    {"Missing key(s) in state_dict: \"module.",
     "the model is wrapped and the file is not: load it into model.module, or before DistributedDataParallel"},
    {"Unexpected key(s) in state_dict: \"module.",
     "the file was saved from a wrapped model: remove \"module.\" from its names, or save model.module"},
    {"Weights only load failed", "the file has more than tensors: pass weights_only=False if you trust it"},
    {"insufficient shared memory", "enlarge /dev/shm (docker run --shm-size=8g), or use fewer workers"},
    {"killed by signal: Bus error", "/dev/shm is full: enlarge it (docker run --shm-size=8g), or use fewer workers"},
    {"killed by signal: Killed",
     "a worker of the DataLoader was killed, most likely because the host's memory was "
     "full: use fewer workers"},
    {"Too many open files", "raise ulimit -n, or call torch.multiprocessing.set_sharing_strategy(\"file_system\")"},
    {"No space left on device", "a disk or /dev/shm is full: see df"},
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

/// Whether a line without indentation is the message of an exception: "ValueError: bad value", "torch.cuda.
/// OutOfMemoryError: ...", or only a name, "KeyboardInterrupt".
bool is_exception(std::string_view line) {
  const std::string_view name = line.substr(0, std::min(line.find(':'), line.size()));
  if (name.empty() || std::isdigit(static_cast<unsigned char>(name[0]))) return false;
  return std::all_of(name.begin(), name.end(),
                     [](char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '.'; });
}

std::string_view without_prefix(std::string_view line, std::string_view prefix) {
  return line.starts_with(prefix) ? line.substr(prefix.size()) : line;
}

/// Without "[rank1]: ", which torch.distributed adds to each line of an exception.
std::string_view without_rank(std::string_view line) {
  constexpr std::string_view kStart = "[rank", kEnd = "]: ";
  if (!line.starts_with(kStart)) return line;
  const std::size_t digits = line.find_first_not_of("0123456789", kStart.size());
  const bool complete = digits != std::string_view::npos && line.substr(digits).starts_with(kEnd);
  return complete ? line.substr(digits + kEnd.size()) : line;
}

std::string shortened(std::string_view text) {
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back()))) text.remove_suffix(1);
  return std::string(text.substr(0, kMaxMessageBytes)) + (text.size() > kMaxMessageBytes ? "..." : "");
}

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
  std::ifstream file(*path);
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

std::string python_exception(std::string_view tail, std::string_view prefix) {
  std::string message;
  bool in_traceback = false, after_last_error = false;
  for (const std::string& whole : base::split(tail, '\n')) {
    const std::string_view line = without_rank(without_prefix(whole, prefix));
    if (line.starts_with("  File \"")) {  // the line "Traceback (most recent call last)" may be missing from the tail
      in_traceback = true;
    } else if (in_traceback && !line.empty() && line[0] != ' ') {
      if (is_exception(line)) message = line;
      in_traceback = false;
    } else if (line.starts_with("Last error:")) {
      after_last_error = true;  // NCCL's cause is in the next line
      continue;
    } else if (after_last_error && !message.empty()) {
      message += " (" + std::string(line) + ")";
    } else if (!in_traceback && line.find(": error: ") != std::string_view::npos && message.empty()) {
      message = line;  // of argparse, which prints no traceback
    }
    after_last_error = false;
  }
  return shortened(message);
}

const KnownError* find_known_error(std::string_view lines, const std::vector<KnownError>& table) {
  const auto found = std::find_if(table.begin(), table.end(), [&](const KnownError& row) {
    // Without regard to case: "Address already in use" and "EADDRINUSE: address already in use".
    return std::search(lines.begin(), lines.end(), row.text.begin(), row.text.end(), [](char a, char b) {
             return std::tolower(static_cast<unsigned char>(a)) == std::tolower(static_cast<unsigned char>(b));
           }) != lines.end();
  });
  return found == table.end() ? nullptr : &*found;
}

bool is_victim(std::string_view tail, std::string_view prefix) {
  static const std::vector<KnownError> rows = [] {
    std::vector<KnownError> victims = known_errors();
    std::erase_if(victims, [](const KnownError& row) { return !row.is_victim; });
    return victims;
  }();
  // Lines before the exception may be about other connections.
  const std::string exception = python_exception(tail, prefix);
  return find_known_error(exception.empty() ? tail : exception, rows) != nullptr;
}

int lost_port(std::string_view tail, std::string_view prefix) {
  std::string text = python_exception(tail, prefix);
  if (text.empty()) text = tail;
  const std::size_t end = text.rfind("]:");
  if (end == std::string::npos) return 0;
  const std::size_t digits = end + 2, size = text.find_first_not_of("0123456789", digits) - digits;
  const auto port = base::parse_int(text.substr(digits, size));
  return port && *port > 0 && *port < 65536 ? static_cast<int>(*port) : 0;
}

}  // namespace lockstep::launcher::supervise

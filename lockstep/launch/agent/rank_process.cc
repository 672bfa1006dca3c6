#include "lockstep/launch/agent/rank_process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"
#include "lockstep/base/parse.h"
#include "lockstep/job/job_key.h"
#include "lockstep/launch/process/activity.h"
#include "lockstep/launch/process/python_program.h"
#include "lockstep/launch/process/signal_masks.h"
#include "lockstep/launch/process/stack_dump.h"
#include "lockstep/launch/protocol/rank_exit.h"

namespace lockstep::launcher::agent {
namespace {

std::optional<int> rank_of(pid_t pid, const std::vector<RankProcess>& ranks) {
  for (const RankProcess& rank : ranks)
    if (rank.session == ::getsid(pid)) return rank.rank;
  constexpr std::string_view kVariable = "LOCKSTEP_RANK=";
  for (const std::string& entry : base::split(process::read_file("/proc/" + std::to_string(pid) + "/environ"), '\0'))
    if (entry.starts_with(kVariable))
      if (const auto rank = base::parse_int(entry.substr(kVariable.size()))) return static_cast<int>(*rank);
  return std::nullopt;
}

constexpr std::size_t kMaxFileBytes = std::size_t{1} << 20;  // it also has the stack of the exception

}  // namespace

void StdinWriter::add_rank(base::Fd pipe) {
  base::set_nonblocking(pipe.get());
  ranks_.push_back({std::move(pipe)});
  loop_.on_writable(
      [this, index = ranks_.size() - 1] {
        const RankStdin& rank = ranks_[index];
        return rank.pipe && rank.written < chunk_.size() ? rank.pipe.get() : -1;
      },
      on_writable_);
}

void StdinWriter::write(std::string bytes) {
  chunk_ = std::move(bytes);
  is_pending_ = true;
  for (RankStdin& rank : ranks_) {
    rank.written = 0;
    if (chunk_.empty()) rank.pipe.reset();
  }
}

bool StdinWriter::flush() {
  bool is_taken = true;
  for (RankStdin& rank : ranks_) {
    while (rank.pipe && rank.written < chunk_.size()) {
      const ssize_t size = ::write(rank.pipe.get(), chunk_.data() + rank.written, chunk_.size() - rank.written);
      if (size < 0 && errno == EINTR) continue;
      if (size < 0 && errno == EAGAIN) break;
      if (size < 0)
        rank.pipe.reset();  // the rank has closed its stdin
      else
        rank.written += static_cast<std::size_t>(size);
    }
    is_taken = is_taken && (!rank.pipe || rank.written == chunk_.size());
  }
  return is_taken && std::exchange(is_pending_, false);
}

std::vector<std::string> rank_argv(const plan::JobPlan& job, const plan::RankPlan& plan) {
  std::vector<std::string> all = job.arguments;
  all.insert(all.end(), plan.arguments.begin(), plan.arguments.end());
  return all;
}

process::Environment rank_environment(const plan::JobPlan& job, const plan::RankPlan& plan, int page,
                                      const std::string& error_file) {
  process::Environment all = job.environment;
  all.insert(all.end(), plan.environment.begin(), plan.environment.end());
  all.push_back("LOCKSTEP_PAGE=" + std::to_string(page));
  all.push_back("TORCHELASTIC_ERROR_FILE=" + error_file);
  return all;
}

void use_staged_files(plan::JobPlan& job, const cli::AgentOptions& staged) {
  if (!staged.staged_program.empty()) job.program = staged.staged_program;
  const auto script = process::python_script_index(job.arguments);
  if (staged.staged_script.empty() || !script) return;
  std::string& word = job.arguments[*script];
  word = staged.staged_script + "/" + word.substr(word.rfind('/') + 1);
  if (*script == 0) job.program = word;
}

std::string add_python_hook(plan::JobPlan& job, const std::string& staged_hook) {
  if (process::find_variable(job.environment, "LOCKSTEP_WATCH") == "off" || process::has_installed_hook(job.program))
    return "";
  std::string folder = staged_hook.empty() ? process::python_hook_folder() : staged_hook + "/" + process::kPythonHook;
  if (folder.empty()) return "";
  folder += "/path";  // has sitecustomize.py
  if (folder.find(':') != std::string::npos)
    return "Python programs are not watched, because the folder of Lockstep has a colon in its path: " +
           base::quoted(folder, 256);
  const auto outer = process::find_variable(job.environment, "PYTHONPATH");
  std::string value = "PYTHONPATH=" + folder + (outer && !outer->empty() ? ":" + std::string(*outer) : "");
  std::erase_if(job.environment,
                [](const std::string& variable) { return process::variable_name(variable) == "PYTHONPATH"; });
  job.environment.push_back(std::move(value));
  return "";
}

void forward_signal(const std::vector<RankProcess>& ranks, int signal) {
  const auto processes = process::read_processes();
  std::vector<std::vector<pid_t>> trees;
  for (const RankProcess& rank : ranks)
    if (rank.pid > 0) trees.push_back(process::tree_of(rank.pid, processes));
  process::signal_first_expecting(trees, signal);
}

void signal_ranks(std::vector<RankProcess>& ranks, int signal, bool also_in_world) {
  std::vector<RankProcess*> signalled;
  std::vector<process::RankPids> found;
  for (RankProcess& rank : ranks) {
    if (rank.pid <= 0 || (!also_in_world && rank.monitor.is_in_world())) continue;
    signalled.push_back(&rank);
    found.push_back({.started = rank.pid, .joined = rank.monitor.pid(-1)});
  }
  const std::vector<bool> handled = process::signal_programs(found, process::read_processes(), signal);
  for (std::size_t i = 0; i < signalled.size(); ++i) {
    RankProcess& rank = *signalled[i];
    rank.deferred_signal = handled[i] ? signal : 0;
    // The process group does not exist until the child has called setsid().
    if (!handled[i] && ::kill(-rank.pid, signal) != 0) ::kill(rank.pid, signal);
    ::kill(-rank.pid, SIGCONT);
  }
}

std::map<int, std::string> find_left_behind(const std::vector<RankProcess>& ranks) {
  constexpr int kMaxNames = 8;
  // The manager of torch's strategy "file_system" for sharing tensors: it ends 2 s after its last client.
  constexpr std::string_view kTorchManager = "torch_shm_manag";
  std::map<int, int> counts;
  std::map<int, std::string> found;
  const std::map<pid_t, process::ProcessCounters> processes = process::read_processes();
  for (const auto& [pid, counters] : processes) {
    if (counters.parent != ::getpid() || process::sample_process(pid).state == 'Z') continue;
    const std::string name = process::read_file("/proc/" + std::to_string(pid) + "/comm");
    if (name == kTorchManager) continue;
    const std::optional<int> number = rank_of(pid, ranks);
    const auto rank = std::ranges::find_if(
        ranks, [&](const RankProcess& process) { return number == process.rank && process.succeeded; });
    if (rank == ranks.end()) continue;
    std::string& text = found[rank->rank];
    const int count = ++counts[rank->rank];
    if (count == kMaxNames + 1) text += ", ...";
    if (count > kMaxNames) continue;
    text += (text.empty() ? "" : ", ") + std::to_string(pid) + " (" + name + ")";
  }
  return found;
}

ErrorFiles::ErrorFiles() {
  const job::Mac random = job::random_nonce();
  std::error_code error;
  const std::filesystem::path folder = std::filesystem::temp_directory_path(error);
  prefix_ = (error ? "/tmp" : folder.string()) + "/lockstep-error-" +
            base::to_hex(job::mac_bytes(random).substr(0, 16)) + "-";
}

std::string ErrorFiles::take_message(int rank) const {
  const std::string name = path(rank);
  const base::Fd fd(::open(name.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!fd) return "";
  ::unlink(name.c_str());
  struct stat info{};
  if (::fstat(fd.get(), &info) != 0 || !S_ISREG(info.st_mode)) return "";
  std::string text(kMaxFileBytes, '\0');
  std::size_t size = 0;
  while (size < text.size()) {
    const ssize_t got = ::read(fd.get(), text.data() + size, text.size() - size);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    size += static_cast<std::size_t>(got);
  }
  text.resize(size);
  return error_file_message(text);
}

std::string error_file_message(const std::string& text) {
  const auto json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_object() || !json.contains("message")) return "";
  const nlohmann::json& outer = json["message"];
  const nlohmann::json& message = outer.is_object() && outer.contains("message") ? outer["message"] : outer;
  if (!message.is_string()) return "";
  return message.get<std::string>().substr(0, protocol::kMaxErrorMessageBytes);
}

}  // namespace lockstep::launcher::agent

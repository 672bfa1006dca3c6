#include "lockstep/launch/predict/predict.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"
#include "lockstep/launch/plan/host_info.h"
#include "lockstep/launch/predict/host_profile.h"
#include "lockstep/launch/predict/step_model.h"
#include "lockstep/launch/process/environment.h"
#include "lockstep/launch/process/process.h"
#include "lockstep/launch/process/program.h"
#include "lockstep/launch/process/spawn.h"

namespace lockstep::launcher::predict {
namespace {

namespace fs = std::filesystem;

// Of the rate of a link, what TCP/IP over Ethernet leaves for the payload with packets of 1500 bytes.
constexpr double kPayload = 0.955;
constexpr std::size_t kShownLines = 40;
// A folder with more entries is linked as one; so are all when there are too many.
constexpr std::size_t kLinkedEntries = 1000;
constexpr int kMostLinks = 20000, kMaxDepth = 8;
constexpr auto kPoll = std::chrono::milliseconds(50);
constexpr auto kEnd = std::chrono::seconds(15);  // for a program that is told to end
// The exchange limits a cluster if it takes more of a step than this.
constexpr double kLimit = 0.1;

/// A temporary folder, which is removed with its contents.
class Folder {
 public:
  Folder() {
    std::error_code error;
    const fs::path parent = fs::canonical(fs::temp_directory_path(error), error);
    if (error) throw base::UsageError("lockstep plan: the folder for temporary files (TMPDIR): " + error.message());
    std::string name = (parent / "lockstep-plan-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw base::SystemError("cannot create " + name, errno);
    path_ = name;
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

/// Returns the entries of a folder, or one more than kLinkedEntries if there are more; none if it cannot be read.
std::vector<fs::directory_entry> entries_of(const fs::path& folder) {
  std::vector<fs::directory_entry> entries;
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end && entries.size() <= kLinkedEntries;
       at.increment(error))
    entries.push_back(*at);
  return entries;
}

/// Gives `copy` the entries of `folder`, except `left_out`: to the depth `depth`, folders that are not large become
/// folders, so that what the program writes there stays in the copy; everything else becomes a link.
void link_entries(const fs::path& folder, const fs::path& copy, const fs::path& left_out, int& budget, int depth) {
  std::error_code error;
  fs::create_directories(copy, error);
  for (const fs::directory_entry& entry : entries_of(folder)) {
    const fs::path target = copy / entry.path().filename();
    const bool is_runs = depth == kMaxDepth && entry.path().filename() == "runs";  // a Trainer appends to files there
    if (entry.path() == left_out || is_runs || fs::exists(target, error)) continue;
    std::size_t count = 0;
    if (depth > 0 && entry.is_directory(error) && !entry.is_symlink(error)) count = entries_of(entry.path()).size();
    budget -= static_cast<int>(count);
    if (count > 0 && count <= kLinkedEntries && budget > 0)
      link_entries(entry.path(), target, left_out, budget, depth - 1);
    else
      fs::create_symlink(entry.path(), target, error);
  }
}

/// Returns a folder in which the program finds the files of the current one, and those of the folders above it, by the
/// same relative paths, and leaves nothing behind.
fs::path link_files(const Folder& folder) {
  const fs::path here = process::current_directory();
  const fs::path linked = folder.path() / "root" / here.relative_path();
  int budget = kMostLinks;
  link_entries(here, linked, folder.path(), budget, kMaxDepth);
  fs::path copy = linked;
  for (fs::path above = here; above.has_relative_path(); above = above.parent_path(), copy = copy.parent_path())
    link_entries(above.parent_path(), copy.parent_path(), folder.path(), budget, 0);
  return linked;
}

std::string read_file(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string last_lines(const std::string& text) {
  std::size_t begin = text.size();
  for (std::size_t lines = 0; begin > 0 && lines <= kShownLines; --begin) lines += text[begin - 1] == '\n';
  return text.substr(begin == 0 ? 0 : begin + 1);
}

pid_t start_program(const cli::PlanOptions& options, const Folder& folder, int output) {
  process::ChildSpec child{.path = process::executable_path(), .argv = {"lockstep", "run", "--bind", "none"}};
  const auto add = [&](const char* option, const std::string& value) {
    if (!value.empty()) child.argv.insert(child.argv.end(), {option, value});
  };
  add("-n", options.ranks > 0 ? std::to_string(options.ranks) : "");
  add("--gpus", options.gpus);
  add("--env-from", "none");
  add("-x", "LOCKSTEP_PROFILE=" + std::to_string(options.steps) + ":" + folder.path().string());
  child.argv.emplace_back("--");
  child.argv.insert(child.argv.end(), options.command.begin(), options.command.end());
  // Without the hook, torch.save() would write, and steps of torch's DistributedDataParallel would not be seen.
  child.environment = process::remove_variables(process::current_environment(), {"LOCKSTEP_WATCH=off"});
  child.directory = link_files(folder).string();
  const base::Fd input(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  child.in = input.get();
  child.out = child.err = output;
  return process::spawn(child);
}

/// How the program ended.
struct ProgramEnd {
  int code = 0;
  int signal = 0;         ///< that this process got meanwhile, and passed on; 0: none
  bool has_begun = true;  ///< whether it has made a step in time
};

/// Waits for the program, `lockstep run` with process `pid`. Ends it on a signal to this process, and if it makes no
/// step within --start-timeout.
ProgramEnd wait_for_program(pid_t pid, const cli::PlanOptions& options, const Folder& folder, int signals) {
  ProgramEnd end;
  const auto start_limit = base::Deadline::in(options.start_timeout);
  auto kill_at = base::Deadline::never();
  bool is_shown = false, is_stopping = false;
  const auto stop = [&] {
    is_stopping = true;
    ::kill(pid, SIGTERM);
    kill_at = base::Deadline::in(kEnd);
  };
  for (;;) {
    int status = 0;
    if (::waitpid(pid, &status, WNOHANG) == pid) {
      end.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      return end;
    }
    if (kill_at.expired()) ::kill(pid, SIGKILL);
    std::error_code ignored;
    const bool has_begun = fs::exists(folder.path() / "begun", ignored);
    if (has_begun && !std::exchange(is_shown, true)) std::fputs("lockstep plan: the program makes steps\n", stderr);
    if (!has_begun && start_limit.expired() && !is_stopping) {
      end.has_begun = false;
      stop();
    }
    pollfd entry = {signals, POLLIN, 0};
    ::poll(&entry, 1, static_cast<int>(kPoll.count()));
    const auto signal = process::read_signal(signals);
    if (signal && *signal != SIGCHLD && !is_stopping) {
      end.signal = *signal;
      stop();
    }
  }
}

std::vector<std::string> read_profiles(const Folder& folder) {
  std::vector<std::string> files;
  for (int rank = 0; fs::exists(folder.path() / (std::to_string(rank) + ".json")); ++rank)
    files.push_back(read_file(folder.path() / (std::to_string(rank) + ".json")));
  return files;
}

std::string text_of_rate(double bits_per_s) {
  std::ostringstream text;
  if (bits_per_s >= 1e9)
    text << bits_per_s / 1e9 << " Gb/s";
  else
    text << bits_per_s / 1e6 << " Mb/s";
  return text.str();
}

std::string text_of_seconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text,
                seconds < 1     ? "%.0f ms"
                : seconds < 100 ? "%.2f s"
                                : "%.0f s",
                seconds < 1 ? seconds * 1e3 : seconds);
  return text;
}

/// What is predicted for one cluster.
struct Cell {
  double link = 0;  ///< bits per second
  int hosts = 0;
  std::vector<Prediction> methods;  ///< in the order of kMethods

  std::size_t fastest() const {
    const auto slower = [](const Prediction& a, const Prediction& b) { return a.step_s < b.step_s; };
    return static_cast<std::size_t>(std::min_element(methods.begin(), methods.end(), slower) - methods.begin());
  }
};

std::vector<Cell> predict_all(const HostProfile& profile, const HostCosts& costs, const cli::PlanOptions& options) {
  std::vector<Cell> cells;
  std::vector<int> nodes = options.nodes;
  std::sort(nodes.begin(), nodes.end());
  for (const double link : options.links)
    for (const int hosts : nodes) {
      Cell& cell = cells.emplace_back(Cell{.link = link, .hosts = hosts});
      const Cluster cluster{.hosts = hosts, .bytes_per_s = link * kPayload / 8, .latency_s = options.latency_s};
      for (const MethodName& method : kMethods)
        cell.methods.push_back(predict_step(profile, costs, cluster, method.method, options.every));
    }
  return cells;
}

std::string table(const std::vector<Cell>& cells, double alone_s) {
  std::string text;
  char line[256];
  double link = 0;
  for (const Cell& cell : cells) {
    if (cell.link != link) {
      link = cell.link;
      std::snprintf(line, sizeof line, "\n%-10s", text_of_rate(link).c_str());
      text += line;
      for (const MethodName& method : kMethods) {
        std::snprintf(line, sizeof line, " %11s", method.name);
        text += line;
      }
      text += "  fastest: efficiency, 90 % interval\n";
    }
    std::snprintf(line, sizeof line, "%5d hosts", cell.hosts);
    text += line;
    for (const Prediction& prediction : cell.methods) {
      std::snprintf(line, sizeof line, " %11s", text_of_seconds(prediction.step_s).c_str());
      text += line;
    }
    const std::size_t best = cell.fastest();
    const Prediction& prediction = cell.methods[best];
    std::snprintf(line, sizeof line, "  %s: %.0f %%, %s to %s\n", kMethods[best].name,
                  100 * alone_s / prediction.step_s, text_of_seconds(prediction.low_s).c_str(),
                  text_of_seconds(prediction.high_s).c_str());
    text += line;
  }
  return text;
}

/// For each link, the first cluster that waits for it.
std::string limits(const std::vector<Cell>& cells) {
  std::string text;
  double told = 0;
  for (const Cell& cell : cells) {
    const Prediction& exact = cell.methods.front();
    if (cell.link == told || exact.exposed_s < kLimit * exact.step_s) continue;
    told = cell.link;
    text += "With " + text_of_rate(cell.link) + " and float32, the network is the limit from " +
            std::to_string(cell.hosts) + " hosts on: ranks wait for it for " +
            std::to_string(static_cast<int>(100 * exact.exposed_s / exact.step_s)) + " % of a step.\n";
  }
  return text;
}

std::string json_text(const HostProfile& profile, const HostCosts& costs, const std::vector<Cell>& cells) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const Cell& cell : cells)
    for (std::size_t i = 0; i < cell.methods.size(); ++i) {
      const Prediction& one = cell.methods[i];
      rows.push_back({{"hosts", cell.hosts},
                      {"bits_per_s", cell.link},
                      {"method", kMethods[i].name},
                      {"step_s", one.step_s},
                      {"low_s", one.low_s},
                      {"high_s", one.high_s},
                      {"waits_s", one.exposed_s},
                      {"bytes_per_step", one.bytes}});
    }
  return nlohmann::ordered_json{{"ranks_per_host", profile.ranks},
                                {"steps_s", profile.steps_s},
                                {"gradient_bytes", gradient_bytes(profile)},
                                {"wire_s_per_byte", costs.wire_s_per_byte},
                                {"memory_s_per_byte", costs.memory_s_per_byte},
                                {"shares_cores", costs.shares_cores},
                                {"predictions", std::move(rows)}}
             .dump() +
         "\n";
}

}  // namespace

int plan(const cli::PlanOptions& options) {
  const base::Fd signals = process::make_signal_fd(process::handled_signals());
  const Folder folder;
  const fs::path log = folder.path() / "output";
  const base::Fd output(::open(log.c_str(), O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0600));
  if (output.get() < 0) throw base::SystemError("cannot create " + log.string(), errno);
  const pid_t pid = start_program(options, folder, output.get());
  const ProgramEnd end = wait_for_program(pid, options, folder, signals.get());
  if (end.signal != 0) return 128 + end.signal;
  const std::vector<std::string> files = read_profiles(folder);
  if (end.code != 0 || files.empty()) std::fputs(last_lines(read_file(log)).c_str(), stderr);
  if (end.has_begun && end.code != 0) {
    std::fprintf(stderr, "lockstep plan: the program ended with exit code %d; its last lines are above\n", end.code);
    return end.code;
  }
  if (files.empty())
    throw base::Error(base::Cause::kBadArg,
                      "lockstep plan: the program has made no steps that can be read" +
                          std::string(end.has_begun ? "" : " within --start-timeout"),
                      "it needs a DistributedDataParallel of Lockstep or of torch, also with one rank, and more than 6 "
                      "steps");
  const HostProfile profile = parse_profiles(files);
  HostCosts costs = measure_host_costs();
  costs.shares_cores = plan::usable_cores(plan::collect_host_info()) <= profile.ranks;
  const std::vector<Cell> cells = predict_all(profile, costs, options);
  if (options.json) {
    std::fputs(json_text(profile, costs, cells).c_str(), stdout);
    return 0;
  }
  const double alone_s = average_of(profile.steps_s);
  std::printf(
      "%zu steps of %d %s on this host: %s each; %.1f MB of gradients.\n"
      "Predicted time of a step on hosts with as many ranks; average, DiLoCo and SparseLoCo exchange every %d steps.\n"
      "They change what is learned per step: docs/how-to/slow-networks.md.\n",
      profile.steps_s.size(), profile.ranks, profile.ranks == 1 ? "rank" : "ranks", text_of_seconds(alone_s).c_str(),
      gradient_bytes(profile) / 1e6, options.every);
  std::fputs((table(cells, alone_s) + "\n" + limits(cells)).c_str(), stdout);
  return 0;
}

}  // namespace lockstep::launcher::predict

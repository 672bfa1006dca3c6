#include "lockstep/launch/predict/predict.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>

#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"
#include "lockstep/launch/plan/host_info.h"
#include "lockstep/launch/predict/host_profile.h"
#include "lockstep/launch/predict/step_model.h"
#include "lockstep/launch/process/program.h"
#include "lockstep/launch/process/spawn.h"

namespace lockstep::launcher::predict {
namespace {

namespace fs = std::filesystem;

// Of the rate of a link, what TCP/IP over Ethernet leaves for the payload with packets of 1500 bytes.
constexpr double kPayload = 0.955;
constexpr std::size_t kShownLines = 20;
// The exchange limits a cluster if it takes more of a step than this.
constexpr double kLimit = 0.1;

/// A temporary folder, which is removed with its contents.
class Folder {
 public:
  Folder() {
    std::string name = (fs::temp_directory_path() / "lockstep-plan-XXXXXX").string();
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

/// A folder with links to the entries of the current one: the program finds its files and leaves nothing behind.
fs::path link_files(const Folder& folder) {
  fs::path linked = folder.path() / "run";
  fs::create_directory(linked);
  for (const auto& entry : fs::directory_iterator(fs::current_path()))
    fs::create_symlink(entry.path(), linked / entry.path().filename());
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

/// Returns the exit code of `lockstep run` with the program; its output is in `log`.
int run_program(const cli::PlanOptions& options, const Folder& folder, const fs::path& log) {
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
  child.environment = process::current_environment();
  child.directory = link_files(folder).string();
  const base::Fd output(::open(log.c_str(), O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0600));
  if (output.get() < 0) throw base::SystemError("cannot create " + log.string(), errno);
  const base::Fd input(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  child.in = input.get();
  child.out = child.err = output.get();
  const pid_t pid = process::spawn(child);
  int status = 0;
  // bounded: by the program, as under `lockstep run`, whose limits hold; Ctrl-C ends this process and that one
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
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
  for (const double link : options.links)
    for (const int hosts : options.nodes) {
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
        std::snprintf(line, sizeof line, " %12s", method.name);
        text += line;
      }
      text += "  fastest: efficiency, 90 % interval\n";
    }
    std::snprintf(line, sizeof line, "%5d hosts", cell.hosts);
    text += line;
    for (const Prediction& prediction : cell.methods) {
      std::snprintf(line, sizeof line, " %12s", text_of_seconds(prediction.step_s).c_str());
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
  const Folder folder;
  const fs::path log = folder.path() / "output";
  const int code = run_program(options, folder, log);
  const std::vector<std::string> files = read_profiles(folder);
  if (code != 0) {
    std::fprintf(stderr, "%slockstep plan: the program ended with exit code %d, see above\n",
                 last_lines(read_file(log)).c_str(), code);
    return code;
  }
  if (files.empty())
    throw base::Error(base::Cause::kBadArg, "lockstep plan: no rank has made steps of training that can be read",
                      "it needs a DistributedDataParallel of Lockstep or of torch, and more than 6 steps");
  const HostProfile profile = parse_profiles(files);
  HostCosts costs = measure_host_costs();
  costs.shares_cores = plan::usable_cores(plan::collect_host_info()) <= profile.ranks;
  const std::vector<Cell> cells = predict_all(profile, costs, options);
  if (options.json) {
    std::fputs(json_text(profile, costs, cells).c_str(), stdout);
    return 0;
  }
  const double alone_s = mean_step_s(profile);
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

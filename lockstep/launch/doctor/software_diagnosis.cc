#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

#include "lockstep/base/parse.h"
#include "lockstep/base/telemetry/flight_ring.h"
#include "lockstep/launch/doctor/diagnosis.h"

namespace lockstep::launcher::doctor {
namespace {

/// Returns the last line that is a JSON object, because a program may print warnings around it. Returns an empty object
/// if there is none.
nlohmann::json last_json_object(const std::string& text) {
  nlohmann::json last = nlohmann::json::object();
  for (const std::string& line : base::split(text, '\n')) {
    if (line.empty() || line[0] != '{') continue;
    nlohmann::json read = nlohmann::json::parse(line, nullptr, false);
    if (read.is_object()) last = std::move(read);
  }
  return last;
}

std::string text_at(const nlohmann::json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_string() ? base::telemetry::printable(found->get<std::string>()) : "";
}

std::string trimmed(const std::string& text) {
  const auto begin = text.find_first_not_of(" \t\r"), end = text.find_last_not_of(" \t\r");
  return begin == std::string::npos ? "" : text.substr(begin, end - begin + 1);
}

void read_libraries(const std::string& text, Software& software) {
  for (const std::string& line : base::split(text, '\n')) {
    const auto arrow = line.find(" => ");
    if (arrow == std::string::npos) continue;
    const std::string name = trimmed(line.substr(0, arrow)), where = trimmed(line.substr(arrow + 4));
    if (where.rfind("not found", 0) == 0)
      software.missing.push_back(name);
    else
      ++software.num_libraries;
    if (name.rfind("libtorch_cpu.so", 0) == 0 && where[0] == '/')
      software.program_libtorch = where.substr(0, where.find(" ("));
  }
}

void read_gpus(const std::string& text, Software& software) {
  for (const std::string& line : base::split(text, '\n')) {
    const auto parts = base::split(line, ',');
    if (parts.size() != 3) continue;
    const auto mib = base::parse_int(trimmed(parts[1]));
    software.gpus.push_back(
        {trimmed(parts[0]), trimmed(parts[2]), static_cast<std::uint64_t>(std::max<std::int64_t>(0, mib.value_or(0)))});
  }
}

/// Returns the part before the first dot; -1 if it is not a number.
int major_of(const std::string& version) {
  return static_cast<int>(
      std::min<std::int64_t>(base::parse_int(version.substr(0, version.find('.'))).value_or(-1), 1 << 20));
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

std::string exit_text(const std::string& tool, const process::ToolResult& result) {
  return tool + " exited with code " + std::to_string(result.code) + ": " + first_line(result.message());
}

std::string with_cuda(const std::string& version, const std::string& cuda) {
  return version.empty() ? "" : version + (cuda.empty() ? ", without CUDA" : " for CUDA " + cuda);
}

/// The most frequent value among the hosts, and the first host that has it.
struct MajorityValue {
  std::string value, host;
};

class SoftwareDiagnosis {
 public:
  explicit SoftwareDiagnosis(const DoctorFacts& doctor_facts)
      : doctor_facts_(doctor_facts), all_(doctor_facts.hosts.size()), findings_(doctor_facts.hosts.size()) {
    for (std::size_t i = 0; i < all_.size(); ++i)
      if (doctor_facts.hosts[i].facts) all_[i] = parse_software(*doctor_facts.hosts[i].facts);
  }
  std::vector<std::vector<Finding>> run() {
    majority_hash_ = majority([&](std::size_t i) {
      return doctor_facts_.hosts[i].facts->program.error.empty() ? doctor_facts_.hosts[i].facts->program.hash : "";
    });
    majority_torch_ = majority([&](std::size_t i) { return torch_text(i); });
    majority_libtorch_ = majority([&](std::size_t i) { return libtorch_text(i); });
    majority_nccl_ = majority([&](std::size_t i) { return nccl(i); });
    majority_gpus_ = majority([&](std::size_t i) { return std::to_string(all_[i].gpus.size()); });
    for (host_ = 0; host_ < all_.size(); ++host_)
      if (doctor_facts_.hosts[host_].facts) diagnose_host();
    return std::move(findings_);
  }

 private:
  void add(const char* check, Severity severity, std::string value, std::string remedy = {}) {
    findings_[host_].push_back({doctor_facts_.hosts[host_].name, check, severity, std::move(value), std::move(remedy)});
  }
  void add_comparison(const char* check, const std::string& value, const MajorityValue& reference,
                      const std::string& shown, const std::string& remedy) {
    if (value == reference.value)
      add(check, Severity::kOk, shown);
    else
      add(check, Severity::kBad, shown + "; " + reference.host + " has " + reference.value, remedy);
  }

  /// Returns the most frequent value; if several are equally frequent, that of the first host.
  template <typename Get>
  MajorityValue majority(const Get& get) const {
    std::map<std::string, int> counts;
    MajorityValue most;
    int highest = 0;
    for (std::size_t i = 0; i < all_.size(); ++i)
      if (doctor_facts_.hosts[i].facts) {
        const std::string value = get(i);
        if (!value.empty()) highest = std::max(highest, ++counts[value]);
      }
    for (std::size_t i = 0; i < all_.size(); ++i)
      if (most.host.empty() && doctor_facts_.hosts[i].facts && counts.contains(get(i)) && counts[get(i)] == highest)
        most = {get(i), doctor_facts_.hosts[i].name};
    return most;
  }

  std::string libtorch_text(std::size_t i) const { return with_cuda(all_[i].libtorch, all_[i].libtorch_cuda); }
  std::string torch_text(std::size_t i) const { return with_cuda(all_[i].torch, all_[i].torch_cuda); }
  bool is_script(std::size_t i) const { return !doctor_facts_.hosts[i].facts->program.python.empty(); }
  std::string nccl(std::size_t i) const { return is_script(i) ? all_[i].torch_nccl : all_[i].probe_nccl; }

  void diagnose_host() {
    check_program();
    check_libraries();
    check_python();
    if (!own().python.empty()) {
      check_environment();
      check_packages();
      check_cuda();
    }
    check_libtorch();
    check_driver();
    check_gpus();
    const bool known = is_script(host_) ? !own().torch.empty()
                                        : facts().program.error.empty() &&
                                              !own().libtorch.empty();  // otherwise another finding reports it
    if (known && !majority_nccl_.value.empty())
      add_comparison("NCCL", nccl(host_), majority_nccl_, nccl(host_).empty() ? "none" : nccl(host_),
                     "ranks with different NCCL versions cannot communicate: install the same torch on all hosts");
    if (doctor_facts_.mpi) check_mpi();
  }

  void check_program() {
    const ProgramFile& program = facts().program;
    if (program.path.empty()) return;
    if (!program.error.empty())
      return add("program", Severity::kBad, program.path + ": " + program.error,
                 "copy it to the same path on this host, or put it on a shared file system");
    if (program.hash.empty())
      return add("program", Severity::kUnknown, program.path + ": not read within 10 s",
                 "check whether its file system is slow");
    add_comparison("program", program.hash, majority_hash_, program.path + " (" + program.hash + ")",
                   "the files differ: copy the same build to all hosts");
  }

  void check_libraries() {
    if (facts().libraries.path.empty()) return;
    if (!own().missing.empty())
      return add(
          "libraries", Severity::kBad,
          std::to_string(own().missing.size()) + " libraries of the program not found: " + base::joined(own().missing),
          "install them there, or add their directories to LD_LIBRARY_PATH, which is passed to all hosts");
    if (own().num_libraries == 0)
      return add("libraries", Severity::kUnknown,
                 "unexpected output of the loader: " + first_line(facts().libraries.message()));
    add("libraries", Severity::kOk,
        std::to_string(own().num_libraries) + " found" +
            (own().program_libtorch.empty() ? "" : ", libtorch is " + own().program_libtorch));
  }

  void check_python() {
    const process::ToolResult& result = facts().python;
    if (result.path.empty()) return;
    if (result.code == process::ToolResult::kTimedOut)
      return add("Python", Severity::kUnknown, result.path + " did not import torch within 60 s",
                 "check whether its file system is slow");
    if (own().python.empty())
      return add("Python", Severity::kBad, exit_text(result.path, result), "check that this interpreter runs there");
    const std::string what = own().python + " (" + result.path + ")";
    const std::string install =
        result.path + " -m pip install torch" +
        (majority_torch_.value.empty()
             ? ""
             : "==" + majority_torch_.value.substr(0, majority_torch_.value.find_first_of(" ,+")));
    if (!own().python_error.empty())
      return add("Python", Severity::kBad, what + " has no torch: " + own().python_error, install);
    add_comparison("Python", torch_text(host_), majority_torch_, what + ", torch " + torch_text(host_),
                   "install the same version on all hosts: " + install);
  }

  void check_environment() {
    if (own().active_environment.empty()) return;
    add("environment", Severity::kWarn,
        "Python is that of " + own().python_prefix + ", not of the active environment " + own().active_environment,
        "start " + own().active_environment + "/bin/python, or deactivate the environment");
  }

  /// Compares the packages that the script imports: a rank with another version may compute something else.
  void check_packages() {
    if (own().packages.empty()) return;
    std::string wrong, all;
    Severity severity = Severity::kWarn;  // one that no host has may be found by a path that the script adds
    for (const auto& [name, version] : own().packages) {
      all += (all.empty() ? "" : ", ") + name + (version.empty() || version == "?" ? "" : " " + version);
      const MajorityValue most = majority([&, &name = name](std::size_t i) {
        const auto found = all_[i].packages.find(name);
        return found == all_[i].packages.end() ? "" : found->second;
      });
      if (version == most.value && !version.empty()) continue;
      wrong += (wrong.empty() ? "" : "; ") + name + (version.empty() ? " is not installed" : " is " + version) +
               (most.value.empty() ? "" : ", " + most.host + " has " + most.value);
      if (!most.value.empty()) severity = Severity::kBad;
    }
    if (wrong.empty()) return add("packages", Severity::kOk, all);
    add("packages", severity, wrong, "install the same on all hosts, for " + facts().python.path);
  }

  void check_cuda() {
    if (own().no_cuda.empty() || own().torch.empty()) return;
    const bool has_gpus = doctor_facts_.hosts[host_].info.gpus > 0 || !own().gpus.empty();
    const bool is_cpu_build = own().torch_cuda.empty();
    add("CUDA", has_gpus ? Severity::kBad : Severity::kOk, "torch.cuda.is_available() is false: " + own().no_cuda,
        !has_gpus      ? ""
        : is_cpu_build ? "install a torch for CUDA: " + facts().python.path + " -m pip install torch"
                       : "see the rows driver and GPUs; nvidia-smi must list a GPU there");
  }

  void check_libtorch() {
    const process::ToolResult& result = facts().probe;
    if (result.path.empty())
      return add("libtorch", Severity::kUnknown, "there is no lockstep-probe next to lockstep",
                 "install lockstep there in the same way as here");
    // The ranks of a script use the libtorch of its torch, which lockstep-probe may not find: in a virtual environment
    // with the packages of the system, for example, it is in another folder than Lockstep.
    if (own().libtorch.empty() && is_script(host_) && !own().torch.empty()) return;
    if (own().libtorch.empty())
      return add("libtorch", Severity::kBad,
                 result.code == process::ToolResult::kTimedOut ? "lockstep-probe did not finish within 60 s"
                                                               : exit_text("lockstep-probe", result),
                 "install libtorch there at the same path as here");
    add_comparison("libtorch", libtorch_text(host_), majority_libtorch_, libtorch_text(host_),
                   "install the same version there as on " + majority_libtorch_.host);
  }

  void check_driver() {
    const std::string cuda = is_script(host_) ? own().torch_cuda : own().libtorch_cuda;
    const process::ToolResult& result = facts().nvidia_smi;
    if (result.path.empty() && doctor_facts_.hosts[host_].info.gpus == 0) return;
    if (result.path.empty())
      return add("driver", Severity::kUnknown, "GPUs found, but no nvidia-smi in PATH",
                 "install it with NVIDIA's driver");
    if (own().gpus.empty())
      return add("driver", Severity::kBad, "nvidia-smi reports: " + first_line(result.message()),
                 "load NVIDIA's driver there with modprobe nvidia; after a driver update, restart the host");
    const std::string driver = own().gpus.front().driver;
    const int oldest = min_driver_for(cuda), major = major_of(driver);
    if (oldest > 0 && major >= 0 && major < oldest)
      return add(
          "driver", Severity::kBad,
          driver + " is too old for CUDA " + cuda + " of torch, which needs " + std::to_string(oldest) + " or newer",
          "update NVIDIA's driver there, or install a torch for an older CUDA on all hosts");
    add("driver", Severity::kOk, driver + (cuda.empty() ? "" : ", for CUDA " + cuda));
  }

  void check_gpus() {
    std::map<std::string, int> kinds;
    for (const Software::Gpu& gpu : own().gpus) {
      char memory[32];
      std::snprintf(memory, sizeof memory, ", %.1f GiB", static_cast<double>(gpu.mib) / 1024);
      ++kinds[gpu.name + memory];
    }
    const std::string text =
        base::joined(kinds, "; ", [](const auto& kind) { return std::to_string(kind.second) + " x " + kind.first; });
    const bool same = std::to_string(own().gpus.size()) == majority_gpus_.value;
    add("GPUs", same ? Severity::kOk : Severity::kWarn,
        (text.empty() ? "none" : text) + (same ? "" : "; " + majority_gpus_.host + " has " + majority_gpus_.value),
        same ? "" : "each host gets one rank per GPU, unless -H or the host file has slots");
  }

  void check_mpi() {
    const std::string here = find_version(doctor_facts_.own_mpirun.out);
    const std::string prefix =
        "install Open MPI" + (here.empty() ? "" : " " + here) +
        " there; if it is installed outside PATH, use mpirun --prefix DIR, where DIR/bin contains orted";
    if (facts().orted.empty()) return add("MPI", Severity::kBad, "no orted in PATH of a non-interactive login", prefix);
    if (own().open_mpi.empty())
      return add("MPI", Severity::kUnknown, facts().orted + ", but no mpirun next to it to report the version", prefix);
    if (!here.empty() && own().open_mpi != here)
      return add("MPI", Severity::kBad,
                 facts().orted + " belongs to Open MPI " + own().open_mpi + ", mpirun here is " + here, prefix);
    add("MPI", Severity::kOk, facts().orted + " of Open MPI " + own().open_mpi);
  }

  const HostFacts& facts() const { return *doctor_facts_.hosts[host_].facts; }
  const Software& own() const { return all_[host_]; }

  const DoctorFacts& doctor_facts_;
  std::vector<Software> all_;
  std::vector<std::vector<Finding>> findings_;
  std::size_t host_ = 0;
  MajorityValue majority_hash_, majority_torch_, majority_libtorch_, majority_nccl_, majority_gpus_;
};

}  // namespace

std::string find_version(const std::string& text) {
  std::istringstream words(text);
  for (std::string word; words >> word;)
    if (word[0] >= '0' && word[0] <= '9') return word;
  return "";
}

int min_driver_for(const std::string& cuda) {
  for (const auto& [major, driver] : {std::pair{11, 450}, {12, 525}, {13, 580}})
    if (major_of(cuda) == major) return driver;
  return 0;
}

Software parse_software(const HostFacts& facts) {
  Software software;
  const nlohmann::json probe = last_json_object(facts.probe.out), python = last_json_object(facts.python.out);
  software.libtorch = text_at(probe, "libtorch");
  software.libtorch_cuda = text_at(probe, "cuda");
  software.probe_nccl = text_at(probe, "nccl");
  software.python = text_at(python, "python");
  software.python_error = text_at(python, "error");
  software.python_prefix = text_at(python, "prefix");
  software.active_environment = text_at(python, "environment");
  software.no_cuda = text_at(python, "no_cuda");
  if (const auto packages = python.find("packages"); packages != python.end() && packages->is_object())
    for (const auto& [name, version] : packages->items())
      software.packages[base::telemetry::printable(name)] = text_at(*packages, name.c_str());
  software.torch = text_at(python, "torch");
  software.torch_cuda = text_at(python, "cuda");
  software.torch_nccl = text_at(python, "nccl");
  read_libraries(facts.libraries.out, software);
  if (facts.nvidia_smi.succeeded()) read_gpus(facts.nvidia_smi.out, software);
  if (facts.mpirun.succeeded()) software.open_mpi = find_version(facts.mpirun.out);
  return software;
}

std::vector<std::vector<Finding>> diagnose_software(const DoctorFacts& doctor_facts) {
  return SoftwareDiagnosis(doctor_facts).run();
}

}  // namespace lockstep::launcher::doctor

#include "lockstep/launch/cli/horovodrun.h"

#include <algorithm>
#include <string_view>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"

namespace lockstep::launcher::cli {
namespace {

enum class Use {
  kTranslated,    // has a value, for an option of lockstep run
  kIgnored,       // a flag
  kIgnoredValue,  // has a value
  kRefused,
};

struct HorovodOption {
  std::string_view name;
  Use use;
  std::string_view text = "";  // the option of lockstep run, or the hint
};

constexpr std::string_view kElastic =
    "ranks do not join a running job: use lockstep run --max-restarts N, with --min-hosts M to go on with fewer hosts";
constexpr HorovodOption kOptions[] = {
    {"-np", Use::kTranslated, "-n"},
    {"-n", Use::kTranslated, "-n"},
    {"--num-proc", Use::kTranslated, "-n"},
    {"-H", Use::kTranslated, "-H"},
    {"--hosts", Use::kTranslated, "-H"},
    {"-hostfile", Use::kTranslated, "--hostfile"},
    {"--hostfile", Use::kTranslated, "--hostfile"},
    {"--network-interfaces", Use::kTranslated, "--interface"},
    {"--network-interface", Use::kTranslated, "--interface"},
    {"--output-filename", Use::kTranslated, "--output"},
    {"--start-timeout", Use::kTranslated, "--join-timeout"},
    {"--stall-check-shutdown-time-seconds", Use::kTranslated, "--hang-timeout"},
    {"-p", Use::kRefused, "write port=N behind the host in a file for --hostfile, or use ~/.ssh/config"},
    {"--ssh-port", Use::kRefused, "write port=N behind the host in a file for --hostfile, or use ~/.ssh/config"},
    {"-i", Use::kRefused, "write the file into ~/.ssh/config"},
    {"--ssh-identity-file", Use::kRefused, "write the file into ~/.ssh/config"},
    {"--config-file", Use::kRefused, "write its options as arguments"},
    {"-cb", Use::kRefused, "use lockstep doctor"},
    {"--check-build", Use::kRefused, "use lockstep doctor"},
    {"--jsrun", Use::kRefused, "use lockstep run in an allocation of SLURM, or with -H"},
    {"--min-np", Use::kRefused, kElastic},
    {"--min-num-proc", Use::kRefused, kElastic},
    {"--max-np", Use::kRefused, kElastic},
    {"--max-num-proc", Use::kRefused, kElastic},
    {"--slots-per-host", Use::kRefused, kElastic},
    {"--elastic-timeout", Use::kRefused, kElastic},
    {"--reset-limit", Use::kRefused, kElastic},
    {"--host-discovery-script", Use::kRefused, kElastic},
    {"--blacklist-cooldown-range", Use::kRefused, kElastic},
    {"--timeline-filename", Use::kRefused, "use lockstep run --trace"},
    {"--fusion-threshold-mb", Use::kIgnoredValue},
    {"--cycle-time-ms", Use::kIgnoredValue},
    {"--cache-capacity", Use::kIgnoredValue},
    {"--autotune-log-file", Use::kIgnoredValue},
    {"--autotune-warmup-samples", Use::kIgnoredValue},
    {"--autotune-steps-per-sample", Use::kIgnoredValue},
    {"--autotune-bayes-opt-max-samples", Use::kIgnoredValue},
    {"--autotune-gaussian-process-noise", Use::kIgnoredValue},
    {"--stall-check-warning-time-seconds", Use::kIgnoredValue},
    {"--mpi-args", Use::kIgnoredValue},
    {"--binding-args", Use::kIgnoredValue},
    {"--num-nccl-streams", Use::kIgnoredValue},
    {"--thread-affinity", Use::kIgnoredValue},
    {"--gloo-timeout-seconds", Use::kIgnoredValue},
    {"--log-level", Use::kIgnoredValue},
    {"--verbose", Use::kIgnored},
    {"--disable-cache", Use::kIgnored},
    {"--gloo", Use::kIgnored},
    {"--mpi", Use::kIgnored},
    {"--tcp", Use::kIgnored},
    {"--autotune", Use::kIgnored},
    {"--no-autotune", Use::kIgnored},
    {"--hierarchical-allreduce", Use::kIgnored},
    {"--no-hierarchical-allreduce", Use::kIgnored},
    {"--hierarchical-allgather", Use::kIgnored},
    {"--no-hierarchical-allgather", Use::kIgnored},
    {"--torus-allreduce", Use::kIgnored},
    {"--no-torus-allreduce", Use::kIgnored},
    {"--timeline-mark-cycles", Use::kIgnored},
    {"--no-timeline-mark-cycles", Use::kIgnored},
    {"--stall-check", Use::kIgnored},
    {"--no-stall-check", Use::kIgnored},
    {"--mpi-threads-disable", Use::kIgnored},
    {"--no-mpi-threads-disable", Use::kIgnored},
    {"--log-with-timestamp", Use::kIgnored},
    {"--log-without-timestamp", Use::kIgnored},
    {"--log-hide-timestamp", Use::kIgnored},
    {"--no-log-hide-timestamp", Use::kIgnored},
    {"-prefix-timestamp", Use::kIgnored},
    {"--prefix-output-with-timestamp", Use::kIgnored},
};

}  // namespace

std::vector<std::string> translate_horovodrun(const std::vector<std::string>& words) {
  std::vector<std::string> run;
  std::size_t i = 0;
  for (; i < words.size() && words[i].starts_with('-') && words[i] != "--"; ++i) {
    const std::size_t equals = words[i].starts_with("--") ? words[i].find('=') : std::string::npos;
    const std::string name = words[i].substr(0, equals);
    const auto option = std::find_if(std::begin(kOptions), std::end(kOptions),
                                     [&](const HorovodOption& one) { return one.name == name; });
    if (option == std::end(kOptions))
      throw base::UsageError("lockstep horovodrun: unknown option " + base::quoted(name, 80) +
                             "; expected one of horovodrun's");
    if (option->use == Use::kRefused)
      throw base::UsageError("lockstep horovodrun: " + name + " is not supported", std::string(option->text));
    if (option->use == Use::kIgnored) continue;
    if (equals == std::string::npos && i + 1 == words.size())
      throw base::UsageError("lockstep horovodrun: " + name + " has no value; expected " + name + " VALUE");
    const std::string value = equals == std::string::npos ? words[++i] : words[i].substr(equals + 1);
    if (option->use == Use::kTranslated) run.insert(run.end(), {std::string(option->text), value});
  }
  if (i == words.size())
    throw base::UsageError("lockstep horovodrun: no program given; expected lockstep horovodrun -np N program");
  run.emplace_back("--");
  run.insert(run.end(), words.begin() + static_cast<std::ptrdiff_t>(i + (words[i] == "--" ? 1 : 0)), words.end());
  return run;
}

}  // namespace lockstep::launcher::cli

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

/// The options that are treated alike.
struct HorovodOptions {
  std::string_view names;  // separated by spaces
  Use use;
  std::string_view text = "";  // the option of lockstep run, or the hint
};

constexpr HorovodOptions kOptions[] = {
    {"-np -n --num-proc", Use::kTranslated, "-n"},
    {"-H --hosts", Use::kTranslated, "-H"},
    {"-hostfile --hostfile", Use::kTranslated, "--hostfile"},
    {"--network-interfaces --network-interface", Use::kTranslated, "--interface"},
    {"--output-filename", Use::kTranslated, "--output"},
    {"--start-timeout", Use::kTranslated, "--join-timeout"},
    {"--stall-check-shutdown-time-seconds", Use::kTranslated, "--hang-timeout"},
    {"-p --ssh-port", Use::kRefused, "write port=N behind the host in a file for --hostfile, or use ~/.ssh/config"},
    {"-i --ssh-identity-file", Use::kRefused, "write the file into ~/.ssh/config"},
    {"--config-file", Use::kRefused, "write its options as arguments"},
    {"-cb --check-build", Use::kRefused, "use lockstep doctor"},
    {"--jsrun", Use::kRefused, "use lockstep run in an allocation of SLURM, or with -H"},
    {"--min-np --min-num-proc --max-np --max-num-proc --slots-per-host --elastic-timeout --reset-limit "
     "--host-discovery-script --blacklist-cooldown-range",
     Use::kRefused,
     "ranks do not join a running job: use lockstep run --max-restarts N, with --min-hosts M to go on with fewer "
     "hosts"},
    {"--timeline-filename", Use::kRefused, "use lockstep run --trace"},
    {"--fusion-threshold-mb --cycle-time-ms --cache-capacity --autotune-log-file --autotune-warmup-samples "
     "--autotune-steps-per-sample --autotune-bayes-opt-max-samples --autotune-gaussian-process-noise "
     "--stall-check-warning-time-seconds --mpi-args --binding-args --num-nccl-streams --thread-affinity "
     "--gloo-timeout-seconds --log-level",
     Use::kIgnoredValue},
    {"--verbose --disable-cache --gloo --mpi --tcp --autotune --no-autotune --hierarchical-allreduce "
     "--no-hierarchical-allreduce --hierarchical-allgather --no-hierarchical-allgather --torus-allreduce "
     "--no-torus-allreduce --timeline-mark-cycles --no-timeline-mark-cycles --stall-check --no-stall-check "
     "--mpi-threads-disable --no-mpi-threads-disable --log-with-timestamp --log-without-timestamp "
     "--log-hide-timestamp --no-log-hide-timestamp -prefix-timestamp --prefix-output-with-timestamp",
     Use::kIgnored},
};

}  // namespace

std::vector<std::string> translate_horovodrun(const std::vector<std::string>& words) {
  std::vector<std::string> run;
  std::size_t i = 0;
  for (; i < words.size() && words[i].starts_with('-') && words[i] != "--"; ++i) {
    const std::size_t equals = words[i].starts_with("--") ? words[i].find('=') : std::string::npos;
    const std::string name = words[i].substr(0, equals);
    const auto option = std::ranges::find_if(kOptions, [&](const HorovodOptions& options) {
      const auto names = base::split(options.names, ' ');
      return std::ranges::find(names, name) != names.end();
    });
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

#include "lockstep/train/trainer.h"

#include <algorithm>
#include <cerrno>
#include <string>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/checkpoint/manifest.h"
#include "lockstep/comm/init.h"
#include "lockstep/job/join.h"
#include "lockstep/launch/launch.h"

namespace lockstep::training {
namespace {

std::vector<std::string> launch_arguments(const TrainerOptions& options) {
  std::vector<std::string> words;
  if (options.nodes == 1) words = {"--env-from", "none"};
  if (options.max_restarts > 0) words.insert(words.end(), {"--max-restarts", std::to_string(options.max_restarts)});
  if (const auto& gpus = options.devices.gpus()) words.insert(words.end(), {"--gpus", base::joined(*gpus, ",")});
  return words;
}

/// Starts the ranks unless this process is one. Returns only in a rank.
void start_ranks(const TrainerOptions& options) {
  const int each =
      options.devices.gpus() ? static_cast<int>(options.devices.gpus()->size()) : options.devices.count().value_or(0);
  std::vector<std::string> words = job::own_arguments();
  if (words.empty()) throw base::SystemError("Trainer: cannot read /proc/self/cmdline to start its ranks", errno);
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  launcher::launch({.ranks = each, .nodes = options.nodes, .options = launch_arguments(options)},
                   static_cast<int>(words.size()), pointers.data());
}

comm::Group init_world(const TrainerOptions& options) {
  start_ranks(options);
  comm::Group world = comm::init();
  if (options.nodes != 1 && options.nodes != world.num_nodes())
    throw base::UsageError("TrainerOptions.nodes is " + std::to_string(options.nodes) + ", but this job has " +
                               std::to_string(world.num_nodes()) + (world.num_nodes() == 1 ? " host" : " hosts") +
                               "; expected the number of hosts of the job, or 1 to accept any",
                           "Allocate the hosts with salloc -N " + std::to_string(options.nodes) +
                               ", or start the program with lockstep run -H HOSTS");
  return world;
}

/// Applies LOCKSTEP_NAME and LOCKSTEP_TRACE, which the launcher sets.
TrainerOptions with_launcher_settings(TrainerOptions options, const base::Env& env) {
  if (options.name.empty()) options.name = env.lockstep_name.value_or("");
  options.trace |= env.lockstep_trace.value_or(false) && !options.folder.empty();
  return options;
}

}  // namespace

Trainer::Trainer(const TrainerOptions& options)
    : options_(resolve_options(with_launcher_settings(options, base::Env::this_process()))),
      world_(init_world(options_)) {}

void Trainer::register_for_checkpointing(const std::string& name, checkpoint::Stateful& state) {
  const bool known =
      std::any_of(states_.begin(), states_.end(), [&](const auto& other) { return other.first == name; });
  if (known || name.size() > 50 || !checkpoint::is_part_name(name))
    throw base::UsageError("Trainer::register_for_checkpointing(): the name is " + base::quoted(name, 80) +
                           (known ? ", which is already registered" : "") +
                           "; expected a unique name of 1 to 50 characters of a-z, A-Z, 0-9, _ and -");
  states_.emplace_back(name, &state);
}

}  // namespace lockstep::training

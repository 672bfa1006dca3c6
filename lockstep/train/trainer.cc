#include "lockstep/train/trainer.h"

#include <cerrno>
#include <fstream>
#include <iterator>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/comm/init.h"
#include "lockstep/launch/launch.h"

namespace lockstep::train {
namespace {

/// Of this process, as its launcher gave them.
std::vector<std::string> own_arguments() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  std::vector<std::string> words;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = text.find('\0', begin);
    words.push_back(text.substr(begin, end - begin));
    begin = end == std::string::npos ? text.size() : end + 1;
  }
  if (words.empty()) throw base::SystemError("Trainer: cannot read /proc/self/cmdline, with which its ranks would be started", errno);
  return words;
}

std::vector<std::string> words_of(const TrainerOptions& options) {
  std::vector<std::string> words;
  if (options.nodes == 1) words = {"--env-from", "none"};
  if (const auto& gpus = options.devices.gpus()) {
    std::string list;
    for (const int gpu : *gpus) list += (list.empty() ? "" : ",") + std::to_string(gpu);
    words.insert(words.end(), {"--gpus", list});
  }
  return words;
}

/// Returns in a rank.
void start_ranks(const TrainerOptions& options) {
  const int each = options.devices.gpus() ? static_cast<int>(options.devices.gpus()->size()) : options.devices.count().value_or(0);
  std::vector<std::string> words = own_arguments();
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  launcher::launch({.ranks = options.nodes * each, .options = words_of(options)}, static_cast<int>(words.size()), pointers.data());
}

comm::Group joined(const TrainerOptions& options) {
  start_ranks(options);
  comm::Group world = comm::init();
  if (options.nodes != 1 && options.nodes != world.num_nodes())
    throw base::UsageError("TrainerOptions.nodes is " + std::to_string(options.nodes) + ", and this job has " + std::to_string(world.num_nodes()) + (world.num_nodes() == 1 ? " host" : " hosts") +
                               "; allowed is what the job has, and 1, which says nothing",
                           "salloc -N " + std::to_string(options.nodes) + " before it, or lockstep run -H HOSTS");
  return world;
}

}  // namespace

Trainer::Trainer(const TrainerOptions& options) : options_(settle(options)), world_(joined(options_)) {}

}  // namespace lockstep::train

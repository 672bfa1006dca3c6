// Fuzzes the arguments of `lockstep`, one per line, and the values of some options.
#include <cstddef>
#include <cstdint>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/base/net/socket.h"
#include "lockstep/base/parse.h"
#include "lockstep/job/injection.h"
#include "lockstep/launch/cli/command_line.h"
#include "lockstep/launch/plan/job_plan.h"

using namespace lockstep;

namespace {

template <typename F>
void ignore_usage_errors(F&& call) {
  try {
    call();
  } catch (const base::UsageError&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  const std::vector<std::string> words = base::split(text, '\n');
  ignore_usage_errors([&] {
    launcher::cli::CommandLine command = launcher::cli::parse_command_line(words);
    if (command.subcommand != launcher::cli::Subcommand::kRun || command.run.ranks < 1 || command.run.ranks > 64)
      return;
    launcher::plan::Node here{.name = "here", .ranks = command.run.ranks},
        there{.name = "there", .ranks = 1, .is_local = false, .interface = "eth0"};
    here.info.cpus = {{}};
    there.info.gpus = 1;
    launcher::plan::plan_jobs(command.run,
                              {.environment = launcher::plan::apply_exports(words, command.run.exports),
                               .program = "/bin/true",
                               .launcher_directory = "/",
                               .exported = words,
                               .store = {"127.0.0.1", 1},
                               .job = "job"},
                              {here, there});
  });
  ignore_usage_errors([&] { job::parse_injection("--inject", text); });
  ignore_usage_errors([&] { base::net::parse_address("an address", text); });
  return 0;
}

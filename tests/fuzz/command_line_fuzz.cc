// The words after `lockstep`, one a line, and what stands in some of them.
#include <cstddef>
#include <cstdint>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/net/socket.h"
#include "lockstep/job/injection.h"
#include "lockstep/launch/cli/command_line.h"
#include "lockstep/launch/plan/job_plan.h"

using namespace lockstep;

namespace {

template <typename F>
void refused_or_taken(F&& call) {
  try {
    call();
  } catch (const base::UsageError&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  const std::vector<std::string> words = base::split(text, '\n');
  refused_or_taken([&] {
    launcher::Command command = launcher::parse_command_line(words);
    if (command.verb != launcher::Verb::kRun || command.run.ranks < 1 || command.run.ranks > 64) return;
    launcher::Node here{.name = "here", .ranks = command.run.ranks},
        there{.name = "there", .ranks = 1, .here = false, .interface = "eth0"};
    here.site.cpus = {{}};
    there.site.gpus = 1;
    launcher::plan_jobs(command.run,
                        {.environment = launcher::with_exports(words, command.run.exports),
                         .program = "/bin/true",
                         .here = "/",
                         .exported = words,
                         .store = {"127.0.0.1", 1},
                         .job = "job"},
                        {here, there});
  });
  refused_or_taken([&] { job::parse_injection("--inject", text); });
  refused_or_taken([&] { base::parse_address("an address", text); });
  return 0;
}

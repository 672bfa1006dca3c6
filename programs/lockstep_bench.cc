// The program lockstep-bench. `lockstep bench` executes it; it starts itself as `lockstep-bench rank` for each rank
// that it measures.
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "bench/harness/benchmark_job.h"
#include "bench/harness/benchmarks.h"
#include "bench/ranks/rank.h"
#include "lockstep/base/error.h"

int main(int argc, char** argv) {
  std::vector<std::string> words(argv + 1, argv + argc);
  try {
    if (!words.empty() && words.front() == "rank") {
      lockstep::bench::run_rank({words.begin() + 1, words.end()});
      return 0;
    }
    const lockstep::bench::Options options = lockstep::bench::parse_options(std::move(words));
    if (options.benchmark.empty()) {
      std::fputs(options.text.c_str(), stdout);
      return 0;
    }
    lockstep::bench::throw_on_signals();
    lockstep::bench::ResultPrinter report(options.json);
    lockstep::bench::run_benchmarks(options, report);
    return 0;
  } catch (const lockstep::base::Error& error) {
    std::fprintf(stderr, "lockstep-bench: %s%s%s\n", error.what(), error.hint().empty() ? "" : "; ",
                 error.hint().c_str());
    return lockstep::base::exit_code_before_start(error.cause());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "lockstep-bench: %s\n", error.what());
    return lockstep::base::exit_code(lockstep::base::Cause::kInternal);
  }
}

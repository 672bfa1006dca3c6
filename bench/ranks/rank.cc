#include "bench/ranks/rank.h"

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"

namespace lockstep::bench {

void run_rank(const std::vector<std::string>& words) {
  const std::string what = words.empty() ? "" : words[0];
  if (what == "all-reduce" && words.size() == 4)
    return run_all_reduce_rank(
        words[1], words[2],
        static_cast<std::size_t>(base::parse_int_in_range("bytes", words[3], 1, std::int64_t{1} << 40)));
  if (what == "step" && words.size() == 5) return run_step_rank(words[1], words[2], words[3], words[4]);
  if (what == "growth" && words.size() == 2) return run_growth_rank(words[1]);
  throw base::UsageError(
      "lockstep-bench rank " + base::quoted(what, 80) + ": unexpected arguments; only lockstep-bench starts ranks",
      "Run lockstep bench; see lockstep bench --help");
}

}  // namespace lockstep::bench

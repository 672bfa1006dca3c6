// The command line of lockstep-bench.
#pragma once

#include <string>
#include <vector>

namespace lockstep::bench {

struct Options {
  std::string what;  ///< all-reduce, step, launch, memory or arena; empty: show `text`
  int ranks = 0;     ///< 0: what is usual for `what`
  std::vector<std::size_t> sizes;
  std::vector<std::string> models;
  std::string optimizer = "sgd";
  std::vector<std::string> impls;  ///< only these; empty: all
  int rounds = 7;
  bool json = false;
  std::vector<std::string> mpis;  ///< folders of MPI installations besides the one in PATH
  std::string python;             ///< empty: the first that has torch
  std::string text;
};

/// Pure. Throws UsageError, one line that names the argument, the value got and the values allowed.
Options parse_options(std::vector<std::string> words);

}  // namespace lockstep::bench

// The command line of lockstep-bench.
#pragma once

#include <string>
#include <vector>

namespace lockstep::bench {

/// The parsed command line.
struct Options {
  std::string benchmark;  ///< all-reduce, step, launch, memory or arena; empty: print `text`
  int ranks = 0;          ///< 0: the default of the benchmark
  std::vector<std::size_t> sizes;
  std::vector<std::string> models;
  std::string optimizer = "sgd";
  std::vector<std::string> impls;  ///< implementations to measure; empty: all
  int rounds = 7;
  bool json = false;
  std::vector<std::string> mpis;  ///< directories of MPI installations besides the one in PATH
  std::string python;             ///< empty: the first one with torch
  std::string text;               ///< the help text, after --help
};

/// Parses the command line. Pure. Throws a UsageError of one line that names the option, its value and the expected
/// values.
Options parse_options(std::vector<std::string> words);

}  // namespace lockstep::bench

// Prints results as tables, and as JSON Lines.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bench/harness/statistics.h"

namespace lockstep::bench {

/// The result of one implementation in a comparison.
struct ComparisonRow {
  std::string impl;
  TimingSummary seconds;
  double ratio = 1;  ///< to the first row of the comparison
  std::optional<double> ratio_to_memcpy;
  bool is_noisy = false;
};

/// The results of one comparison, with its parameters.
struct ComparisonResult {
  std::string what;
  int ranks = 0;
  std::uint64_t bytes = 0;  ///< size of an all-reduce, else 0
  std::string model;        ///< model of a step, else ""
  std::string optimizer;
  std::vector<ComparisonRow> rows;
  std::uint64_t parameters = 0;  ///< of the model
  double bandwidth = 0;          ///< bytes per second read and written by memcpy on all ranks together; 0: not measured
};

/// Prints results to stdout as they arrive. Used by one thread.
class ResultPrinter {
 public:
  /// Prints tables to stdout, or with `json` JSON Lines to stdout and tables to stderr. The first line describes the
  /// machine.
  explicit ResultPrinter(bool json);

  void add(const ComparisonResult& comparison);
  /// Prints a comparison of bytes: a name and a value for each implementation.
  void add_bytes(const std::string& what, int ranks, const std::string& model, const std::string& optimizer,
                 const std::vector<std::pair<std::string, double>>& values);
  /// Reports on stderr a baseline that was not measured, with the reason or how to install it.
  void report_missing(const std::string& baseline, const std::string& reason);

 private:
  const bool json_;
};

}  // namespace lockstep::bench

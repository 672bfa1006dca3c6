// What was measured, as tables for people and as lines of JSON.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bench/harness/statistics.h"

namespace lockstep::bench {

/// One line: an implementation in one race.
struct ComparisonRow {
  std::string impl;
  TimingSummary seconds;
  double ratio = 1;  ///< to the first row of the race
  std::optional<double> ratio_to_memcpy;
  bool noisy = false;
};

/// The rows of one race, of which `what`, `ranks` and the rest are alike.
struct ComparisonResult {
  std::string what;
  int ranks = 0;
  std::uint64_t bytes = 0;  ///< of an all-reduce, else 0
  std::string model;        ///< of a step, else ""
  std::string optimizer;
  std::vector<ComparisonRow> rows;
  std::uint64_t parameters = 0;  ///< of the model
  double bandwidth = 0;          ///< bytes read and written a second by all ranks' memcpy together; 0: not measured
};

class ResultPrinter {
 public:
  /// Prints tables, or with `json` lines of JSON to stdout and tables to stderr. The first line describes the machine.
  explicit ResultPrinter(bool json);

  void add(const ComparisonResult& comparison);
  /// Something that is not a time, in bytes: name and value for each implementation.
  void add_bytes(const std::string& what, int ranks, const std::string& model, const std::string& optimizer,
                 const std::vector<std::pair<std::string, double>>& values);
  /// A peer that could not be measured.
  void report_missing(const std::string& peer, const std::string& how_to_get);

 private:
  const bool json_;
};

}  // namespace lockstep::bench

// Helpers for tests that run `lockstep run`.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <string>
#include <vector>

#include "lockstep/job/fatal.h"
#include "tests/support/spawn.h"

namespace lockstep::tests {

using namespace std::chrono_literals;
using base::Deadline;
using Words = std::vector<std::string>;

inline const std::string kLockstep = LOCKSTEP_PROGRAM_PATH;
inline const std::string kProbe = LOCKSTEP_PROBE_PATH;

/// Returns the options that start `lockstep run WORDS...`.
inline SpawnOptions lockstep_run(const Words& words, std::map<std::string, std::string> env = {}) {
  SpawnOptions options;
  options.argv = {kLockstep, "run"};
  options.argv.insert(options.argv.end(), words.begin(), words.end());
  options.env = std::move(env);
  return options;
}

/// Returns the options that start `lockstep run -n RANKS OPTIONS... sh -c SCRIPT`.
inline SpawnOptions shell_ranks(int ranks, const std::string& script, const Words& options = {}) {
  Words words = {"-n", std::to_string(ranks)};
  words.insert(words.end(), options.begin(), options.end());
  words.insert(words.end(), {"sh", "-c", script});
  return lockstep_run(words);
}

/// Parses the last line of `text`, which must be a FATAL line; otherwise the test fails.
inline job::Fatal fatal_in(const std::string& text) {
  const std::size_t begin = text.size() < 2 ? 0 : text.rfind('\n', text.size() - 2) + 1;
  const std::string line = text.substr(begin, text.size() - begin - 1);
  const auto fatal = job::parse_fatal(line);
  EXPECT_TRUE(fatal) << "the last line is not a FATAL line:\n" << text;
  return fatal.value_or(job::Fatal{});
}

}  // namespace lockstep::tests

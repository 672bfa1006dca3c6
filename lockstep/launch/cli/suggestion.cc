#include "lockstep/launch/cli/suggestion.h"

#include <algorithm>
#include <cstddef>
#include <numeric>

namespace lockstep::launcher::cli {
namespace {

constexpr std::size_t kMaxDistance = 3;
constexpr std::size_t kMaxWordBytes = 100;

/// The number of characters to insert, delete or replace, or of adjacent ones to swap (optimal string alignment;
/// Damerau, Comm. ACM 7, 1964).
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<std::size_t>> table(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i) table[i][0] = i;
  std::iota(table[0].begin(), table[0].end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i)
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = table[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      table[i][j] = std::min({replaced, table[i - 1][j] + 1, table[i][j - 1] + 1});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        table[i][j] = std::min(table[i][j], table[i - 2][j - 2] + 1);
    }
  return table[a.size()][b.size()];
}

}  // namespace

std::string suggestion(std::string_view word, const std::vector<std::string>& known) {
  if (word.size() > kMaxWordBytes) return "";
  const std::string* best = nullptr;
  std::size_t best_distance = std::min(kMaxDistance, word.size() / 3) + 1;
  for (const std::string& name : known) {
    const std::size_t here = distance(word, name);
    if (here >= best_distance) continue;
    best = &name;
    best_distance = here;
  }
  return best ? "; did you mean " + *best + "?" : "";
}

}  // namespace lockstep::launcher::cli

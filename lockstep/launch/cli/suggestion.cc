#include "lockstep/launch/cli/suggestion.h"

#include <algorithm>
#include <cstddef>
#include <numeric>

namespace lockstep::launcher::cli {
namespace {

constexpr std::size_t kMaxDistance = 3;
constexpr std::size_t kMaxWordBytes = 100;

/// The number of characters to insert, delete or replace (Wagner and Fischer, J. ACM 21, 1974).
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
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

#include "bench/ranks/harness_channel.h"

#include <unistd.h>

#include <chrono>
#include <sstream>

#include "lockstep/base/env.h"
#include "lockstep/base/parse.h"

namespace lockstep::bench {

HarnessChannel::HarnessChannel(const std::string& prefix, int rank) {
  const std::string own = prefix + "." + std::to_string(rank);
  std::ofstream(own + ".pid") << ::getpid();
  requests_.open(own);
  if (rank == 0) results_.open(prefix + ".answers");
  results_.precision(9);
}

std::optional<std::vector<std::int64_t>> HarnessChannel::next_request() {
  std::string text;
  if (!std::getline(requests_, text)) return std::nullopt;
  std::istringstream line(text);
  std::vector<std::int64_t> numbers;
  for (std::int64_t number = 0; line >> number;) numbers.push_back(number);
  return numbers;
}

void HarnessChannel::send_result(const std::vector<double>& numbers) {
  if (!results_.is_open()) return;
  for (const double number : numbers) results_ << number << ' ';
  results_ << std::endl;
}

int own_rank() {
  return static_cast<int>(base::parse_int_in_range("RANK", base::Env::this_process().rank.value_or("0"), 0, 1 << 20));
}
int num_ranks() {
  return static_cast<int>(
      base::parse_int_in_range("WORLD_SIZE", base::Env::this_process().world_size.value_or("1"), 1, 1 << 20));
}

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace lockstep::bench

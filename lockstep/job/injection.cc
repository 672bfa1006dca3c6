#include "lockstep/job/injection.h"

#include <array>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"

namespace lockstep::job {
namespace {

struct Kind {
  std::string_view name;
  Fault fault;
};
constexpr std::array kKinds = {
    Kind{"kill", Fault::kKill},       Kind{"stop", Fault::kStop},   Kind{"segv", Fault::kSegv},
    Kind{"loop", Fault::kLoop},       Kind{"throw", Fault::kThrow}, Kind{"desync", Fault::kDesync},
    Kind{"corrupt", Fault::kCorrupt}, Kind{"flip", Fault::kFlip},   Kind{"slow", Fault::kSlow}};

/// N of "NAME=N"; -1 when it is not that.
std::int64_t value_of(std::string_view part, std::string_view name) {
  if (!part.starts_with(name) || part.size() <= name.size() || part[name.size()] != '=') return -1;
  return base::parse_int(part.substr(name.size() + 1)).value_or(-1);
}

}  // namespace

Injection parse_injection(const char* what, const std::string& text) {
  const std::size_t at = text.find('@');
  const auto parts = base::split(at == std::string::npos ? "" : std::string_view(text).substr(at + 1), ',');
  Injection injection;
  for (const Kind& kind : kKinds)
    if (std::string_view(text).substr(0, at) == kind.name) injection.fault = kind.fault;
  const std::int64_t rank = parts.size() == 2 ? value_of(parts[0], "rank") : -1;
  const std::int64_t step = parts.size() == 2 ? value_of(parts[1], "step") : -1;
  if (injection.fault == Fault::kNone || rank < 0 || rank > (1 << 20) || step < 1) {
    std::string names;
    for (const Kind& kind : kKinds) names += (names.empty() ? "" : ", ") + std::string(kind.name);
    throw base::UsageError(std::string(what) + " is " + base::quoted(text, 80) +
                           "; allowed is KIND@rank=R,step=S with S of 1 or more, and as KIND " + names);
  }
  injection.rank = static_cast<int>(rank);
  injection.step = step;
  return injection;
}

}  // namespace lockstep::job

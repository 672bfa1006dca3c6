#include "lockstep/job/injection.h"

#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"

namespace lockstep::job {
namespace {

constexpr std::pair<const char*, Fault> kFaults[] = {
    {"kill", Fault::kKill},       {"stop", Fault::kStop},   {"segv", Fault::kSegv},
    {"loop", Fault::kLoop},       {"throw", Fault::kThrow}, {"desync", Fault::kDesync},
    {"corrupt", Fault::kCorrupt}, {"flip", Fault::kFlip},   {"slow", Fault::kSlow}};

/// Returns N of "NAME=N", or -1 if `part` does not have this form.
std::int64_t parse_field(std::string_view part, std::string_view name) {
  if (!part.starts_with(name) || part.size() <= name.size() || part[name.size()] != '=') return -1;
  return base::parse_int(part.substr(name.size() + 1)).value_or(-1);
}

}  // namespace

Injection parse_injection(const char* what, const std::string& text) {
  const std::size_t at = text.find('@');
  const auto parts = base::split(at == std::string::npos ? "" : std::string_view(text).substr(at + 1), ',');
  Injection injection;
  for (const auto& [name, fault] : kFaults)
    if (text.substr(0, at) == name) injection.fault = fault;
  const std::int64_t rank = parts.size() == 2 ? parse_field(parts[0], "rank") : -1;
  const std::int64_t step = parts.size() == 2 ? parse_field(parts[1], "step") : -1;
  if (injection.fault == Fault::kNone || rank < 0 || rank > (1 << 20) || step < 1)
    throw base::UsageError(std::string(what) + " is " + base::quoted(text, 80) +
                           "; expected KIND@rank=R,step=S with S at least 1 and KIND one of " +
                           base::joined(kFaults, ", ", [](const auto& fault) { return fault.first; }));
  injection.rank = static_cast<int>(rank);
  injection.step = step;
  return injection;
}

}  // namespace lockstep::job

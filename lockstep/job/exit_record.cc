#include "lockstep/job/exit_record.h"

#include <string.h>

#include <climits>

#include "lockstep/base/parse.h"
#include "lockstep/job/fatal.h"

namespace lockstep::job {
namespace {

constexpr std::string_view kClosedText = "closed";
constexpr std::string_view kCodePrefix = "code ";
constexpr std::string_view kSignalPrefix = "signal ";

std::optional<ExitRecord> parse_number(ExitKind kind, std::string_view digits) {
  const auto number = base::parse_int(digits);
  if (!number || *number < 0 || *number > INT_MAX) return std::nullopt;
  return ExitRecord{kind, static_cast<int>(*number)};
}

}  // namespace

std::string encode(const ExitRecord& record) {
  switch (record.kind) {
    case ExitKind::kClosed: break;
    case ExitKind::kCode: return std::string(kCodePrefix) + std::to_string(record.number);
    case ExitKind::kSignal: return std::string(kSignalPrefix) + std::to_string(record.number);
  }
  return std::string(kClosedText);
}

std::optional<ExitRecord> parse_exit_record(std::string_view text) {
  if (text == kClosedText) return ExitRecord{};
  if (text.starts_with(kCodePrefix)) return parse_number(ExitKind::kCode, text.substr(kCodePrefix.size()));
  if (text.starts_with(kSignalPrefix)) return parse_number(ExitKind::kSignal, text.substr(kSignalPrefix.size()));
  return std::nullopt;
}

std::optional<ExitRecord> find_exit(Store& store, int rank, base::Deadline deadline) {
  const auto text = store.find(key::exited(rank), deadline);
  return text ? parse_exit_record(*text) : std::nullopt;
}

std::string describe(const ExitRecord& record) {
  switch (record.kind) {
    case ExitKind::kClosed: break;
    case ExitKind::kCode: return "exited with code " + std::to_string(record.number);
    case ExitKind::kSignal: return "killed by " + signal_name(record.number);
  }
  return "ended without saying why";
}

std::string signal_name(int signal) {
  const char* name = ::sigabbrev_np(signal);
  return name ? std::string("SIG") + name : "signal " + std::to_string(signal);
}

}  // namespace lockstep::job

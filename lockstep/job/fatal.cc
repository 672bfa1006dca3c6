#include "lockstep/job/fatal.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <climits>

#include "lockstep/base/net/socket.h"
#include "lockstep/base/parse.h"

namespace lockstep::job {
namespace {

std::string format_number(std::int64_t value) { return value < 0 ? "-" : std::to_string(value); }

/// Converts `text` to an unquoted value: one word that does not start with a quote.
std::string to_word(std::string text) {
  if (text.empty()) return "-";
  for (char& c : text)
    if (static_cast<unsigned char>(c) <= ' ' || c == 0x7f) c = '_';
  if (text.front() == '"') text.front() = '_';
  return text;
}

/// Returns the character that the escape sequence at line[i] stands for and moves `i` to its last character.
char unescape(std::string_view line, std::size_t& i) {
  if (line[i] == 'n') return '\n';
  int code = 0;
  if (line[i] == 'x' && i + 2 < line.size() &&
      std::from_chars(&line[i + 1], &line[i + 3], code, 16).ec == std::errc()) {
    i += 2;
    return static_cast<char>(code);
  }
  return line[i];
}

/// Removes `key=VALUE ` or `key="VALUE"` from the front of `line` and returns the value.
std::optional<std::string> take_field(std::string_view& line, std::string_view key) {
  if (!line.starts_with(key) || line.size() <= key.size() || line[key.size()] != '=') return std::nullopt;
  line.remove_prefix(key.size() + 1);
  std::string value;
  if (!line.starts_with('"')) {
    const std::size_t end = std::min(line.find(' '), line.size());
    if (end == 0) return std::nullopt;
    value = line.substr(0, end);
    line.remove_prefix(std::min(end + 1, line.size()));
    return value;
  }
  for (std::size_t i = 1; i < line.size(); ++i) {
    if (line[i] == '"') {
      line.remove_prefix(std::min(i + 2, line.size()));
      return value;
    }
    if (line[i] == '\\' && i + 1 < line.size()) {
      value += unescape(line, ++i);
    } else {
      value += line[i];
    }
  }
  return std::nullopt;
}

std::string format_fields(const Fatal& fatal) {
  return "cause=" + std::string(name(fatal.cause)) + " rank=" + format_number(fatal.rank) +
         " host=" + to_word(fatal.host) + " pid=" + format_number(fatal.pid) + " gen=" + format_number(fatal.gen) +
         " step=" + format_number(fatal.step) + " op=" + to_word(fatal.op) + " detail=" + base::quoted(fatal.detail) +
         " hint=" + base::quoted(fatal.hint);
}

}  // namespace

Fatal to_fatal(const base::Error& error) {
  return {.cause = error.cause(),
          .host = base::net::host_name(),
          .pid = ::getpid(),
          .detail = error.what(),
          .hint = error.hint()};
}

std::string format_fatal(const Fatal& fatal) { return "FATAL " + format_fields(fatal); }
std::string format_warning(const Fatal& fatal) { return "WARN " + format_fields(fatal); }

std::optional<Fatal> parse_fatal(std::string_view line) {
  constexpr std::string_view kPrefix = "FATAL ";
  if (!line.starts_with(kPrefix)) return std::nullopt;
  line.remove_prefix(kPrefix.size());
  std::optional<std::string> values[9];
  int at = 0;
  for (const char* key : {"cause", "rank", "host", "pid", "gen", "step", "op", "detail", "hint"})
    if (!(values[at++] = take_field(line, key))) return std::nullopt;
  const auto integer = [](const std::string& text, std::int64_t most = INT64_MAX) {
    const std::int64_t value = base::parse_int(text).value_or(-1);
    return value < 0 || value > most ? -1 : value;
  };
  const auto text = [](const std::string& value) { return value == "-" ? std::string() : value; };
  return Fatal{.cause = base::cause_from_name(*values[0]),
               .rank = static_cast<int>(integer(*values[1], INT_MAX)),
               .host = text(*values[2]),
               .pid = integer(*values[3]),
               .gen = static_cast<int>(std::max<std::int64_t>(0, integer(*values[4], INT_MAX))),
               .step = integer(*values[5]),
               .op = text(*values[6]),
               .detail = *values[7],
               .hint = *values[8]};
}

std::string key::exited(int rank) { return "exited/" + std::to_string(rank); }
std::string key::left(int rank) { return "left/" + std::to_string(rank); }
std::string key::progress(int rank) { return "progress/" + std::to_string(rank); }

Fatal publish_cause(Store& store, const Fatal& fatal) noexcept {
  try {
    const std::string kept =
        store.compare_set(key::kCause, "", format_fatal(fatal), base::Deadline::in(std::chrono::seconds(2)));
    return parse_fatal(kept).value_or(fatal);
  } catch (const std::exception&) {
    return fatal;
  }
}

void replace_cause(Store& store, const Fatal& fatal) noexcept {
  const auto takes_part = [&](const Fatal& cause) {
    return cause.rank == fatal.rank ||
           (cause.detail + " ").find("rank " + std::to_string(fatal.rank) + " ") != std::string::npos;
  };
  const bool has_lost_peer = fatal.cause == base::Cause::kPeerUnreachable;
  if (!has_lost_peer) publish_cause(store, fatal);
  try {
    const auto deadline = base::Deadline::in(std::chrono::seconds(2));
    const std::string line = store.find(key::kCause, deadline).value_or("");
    const std::string replaced = store.find(key::kReplacedCause, deadline).value_or("");
    const auto now = parse_fatal(line), before = parse_fatal(replaced);
    if (now && !has_lost_peer && replaced.empty() && is_difference(now->cause) && takes_part(*now)) {
      store.set(key::kReplacedCause, line, deadline);
      store.compare_set(key::kCause, line, format_fatal(fatal), deadline);
    } else if (now && before && now->rank != fatal.rank && takes_part(*before)) {
      store.compare_set(key::kCause, line, replaced, deadline);
    }
  } catch (const std::exception&) {
    // The store is lost, so that no process reads the cause.
  }
}

}  // namespace lockstep::job

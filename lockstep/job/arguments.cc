#include "lockstep/job/arguments.h"

#include <algorithm>
#include <fstream>

#include "lockstep/base/parse.h"

namespace lockstep::job {
namespace {

constexpr std::size_t kMaxArguments = 64;
constexpr std::size_t kMaxArgumentBytes = 100;
constexpr std::size_t kMaxCmdlineBytes = 1 << 16;

std::string quote_around(const std::vector<std::string>& arguments, std::size_t at) {
  std::string text;
  for (std::size_t i = at ? at - 1 : 0; i < arguments.size() && i < at + 2; ++i)
    text += (text.empty() ? "" : " ") + base::quoted(arguments[i], kMaxArgumentBytes);
  return text.empty() ? "none" : text;
}

}  // namespace

std::vector<std::string> comparable_arguments(std::string_view cmdline) {
  std::vector<std::string> arguments = base::split(cmdline, '\0');
  if (!arguments.empty()) arguments.pop_back();  // the empty text after the last zero byte
  std::vector<std::string> kept;
  for (std::size_t i = 1; i < arguments.size() && kept.size() < kMaxArguments; ++i) {
    std::string& word = arguments[i];
    if (word.find("rank") != std::string::npos) {
      i += word.find('=') == std::string::npos;
      continue;
    }
    word.resize(std::min(word.size(), kMaxArgumentBytes));
    std::replace_if(word.begin(), word.end(), [](unsigned char c) { return c < 0x20; }, ' ');
    kept.push_back(std::move(word));
  }
  return kept;
}

std::vector<std::string> process_arguments() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string text(kMaxCmdlineBytes, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(file.gcount()));
  return comparable_arguments(text);
}

std::string argument_difference(const std::vector<std::string>& theirs, const std::vector<std::string>& first) {
  const auto [a, b] = std::mismatch(theirs.begin(), theirs.end(), first.begin(), first.end());
  if (a == theirs.end() && b == first.end()) return "";
  const auto at = static_cast<std::size_t>(a - theirs.begin());
  return quote_around(theirs, at) + " instead of " + quote_around(first, at);
}

}  // namespace lockstep::job

#include "lockstep/job/arguments.h"

#include <algorithm>
#include <fstream>
#include <iterator>

#include "lockstep/base/parse.h"

namespace lockstep::job {
namespace {

constexpr std::size_t kMaxArguments = 64;
constexpr std::size_t kMaxArgumentBytes = 100;

std::string quote_around(const std::vector<std::string>& arguments, std::size_t at) {
  std::string text;
  for (std::size_t i = at ? at - 1 : 0; i < arguments.size() && i < at + 2; ++i)
    text += (text.empty() ? "" : " ") + base::quoted(arguments[i], kMaxArgumentBytes);
  return text.empty() ? "none" : text;
}

}  // namespace

std::vector<std::string> own_arguments() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  std::vector<std::string> words = base::split(text, '\0');
  words.pop_back();  // the empty text after the last zero byte
  return words;
}

std::vector<std::string> comparable_arguments(std::vector<std::string> command_line) {
  std::vector<std::string> kept;
  for (std::size_t i = 1; i < command_line.size() && kept.size() < kMaxArguments; ++i) {
    std::string& word = command_line[i];
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

std::string argument_difference(const std::vector<std::string>& theirs, const std::vector<std::string>& first) {
  const auto [a, b] = std::mismatch(theirs.begin(), theirs.end(), first.begin(), first.end());
  if (a == theirs.end() && b == first.end()) return "";
  const auto at = static_cast<std::size_t>(a - theirs.begin());
  return quote_around(theirs, at) + " instead of " + quote_around(first, at);
}

}  // namespace lockstep::job

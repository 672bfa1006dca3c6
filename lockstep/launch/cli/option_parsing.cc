#include "lockstep/launch/cli/option_parsing.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstring>

#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"
#include "lockstep/base/parse.h"
#include "lockstep/launch/cli/suggestion.h"

namespace lockstep::launcher::cli {
namespace {

constexpr double kMaxSeconds = 10.0 * 365 * 24 * 3600;

/// Replaces -np by -n among the options at the front of `words`, and returns the index of the first word after them.
std::size_t end_of_options(const CLI::App& app, std::vector<std::string>& words) {
  for (std::size_t i = 0; i < words.size(); ++i) {
    std::string& word = words[i];
    if (word == "--" || word.size() < 2 || word[0] != '-') return i;
    if (word.rfind("-np", 0) == 0) word.erase(2, 1);
    const CLI::Option* option = app.get_option_no_throw(word);
    if (option && option->get_expected_max() > 0 && option->get_items_expected_max() > 0) ++i;
  }
  return words.size();
}

/// Returns "; did you mean --OPTION?" for an unknown option, perhaps with a value; "" if none is similar.
std::string similar_option(const CLI::App& app, const std::string& word) {
  std::vector<std::string> known;
  for (const CLI::Option* option : app.get_options())
    for (const std::string& name : option->get_lnames()) known.push_back("--" + name);
  return suggestion(word.substr(0, word.find('=')), known);
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace

void begin_option_group(CLI::App& app, const char* heading) { app.option_defaults()->group(heading); }

void declare_option(CLI::App& app, const char* name, std::string& value, const char* type, const char* text) {
  app.add_option(name, value, text)->type_name(type);
}

bool is_given(const CLI::App& app, const char* name) { return app.get_option(name)->count() > 0; }

std::optional<std::vector<std::string>> parse_options(CLI::App& app, const std::string& subcommand,
                                                      std::vector<std::string> words) {
  const std::size_t end = end_of_options(app, words);
  // CLI11 expects the words in reverse order.
  std::vector<std::string> options(words.rend() - static_cast<std::ptrdiff_t>(end), words.rend());
  try {
    app.parse(options);
  } catch (const CLI::CallForHelp&) {
    return std::nullopt;
  } catch (const CLI::ExtrasError&) {
    throw base::UsageError("lockstep " + subcommand + ": unknown option " + base::quoted(app.remaining().front(), 80) +
                           "; see lockstep " + subcommand + " --help" + similar_option(app, app.remaining().front()));
  } catch (const CLI::ParseError& error) {
    throw base::UsageError("lockstep " + subcommand + ": " + first_line(error.what()) + "; see lockstep " + subcommand +
                           " --help");
  }
  const std::size_t begin = end < words.size() && words[end] == "--" ? end + 1 : end;
  return std::vector<std::string>(words.begin() + static_cast<std::ptrdiff_t>(begin), words.end());
}

std::string check_one_of(const char* what, const std::string& got, std::initializer_list<const char*> expected) {
  std::string list;
  for (const char* one : expected) {
    if (got == one) return got;
    list += (list.empty() ? "" : ", ") + std::string(one);
  }
  throw base::UsageError(std::string(what) + " is " + base::quoted(got, 80) + "; expected one of " + list);
}

const std::string& check_not_empty(const char* what, const std::string& text, const char* expected) {
  if (text.empty()) throw base::UsageError(std::string(what) + " is \"\"; expected " + expected);
  return text;
}

double seconds(const char* what, const std::string& text, double low) {
  const auto value = base::parse_double(text);
  if (!value || *value < low || *value > kMaxSeconds)
    throw base::UsageError(std::string(what) + " is " + base::quoted(text, 80) + "; expected seconds, " +
                           (low > 0 ? "more than 0" : "0 or more"));
  return *value;
}

std::chrono::milliseconds milliseconds(const char* what, const std::string& text) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds(what, text, 0) * 1000));
}

std::string read_option_file(const char* what, const std::string& file) {
  constexpr std::size_t kMaxBytes = std::size_t{1} << 20;
  const auto refuse = [&](const std::string& why) {
    throw base::UsageError(std::string(what) + " is " + base::quoted(file, 256) + ": " + why +
                           "; expected a text file");
  };
  const base::Fd fd(::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat info{};
  if (!fd || ::fstat(fd.get(), &info) != 0) refuse(std::strerror(errno));
  if (S_ISDIR(info.st_mode)) refuse("a directory");
  std::string text;
  char bytes[1 << 14];
  while (const ssize_t size = ::read(fd.get(), bytes, sizeof bytes)) {
    if (size < 0) refuse(std::strerror(errno));
    text.append(bytes, static_cast<std::size_t>(size));
    if (text.size() > kMaxBytes) refuse("longer than " + std::to_string(kMaxBytes) + " bytes");
  }
  return text;
}

}  // namespace lockstep::launcher::cli

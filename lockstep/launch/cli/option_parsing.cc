#include "lockstep/launch/cli/option_parsing.h"

#include <CLI/CLI.hpp>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"

namespace lockstep::launcher {
namespace {

constexpr double kMaxSeconds = 10.0 * 365 * 24 * 3600;

/// Turns -np into -n, as far as options go, and returns where they end.
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

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace

void declare_option(CLI::App& app, const char* name, std::string& value, const char* type, const char* text) {
  app.add_option(name, value, text)->type_name(type);
}

bool is_given(const CLI::App& app, const char* name) { return app.get_option(name)->count() > 0; }

std::optional<std::vector<std::string>> parse_options(CLI::App& app, const std::string& verb,
                                                      std::vector<std::string> words) {
  const std::size_t end = end_of_options(app, words);
  // CLI11 takes the words in reverse order.
  std::vector<std::string> options(words.rend() - static_cast<std::ptrdiff_t>(end), words.rend());
  try {
    app.parse(options);
  } catch (const CLI::CallForHelp&) {
    return std::nullopt;
  } catch (const CLI::ExtrasError&) {
    throw base::UsageError("lockstep " + verb + ": " + base::quoted(app.remaining().front(), 80) +
                           " is no option; lockstep " + verb + " --help shows those that are allowed");
  } catch (const CLI::ParseError& error) {
    throw base::UsageError("lockstep " + verb + ": " + first_line(error.what()) + "; lockstep " + verb +
                           " --help shows what is allowed");
  }
  const std::size_t begin = end < words.size() && words[end] == "--" ? end + 1 : end;
  return std::vector<std::string>(words.begin() + static_cast<std::ptrdiff_t>(begin), words.end());
}

std::string check_one_of(const char* what, const std::string& got, std::initializer_list<const char*> allowed) {
  std::string list;
  for (const char* one : allowed) {
    if (got == one) return got;
    list += (list.empty() ? "" : ", ") + std::string(one);
  }
  throw base::UsageError(std::string(what) + " is " + base::quoted(got, 80) + "; allowed are " + list);
}

const std::string& check_not_empty(const char* what, const std::string& text, const char* allowed) {
  if (text.empty()) throw base::UsageError(std::string(what) + " is \"\"; allowed is " + allowed);
  return text;
}

double seconds(const char* what, const std::string& text, double low) {
  const auto value = base::parse_double(text);
  if (!value || *value < low || *value > kMaxSeconds)
    throw base::UsageError(std::string(what) + " is " + base::quoted(text, 80) + "; allowed are seconds, " +
                           (low > 0 ? "more than 0" : "0 or more"));
  return *value;
}

std::chrono::milliseconds milliseconds(const char* what, const std::string& text) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds(what, text, 0) * 1000));
}

}  // namespace lockstep::launcher

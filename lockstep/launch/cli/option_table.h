// The options of a subcommand as a table: one row has an option's names, its variable, its type and its text. The
// parser and the --help text are made from the rows, and all error messages have the same form.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"

namespace CLI {
class App;
}

namespace lockstep::launcher::cli {

/// How the text of an option becomes a value.
template <typename T>
struct OptionType {
  std::string name;  ///< of the value in the help text, such as "SECONDS"
  /// Returns the value. Throws a UsageError that begins with `what`, the option.
  std::function<T(const std::string& what, const std::string& text)> parse;
  std::function<std::string(const T&)> print = nullptr;  ///< the text of a default; may be null
  std::vector<std::string> values = {};                  ///< all texts, if there are few

  OptionType named(std::string other) && {
    name = std::move(other);
    return std::move(*this);
  }
};

/// Throws a UsageError, "WHAT is "TEXT"; expected EXPECTED", unless `good`.
void check_value(bool good, const std::string& what, const std::string& text, const std::string& expected);

OptionType<int> integer(int low, int high);
/// Seconds, at least `low` and at most `high` (0: ten years), perhaps with a fraction.
OptionType<std::chrono::milliseconds> seconds(double low = 0, double high = 0);
OptionType<std::chrono::seconds> whole_seconds(int low, int high);
/// A text for which `is_good` returns true; `expected` is what the error asks for.
OptionType<std::string> text(std::string name, std::function<bool(std::string_view)> is_good, std::string expected);
/// A text that is not empty.
OptionType<std::string> text(std::string name, std::string expected);
/// A name that may be a part of a path.
OptionType<std::string> plain_name();
bool is_plain_name(std::string_view text);
/// A text that is checked by `check`, which throws a UsageError and whose result is not used.
template <typename Check>
OptionType<std::string> checked_text(std::string name, Check check) {
  return {std::move(name), [check = std::move(check)](const std::string& what, const std::string& text) {
            check(what.c_str(), text);
            return text;
          }};
}
/// One of several texts, each with its value.
template <typename T>
OptionType<T> choice(std::string name, std::vector<std::pair<std::string, T>> choices) {
  std::vector<std::string> values;
  for (const auto& [value_text, value] : choices) values.push_back(value_text);
  const auto print = [choices](const T& value) {
    for (const auto& [value_text, other] : choices)
      if (other == value) return value_text;
    return std::string();
  };
  const auto parse = [choices, values](const std::string& what, const std::string& got) {
    for (const auto& [value_text, value] : choices)
      if (value_text == got) return value;
    throw base::UsageError(what + " is " + base::quoted(got, 80) + "; expected " + base::alternatives(values));
  };
  return {std::move(name), parse, print, values};
}
/// One of several texts, which is the value.
template <typename Texts>
OptionType<std::string> choice_of(std::string name, const Texts& texts) {
  std::vector<std::pair<std::string, std::string>> choices;
  for (const auto& text : texts) choices.emplace_back(text, text);
  return choice<std::string>(std::move(name), std::move(choices));
}

/// Returns "; did you mean NAME?" for the most similar of `known`, or "" if none is similar: if more than a third of
/// the word, or more than three characters, would have to change (Levenshtein distance). Pure.
std::string suggestion(std::string_view word, const std::vector<std::string>& known);

class OptionTable {
 public:
  /// `command` begins each error, such as "lockstep run"; `usage` follows "usage: " in the help text.
  OptionTable(std::string command, std::string usage, const std::string& description);
  ~OptionTable();

  /// Begins a group of the help text, with its heading and an example.
  void group(const std::string& heading, std::string example);
  void footer(const std::string& text);

  /// Adds a row. `names` are the option's names separated by commas; errors use the first. In `help`, {default} stands
  /// for the text of `otherwise`, else of the value that the variable has now, and {values} for all texts, with the
  /// default marked. Parsing sets the variable, which must exist until then, if the option is given.
  template <typename T, typename Variable>
  void option(const std::string& names, Variable& variable, OptionType<T> type, std::string help,
              const std::optional<std::type_identity_t<T>>& otherwise = {}) {
    std::string default_text;
    if constexpr (std::is_convertible_v<Variable, T>) default_text = type.print ? type.print(variable) : "";
    if (otherwise) default_text = type.print(*otherwise);
    fill_in(help, default_text, type.values);
    add_option(names, type.name, help,
               [&variable, parse = std::move(type.parse)](const std::string& what, auto& texts) {
                 variable = parse(what, texts.back());
               });
  }
  /// The same for an option that may be repeated.
  void list(const std::string& names, std::vector<std::string>& variable, const OptionType<std::string>& type,
            const std::string& help);
  void flag(const std::string& names, bool& variable, const std::string& help);
  /// An option with an optional value, --NAME[=VALUE]; without one, the value is `otherwise`.
  void optional_value(const std::string& name, std::string& variable, const OptionType<std::string>& type,
                      const std::string& otherwise, const std::string& help);
  /// An option that the help text does not list.
  void internal(const std::string& name, std::string& variable);

  /// Only one of these options may be given; `reason` may explain it.
  void exclude(const std::string& name, const std::string& other, const std::string& reason = "");
  /// `name` may be given only with `needed`.
  void require(const std::string& name, const std::string& needed);

  /// Returns whether the option is on the command line that was parsed.
  bool is_given(const std::string& name) const;

  /// An option as split_arguments() of `lockstep submit` needs it.
  struct Found {
    std::string name;  ///< the first name
    bool takes_value;
  };
  std::optional<Found> find(const std::string& name) const;

  /// Parses the options at the front of `words` and sets their variables; -np is read as -n. Returns the words after
  /// the options, without a leading `--`: a program and its arguments. Returns nullopt if --help is among the options.
  /// Throws a UsageError.
  std::optional<std::vector<std::string>> parse(std::vector<std::string> words);
  /// The same if nothing may follow the options. Returns false if --help is among them.
  bool parse_options_only(std::vector<std::string> words);

  /// The usage line, the description, the groups in the order of their declaration, each with its example, and the
  /// footer, in lines of at most 100 columns.
  std::string help() const;

  base::UsageError error(const std::string& text) const { return base::UsageError(command_ + ": " + text); }

 private:
  using Texts = std::vector<std::string>;
  using Set = std::function<void(const std::string& what, const Texts& texts)>;
  struct Row {
    std::string name;
    Texts texts;
    Set set;
  };

  static void fill_in(std::string& help, const std::string& default_text, const Texts& values);
  void add_option(const std::string& names, const std::string& type, const std::string& help, Set set,
                  bool is_list = false);
  Row& add_row(const std::string& names, Set set);

  std::string command_;
  std::string usage_;
  std::unique_ptr<CLI::App> app_;
  std::vector<std::unique_ptr<Row>> rows_;
  std::vector<std::function<void()>> rules_;
  std::vector<std::pair<std::string, std::string>> groups_;  // heading, examples
};

}  // namespace lockstep::launcher::cli

#include "lockstep/launch/cli/option_table.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <numeric>

namespace lockstep::launcher::cli {
namespace {

constexpr double kMaxSeconds = 10.0 * 365 * 24 * 3600;
constexpr std::size_t kMaxColumns = 100;
constexpr std::size_t kDescriptionColumn = 32;

/// Wraps `text` between words and keeps its newlines. Indents each line except the first by `indent` spaces.
std::string wrap(const std::string& text, std::size_t indent) {
  const std::string new_line = "\n" + std::string(indent, ' ');
  std::string wrapped;
  for (const std::string& line : base::split(text, '\n')) {
    if (!wrapped.empty()) wrapped += new_line;
    std::size_t column = indent;
    bool is_first = true;
    for (const std::string& word : base::split(line, ' ')) {
      if (!is_first && column + 1 + word.size() > kMaxColumns) {
        wrapped += new_line;
        column = indent;
      } else if (!is_first) {
        wrapped += ' ';
        ++column;
      }
      wrapped += word;
      column += word.size();
      is_first = false;
    }
  }
  return wrapped;
}

/// Returns "  -n, --ranks N" and the text in the column of descriptions. A type that begins with "[=" follows the name
/// without a space: "--pass-local-rank[=NAME]".
std::string row_of_help(const CLI::Option& option) {
  std::string head;
  for (const std::string& name : option.get_snames()) head += (head.empty() ? "  -" : ", -") + name;
  for (const std::string& name : option.get_lnames()) head += (head.empty() ? "  --" : ", --") + name;
  const std::string type = option.get_type_name();
  head += (type.empty() || type.starts_with("[=") ? "" : " ") + type;
  const bool fits = head.size() + 2 <= kDescriptionColumn;
  return head + (fits ? "" : "\n") + std::string(kDescriptionColumn - (fits ? head.size() : 0), ' ') +
         wrap(option.get_description(), kDescriptionColumn) + "\n";
}

/// Replaces -np by -n, and names with one dash as Open MPI takes them, such as -hostfile, by those with two, among the
/// options at the front of `words`. Returns the index of the first word after them.
std::size_t end_of_options(const CLI::App& app, std::vector<std::string>& words) {
  for (std::size_t i = 0; i < words.size(); ++i) {
    std::string& word = words[i];
    if (word == "--" || word.size() < 2 || word[0] != '-') return i;
    if (word.rfind("-np", 0) == 0) word.erase(2, 1);
    const std::string name = word.substr(0, word.find('='));
    if (name.size() > 2 && name[1] != '-' && app.get_option_no_throw("-" + name)) word.insert(0, 1, '-');
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

void replace(std::string& text, std::string_view from, const std::string& to) {
  if (const std::size_t at = text.find(from); at != std::string::npos) text.replace(at, from.size(), to);
}

/// Returns "1.5" for 1500 ms.
std::string print_seconds(std::chrono::milliseconds time) {
  const std::string text = base::seconds_text(time);
  return text.substr(0, text.find(' '));
}

constexpr std::size_t kMaxDistance = 3;
constexpr std::size_t kMaxWordBytes = 100;

/// The number of characters to insert, delete or replace, or of adjacent ones to swap (optimal string alignment;
/// Damerau, Comm. ACM 7, 1964).
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<std::size_t>> table(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i) table[i][0] = i;
  std::iota(table[0].begin(), table[0].end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i)
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = table[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      table[i][j] = std::min({replaced, table[i - 1][j] + 1, table[i][j - 1] + 1});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        table[i][j] = std::min(table[i][j], table[i - 2][j - 2] + 1);
    }
  return table[a.size()][b.size()];
}

}  // namespace

std::string suggestion(std::string_view word, const std::vector<std::string>& known) {
  if (word.size() > kMaxWordBytes) return "";
  const std::string* best = nullptr;
  std::size_t best_distance = std::min(kMaxDistance, word.size() / 3) + 1;
  for (const std::string& name : known) {
    const std::size_t here = distance(word, name);
    if (here >= best_distance) continue;
    best = &name;
    best_distance = here;
  }
  return best ? "; did you mean " + *best + "?" : "";
}

void check_value(bool good, const std::string& what, const std::string& text, const std::string& expected) {
  if (!good) throw base::UsageError(what + " is " + base::quoted(text, 80) + "; expected " + expected);
}

OptionType<int> integer(int low, int high) {
  return {"N",
          [low, high](const std::string& what, const std::string& got) {
            return static_cast<int>(base::parse_int_in_range(what, got, low, high));
          },
          [](int value) { return std::to_string(value); }};
}

OptionType<std::chrono::milliseconds> seconds(double low, double high) {
  const auto parse = [low, high](const std::string& what, const std::string& got) {
    const auto value = base::parse_double(got);
    check_value(value && *value >= low && *value <= (high > 0 ? high : kMaxSeconds), what, got,
                high > 0  ? "seconds, 0 to " + std::to_string(static_cast<int>(high))
                : low > 0 ? "seconds, more than 0"
                          : "seconds, 0 or more");
    return std::chrono::milliseconds(static_cast<std::int64_t>(*value * 1000));
  };
  return {"SECONDS", parse, [](const std::chrono::milliseconds& time) { return print_seconds(time); }};
}

OptionType<std::chrono::seconds> whole_seconds(int low, int high) {
  const auto parse = [low, high](const std::string& what, const std::string& got) {
    return std::chrono::seconds(base::parse_int_in_range(what, got, low, high));
  };
  return {"SECONDS", parse, [](const std::chrono::seconds& time) { return print_seconds(time); }};
}

OptionType<std::string> text(std::string name, std::function<bool(std::string_view)> is_good, std::string expected) {
  const auto parse = [is_good = std::move(is_good), expected = std::move(expected)](const std::string& what,
                                                                                    const std::string& got) {
    check_value(is_good(got), what, got, expected);
    return got;
  };
  return {std::move(name), parse, [](const std::string& value) { return value; }};
}

OptionType<std::string> text(std::string name, std::string expected) {
  return text(std::move(name), [](std::string_view got) { return !got.empty(); }, std::move(expected));
}

bool is_plain_name(std::string_view text) {
  return !text.empty() && text.size() <= 128 && text[0] != '.' && text[0] != '-' && base::is_alnum_or(text, "_-.");
}

OptionType<std::string> plain_name() {
  return text("NAME", is_plain_name,
              "1 to 128 letters, digits, '_', '-' and '.', beginning with a letter, a digit or '_'");
}

OptionTable::OptionTable(std::string command, std::string usage, const std::string& description)
    : command_(std::move(command)), usage_(std::move(usage)), app_(std::make_unique<CLI::App>(description)) {}

OptionTable::~OptionTable() = default;

void OptionTable::group(const std::string& heading, std::string example) {
  app_->option_defaults()->group(heading);
  if (groups_.empty()) app_->set_help_flag("-h,--help", "show this text");
  groups_.emplace_back(heading, std::move(example));
}

void OptionTable::footer(const std::string& text) { app_->footer(text); }

void OptionTable::fill_in(std::string& help, const std::string& default_text, const Texts& values) {
  replace(help, "{default}", default_text);
  Texts marked = values;
  for (std::string& value : marked)
    if (value == default_text) value += " (default)";
  replace(help, "{values}", base::alternatives(marked));
}

OptionTable::Row& OptionTable::add_row(const std::string& names, Set set) {
  rows_.push_back(std::make_unique<Row>(Row{names.substr(0, names.find(',')), {}, std::move(set)}));
  return *rows_.back();
}

void OptionTable::add_option(const std::string& names, const std::string& type, const std::string& help, Set set,
                             bool is_list) {
  CLI::Option* option = app_->add_option(names, add_row(names, std::move(set)).texts, help);
  option->type_name(type)->expected(1)->allow_extra_args(false);
  option->multi_option_policy(is_list ? CLI::MultiOptionPolicy::TakeAll : CLI::MultiOptionPolicy::Throw);
}

void OptionTable::list(const std::string& names, std::vector<std::string>& variable,
                       const OptionType<std::string>& type, const std::string& help) {
  const auto set = [&variable, parse = type.parse](const std::string& what, const Texts& texts) {
    for (const std::string& text : texts) variable.push_back(parse(what, text));
  };
  add_option(names, type.name, help, set, true);
}

void OptionTable::flag(const std::string& names, bool& variable, const std::string& help) {
  app_->add_flag(names, variable, help);
}

void OptionTable::optional_value(const std::string& name, std::string& variable, const OptionType<std::string>& type,
                                 const std::string& otherwise, const std::string& help) {
  Row& row = add_row(name, [&variable, parse = type.parse](const std::string& what, const Texts& texts) {
    variable = parse(what, texts.back());
  });
  app_->add_flag(name + "{" + otherwise + "}", row.texts, help)->type_name("[=" + type.name + "]");
}

void OptionTable::internal(const std::string& name, std::string& variable) {
  app_->add_option(name, variable)->group("");
}

bool OptionTable::is_given(const std::string& name) const { return app_->get_option(name)->count() > 0; }

void OptionTable::exclude(const std::string& name, const std::string& other, const std::string& reason) {
  rules_.push_back([this, name, other, reason] {
    if (is_given(name) && is_given(other))
      throw error("both " + name + " and " + other + " are given" + reason + "; expected one of them");
  });
}

void OptionTable::require(const std::string& name, const std::string& needed) {
  rules_.push_back([this, name, needed] {
    if (is_given(name) && !is_given(needed)) throw error(name + " requires " + needed);
  });
}

std::optional<OptionTable::Found> OptionTable::find(const std::string& name) const {
  const CLI::Option* option = app_->get_option_no_throw(name);
  if (!option) return std::nullopt;
  return Found{"--" + option->get_lnames().front(), option->get_items_expected_max() > 0};
}

std::optional<std::vector<std::string>> OptionTable::parse(std::vector<std::string> words) {
  const std::size_t end = end_of_options(*app_, words);
  // CLI11 expects the words in reverse order.
  std::vector<std::string> options(words.rend() - static_cast<std::ptrdiff_t>(end), words.rend());
  const std::string see_help = "; see " + command_ + " --help";
  try {
    app_->parse(options);
  } catch (const CLI::CallForHelp&) {
    return std::nullopt;
  } catch (const CLI::ExtrasError&) {
    const std::string unknown = app_->remaining().front();
    throw error("unknown option " + base::quoted(unknown, 80) + see_help + similar_option(*app_, unknown));
  } catch (const CLI::ParseError& failure) {
    const std::string text = failure.what();
    throw error(text.substr(0, text.find('\n')) + see_help);
  }
  for (const auto& rule : rules_) rule();
  for (const auto& row : rows_)
    if (!row->texts.empty()) row->set(row->name, row->texts);
  const std::size_t begin = end < words.size() && words[end] == "--" ? end + 1 : end;
  return std::vector<std::string>(words.begin() + static_cast<std::ptrdiff_t>(begin), words.end());
}

bool OptionTable::parse_options_only(std::vector<std::string> words) {
  const auto others = parse(std::move(words));
  if (others && !others->empty())
    throw error("unknown argument " + base::quoted(others->front(), 80) + "; see " + command_ + " --help");
  return others.has_value();
}

std::string OptionTable::help() const {
  std::string help = "usage: " + usage_ + "\n\n" + wrap(app_->get_description(), 0) + "\n";
  for (const auto& group : groups_) {
    help += "\n" + group.first + ":\n";
    for (const CLI::Option* option :
         app_->get_options([&](const CLI::Option* candidate) { return candidate->get_group() == group.first; }))
      help += row_of_help(*option);
    for (const std::string& example : base::split(group.second, '\n')) help += "  Example: " + example + "\n";
  }
  const std::string footer = app_->get_footer();
  return footer.empty() ? help : help + "\n" + wrap(footer, 0) + "\n";
}

}  // namespace lockstep::launcher::cli

// Parses the options of a subcommand and checks their values. All error messages have the same form.
#pragma once

#include <chrono>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace lockstep::launcher::cli {

/// Puts the options that are declared after this call into the group `heading` of the help text.
void begin_option_group(CLI::App& app, const char* heading);

/// Declares an option with a value. Parsing stores the value in `value` as text; the caller checks it when all options
/// are known. `type` is the value's name in the help text, and `text` the description.
void declare_option(CLI::App& app, const char* name, std::string& value, const char* type, const char* text);

/// Returns whether the option is on the command line.
bool is_given(const CLI::App& app, const char* name);

/// Parses the options at the front of `words` into the variables that `app` declares; -np is read as -n. Returns the
/// words after the options, without a leading `--`: a program and its arguments. Returns nullopt if --help is among the
/// options. Throws a UsageError whose message begins with "lockstep SUBCOMMAND: ".
std::optional<std::vector<std::string>> parse_options(CLI::App& app, const std::string& subcommand,
                                                      std::vector<std::string> words);

/// Returns `got` if it is one of the expected values. Throws UsageError otherwise.
std::string check_one_of(const char* what, const std::string& got, std::initializer_list<const char*> expected);
/// Returns `text` if it is not empty. Throws UsageError otherwise.
const std::string& check_not_empty(const char* what, const std::string& text, const char* expected);
/// Parses a number of seconds, at least `low` and at most ten years. Throws a UsageError that names `what` (the
/// option).
double seconds(const char* what, const std::string& text, double low);
/// Like seconds(), but returns milliseconds; the lowest value is 0.
std::chrono::milliseconds milliseconds(const char* what, const std::string& text);

/// Returns the content of a text file of at most 1 MiB. Throws a UsageError that names `what` (the option), the file
/// and the reason.
std::string read_option_file(const char* what, const std::string& file);

}  // namespace lockstep::launcher::cli

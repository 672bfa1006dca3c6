// What the verbs' command lines are read with: messages have one form, whoever found what is wrong. Pure.
#pragma once

#include <chrono>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace lockstep::launcher {

/// Declares an option whose value is checked later, when all are known.
void declare_option(CLI::App& app, const char* name, std::string& value, const char* type, const char* text);

/// Whether the option was given.
bool is_given(const CLI::App& app, const char* name);

/// Reads the options at the front of `words` into what `app` declares; -np is -n. The rest is returned, without a `--`
/// before it: a program and its words. Nothing when the help was asked for. Throws UsageError that begins with
/// "lockstep VERB: ".
std::optional<std::vector<std::string>> parse_options(CLI::App& app, const std::string& verb,
                                                      std::vector<std::string> words);

/// `got`, which must be one of those that are allowed. Throws UsageError.
std::string check_one_of(const char* what, const std::string& got, std::initializer_list<const char*> allowed);
/// `text`, which must not be empty. Throws UsageError.
const std::string& check_not_empty(const char* what, const std::string& text, const char* allowed);
/// A number of seconds, at least `low` and at most ten years. Throws UsageError.
double seconds(const char* what, const std::string& text, double low);
std::chrono::milliseconds milliseconds(const char* what, const std::string& text);

}  // namespace lockstep::launcher

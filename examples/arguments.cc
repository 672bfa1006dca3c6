#include "examples/arguments.h"

#include <lockstep/base/error.h>
#include <lockstep/base/parse.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <sstream>

namespace examples {
namespace {

std::string shortest(double value) {
  std::ostringstream text;
  text << value;
  return text.str();
}

[[noreturn]] void throw_invalid_flag(const std::string& name) {
  throw lockstep::base::UsageError(name + " has a value or is repeated; expected " + name + " once, without a value");
}

}  // namespace

Arguments::Arguments(const std::string& description) : app_(std::make_unique<CLI::App>(description)) {}
Arguments::~Arguments() = default;

void Arguments::add(const std::string& name, const std::string& help, const std::string& default_text,
                    OnValue on_value) {
  names_.push_back(name);
  auto* const option = app_->add_option_function<std::string>(name, std::move(on_value), help);
  option->type_name("");
  option->option_text(default_text.empty() ? "VALUE" : "VALUE (default " + default_text + ")");
}

void Arguments::text(const std::string& name, std::string& value, const std::string& help) {
  add(name, help, value, [name, &value](const std::string& text) {
    if (text.empty()) throw lockstep::base::UsageError(name + " is \"\"; expected a text that is not empty");
    value = text;
  });
}

void Arguments::integer(const std::string& name, std::int64_t& value, std::int64_t low, std::int64_t high,
                        const std::string& help) {
  add(name, help, std::to_string(value), [name, &value, low, high](const std::string& text) {
    value = lockstep::base::parse_int_in_range(name, text, low, high);
  });
}

void Arguments::number(const std::string& name, double& value, double low, double high, const std::string& help) {
  add(name, help, shortest(value), [name, &value, low, high](const std::string& text) {
    const auto number = lockstep::base::parse_double(text);
    if (!number || *number < low || *number > high)
      throw lockstep::base::UsageError(name + " is " + lockstep::base::quoted(text, 80) + "; expected a number from " +
                                       shortest(low) + " to " + shortest(high));
    value = *number;
  });
}

void Arguments::flag(const std::string& name, bool& value, const std::string& help) {
  names_.push_back(name);
  flags_.insert(name);
  const auto on_value = [name, &value](std::int64_t count) {
    if (count != 1) throw_invalid_flag(name);
    value = true;
  };
  app_->add_flag_function(name, on_value, help)->disable_flag_override();
}

void Arguments::parse(int argc, char** argv) {
  std::string known;
  for (const std::string& name : names_) known += name + ", ";
  try {
    app_->parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    std::cout << app_->help() << std::flush;
    std::exit(0);
  } catch (const CLI::ExtrasError&) {
    throw lockstep::base::UsageError("unknown argument " + lockstep::base::quoted(app_->remaining().front(), 80) +
                                     "; expected " + known + "--help");
  } catch (const CLI::ArgumentMismatch& error) {  // "--NAME: ...", or for a flag "NAME was ..."
    const std::string text = error.what(), name = text.substr(0, text.find_first_of(": "));
    if (flags_.contains("--" + name)) throw_invalid_flag("--" + name);
    throw lockstep::base::UsageError(name + " has no value or is repeated; expected " + name + " VALUE once");
  } catch (const CLI::ParseError& error) {
    throw lockstep::base::UsageError(std::string(error.what()) + "; expected " + known + "--help");
  }
}

void require_writable_path(const std::string& name, const std::string& path) {
  namespace fs = std::filesystem;
  if (path.empty()) return;
  std::error_code ignored;
  const fs::path folder = fs::path(path).has_parent_path() ? fs::path(path).parent_path() : fs::path(".");
  if (!fs::is_directory(folder, ignored) || fs::is_directory(path, ignored))
    throw lockstep::base::UsageError(name + " is " + lockstep::base::quoted(path, 256) +
                                     "; expected a file in an existing directory");
}

}  // namespace examples

// The command line of an example: --name VALUE, or --name alone, strictly read.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace examples {

/// Every wrong word is a lockstep::UsageError of one line that names the argument, the value got and the values
/// allowed.
class Arguments {
 public:
  explicit Arguments(const std::string& description);
  ~Arguments();

  // Each variable keeps its value when the argument is not given, and must live until read().
  void text(const std::string& name, std::string& value, const std::string& help);
  void integer(const std::string& name, std::int64_t& value, std::int64_t low, std::int64_t high,
               const std::string& help);
  /// low <= value <= high.
  void number(const std::string& name, double& value, double low, double high, const std::string& help);

  /// True when it is given; it has no value.
  void flag(const std::string& name, bool& value, const std::string& help);

  /// Reads the command line; --help prints all arguments and ends the program.
  void read(int argc, char** argv);

 private:
  using OnValue = std::function<void(const std::string& text)>;
  void add(const std::string& name, const std::string& help, const std::string& default_text, OnValue take);

  std::unique_ptr<CLI::App> app_;
  std::vector<std::string> names_;
  std::set<std::string> flags_;
};

/// A file that argument `name` wants written later (or "": none) must lie in a folder that is there now: a UsageError
/// otherwise.
void require_writable_path(const std::string& name, const std::string& path);

}  // namespace examples

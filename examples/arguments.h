// The command line of an example: options --name VALUE and flags --name, strictly checked.
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

/// Parses a command line. Errors are lockstep::UsageErrors of one line that names the argument, its value and the
/// expected values.
class Arguments {
 public:
  explicit Arguments(const std::string& description);
  ~Arguments();

  // The variable keeps its value, the default, if the argument is not given. It must live until parse().
  void text(const std::string& name, std::string& value, const std::string& help);
  void integer(const std::string& name, std::int64_t& value, std::int64_t low, std::int64_t high,
               const std::string& help);
  /// A number with low <= value <= high.
  void number(const std::string& name, double& value, double low, double high, const std::string& help);

  /// An argument without a value; sets `value` to true if it is given.
  void flag(const std::string& name, bool& value, const std::string& help);

  /// Parses the command line; --help prints all arguments and exits. Throws UsageError.
  void parse(int argc, char** argv);

 private:
  using OnValue = std::function<void(const std::string& text)>;
  void add(const std::string& name, const std::string& help, const std::string& default_text, OnValue on_value);

  std::unique_ptr<CLI::App> app_;
  std::vector<std::string> names_;
  std::set<std::string> flags_;
};

/// Checks that the file `path`, which argument `name` will write, is in an existing directory; does nothing for "".
/// Throws UsageError.
void require_writable_path(const std::string& name, const std::string& path);

}  // namespace examples

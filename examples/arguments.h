// Parses the command line of an example, which has options --name VALUE and flags --name, and rejects invalid values.
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

/// Parses a command line. First declare the arguments, then call parse(). Errors are lockstep::UsageErrors of one line,
/// which names the argument, its value and the expected values.
class Arguments {
 public:
  explicit Arguments(const std::string& description);
  ~Arguments();

  // Each of these functions declares an argument that parse() stores in `value`, which must outlive parse(). If the
  // argument is not given, `value` keeps its value, which --help prints as the default.
  /// A text that is not empty.
  void text(const std::string& name, std::string& value, const std::string& help);
  /// An integer with low <= value <= high.
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

/// Throws UsageError, which names the argument `name`, unless `path` is a file name in an existing directory. Accepts
/// "", which means that no file is written.
void require_writable_path(const std::string& name, const std::string& path);

}  // namespace examples

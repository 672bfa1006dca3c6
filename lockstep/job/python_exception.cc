#include "lockstep/job/python_exception.h"

#include <algorithm>
#include <cctype>
#include <cstddef>

#include "lockstep/base/parse.h"

namespace lockstep::job {
namespace {

constexpr std::size_t kMaxMessageBytes = 400;
constexpr std::string_view kWhileHandling = "During handling of the above exception, another exception occurred:",
                           kCausedBy = "The above exception was the direct cause of the following exception:";

/// Whether a line without indentation is the message of an exception: "ValueError: bad value", "torch.cuda.
/// OutOfMemoryError: ...", or only a name, "KeyboardInterrupt".
bool is_exception(std::string_view line) {
  const std::string_view name = line.substr(0, std::min(line.find(':'), line.size()));
  return !name.empty() && !std::isdigit(static_cast<unsigned char>(name[0])) && base::is_alnum_or(name, "_.");
}

std::string_view without_prefix(std::string_view line, std::string_view prefix) {
  return line.starts_with(prefix) ? line.substr(prefix.size()) : line;
}

/// Without "[rank1]: ", which torch.distributed adds to each line of an exception, once for each
/// init_process_group().
std::string_view without_ranks(std::string_view line) {
  constexpr std::string_view kStart = "[rank", kEnd = "]: ";
  while (line.starts_with(kStart)) {
    const std::size_t digits = line.find_first_not_of("0123456789", kStart.size());
    if (digits == std::string_view::npos || !line.substr(digits).starts_with(kEnd)) break;
    line.remove_prefix(digits + kEnd.size());
  }
  return line;
}

std::string shortened(std::string_view text) {
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back()))) text.remove_suffix(1);
  return std::string(text.substr(0, kMaxMessageBytes)) + (text.size() > kMaxMessageBytes ? "..." : "");
}

/// Reads the lines of a program one by one.
class Reader {
 public:
  void read(std::string_view line) {
    if (line.starts_with("  File \"")) {  // the line kTraceback may be missing from the last lines
      in_traceback_ = true;
    } else if (line == kWhileHandling || line == kCausedBy) {
      is_chained_ = !message_.empty();
    } else if (line == kTraceback) {
      begin();
    } else if (line.ends_with(kTraceback) && !message_.empty()) {
      in_message_ = true;
    } else if (in_traceback_ && !line.empty() && line[0] != ' ') {
      if (is_exception(line)) add(line);
      in_traceback_ = false;
    } else if (line.starts_with("Last error:")) {
      after_last_error_ = true;  // NCCL's cause is in the next line
      return;
    } else if (after_last_error_ && !message_.empty()) {
      detail_ = line;
    } else if (!in_traceback_ && line.find(": error: ") != std::string_view::npos && message_.empty()) {
      message_ = line;  // of argparse, which prints no traceback
    }
    after_last_error_ = false;
  }

  PythonException result() {
    const std::string last = take();
    // Programs often go on after an ImportError, in the block that handles it.
    const bool counts = !first_.empty() && !first_.starts_with("ImportError") && !first_.starts_with("ModuleNotFound");
    return {counts ? first_ : last, last};
  }

 private:
  std::string take() {
    std::string text = shortened(message_);
    if (!detail_.empty() && detail_ != message_) text += " (" + shortened(detail_) + ")";
    message_.clear();
    detail_.clear();
    return text;
  }

  /// A traceback follows: of an exception that belongs to the one before it, or of another one.
  void begin() {
    const std::string before = take();
    if (!is_chained_)
      first_.clear();
    else if (first_.empty())
      first_ = before;
    is_chained_ = in_message_ = false;
    in_traceback_ = true;
  }

  void add(std::string_view message) {
    if (in_message_ && !message_.empty())
      detail_ = message;
    else
      message_ = message;
  }

  std::string first_, message_, detail_;
  bool in_traceback_ = false, in_message_ = false, after_last_error_ = false, is_chained_ = false;
};

}  // namespace

PythonException find_python_exception(std::string_view lines, std::string_view prefix) {
  Reader reader;
  for (const std::string& line : base::split(lines, '\n')) reader.read(without_ranks(without_prefix(line, prefix)));
  return reader.result();
}

std::string_view first_of(std::string_view text) { return text.substr(0, std::min(text.find(kThen), text.size())); }

}  // namespace lockstep::job

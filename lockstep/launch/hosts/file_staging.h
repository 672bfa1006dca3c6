// --ship: copies programs to a host through the connection that starts its agent, into a directory named by their
// content, where the next run finds them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::launcher {

/// A file to be copied.
struct StagedFile {
  std::string name;  ///< a plain word: the file's own name, or "program"
  std::string hash;  ///< of the content (XXH3, 128 bits), hexadecimal
  std::string content;
};

/// Reads a file. Throws UsageError if it cannot be read or is larger than 1 GiB.
StagedFile read_staged_file(const std::string& path);

/// Returns the POSIX shell script, free of single quotes, that runs on the other host. For each file the script prints
/// "y" if the file is already there; otherwise it prints "n" and copies the file from its stdin to
/// ${XDG_CACHE_HOME:-$HOME/.cache}/lockstep/HASH/NAME, accessible to the user alone. Then it executes the first file as
/// an agent with `agent_arguments`, which starts the second file. Exits with code 125 if a file could not be written.
/// Pure.
std::string staging_script(const std::vector<StagedFile>& files, const std::vector<std::string>& agent_arguments);

/// The launcher's end of that script: a state machine without I/O.
class FileStaging {
 public:
  explicit FileStaging(std::shared_ptr<const std::vector<StagedFile>> files) : files_(std::move(files)) {}

  /// Removes the script's replies from the front of `bytes`. When complete() is true, the rest belongs to the agent.
  /// Throws Error kProtocol.
  void consume(std::string& bytes);
  /// The bytes to write next; empty: nothing to write now.
  std::string_view pending_bytes() const;
  /// `size` bytes of pending_bytes() have been written.
  void advance(std::size_t size) { sent_ += size; }
  /// True when the host has all files and the script has nothing more to print.
  bool complete() const { return next_ == files_->size() && pending_bytes().empty(); }

 private:
  std::shared_ptr<const std::vector<StagedFile>> files_;
  std::size_t next_ = 0;  // the file whose reply is awaited
  bool sending_ = false;  // the file before next_ is being sent
  std::size_t sent_ = 0;  // bytes of that file
};

}  // namespace lockstep::launcher

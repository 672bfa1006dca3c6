// --ship: programs that travel to a host through the connection that starts its agent, into a folder named by their
// content, where the next run finds them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::launcher {

/// A file that is to be there.
struct StagedFile {
  std::string name;  ///< a plain word: its own, or "program"
  std::string hash;  ///< of its content (XXH3, 128 bits), hexadecimal
  std::string content;
};

/// Reads a program. Throws UsageError for what cannot be read, or is larger than 1 GiB.
StagedFile read_staged_file(const std::string& path);

/// What a POSIX shell on the other host does, without a quote in it: it takes each file that is not there from its
/// input, after it has said so by a line "n" (or "y", when it is there), into
/// ${XDG_CACHE_HOME:-$HOME/.cache}/lockstep/HASH/NAME, which is for the user alone; then it becomes the first of them,
/// as an agent with `agent_arguments`, that starts the second one. Code 125 when it could not. Pure.
std::string staging_script(const std::vector<StagedFile>& cargo, const std::vector<std::string>& agent_arguments);

/// The launcher's end of that script.
class FileStaging {
 public:
  explicit FileStaging(std::shared_ptr<const std::vector<StagedFile>> cargo) : files_(std::move(cargo)) {}

  /// Takes from the front of `bytes` what the script says; the rest, when all files are there, is the agent's. Throws
  /// Error kProtocol.
  void consume(std::string& bytes);
  /// What is to be written next; empty: nothing now.
  std::string_view pending_bytes() const;
  void written(std::size_t size) { sent_ += size; }
  /// All files are there, and the script says no more.
  bool complete() const { return next_ == files_->size() && pending_bytes().empty(); }

 private:
  std::shared_ptr<const std::vector<StagedFile>> files_;
  std::size_t next_ = 0;  // whose answer is awaited
  bool sending_ = false;  // the one before
  std::size_t sent_ = 0;  // of it
};

}  // namespace lockstep::launcher

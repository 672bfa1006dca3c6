// Implements --ship: copies programs and folders to a host through the connection that starts its agent, into a
// directory named after the hash of their content, so that the next run finds them there.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/launch/cli/command_line.h"

namespace lockstep::launcher::hosts {

struct StagedFile {
  std::string name;  ///< a plain word: the file's own name, or "program"
  std::string hash;  ///< hash of the content (XXH3, 128 bits), hexadecimal
  std::string content;
  std::string option = {};   ///< of the agent, which gets the path on its host; empty: none
  bool is_folder = false;    ///< the content is an archive of tar, which is unpacked there
  bool is_optional = false;  ///< the agent starts although the archive cannot be unpacked
  bool is_in_use = false;    ///< by this job, before it was restarted: what it has changed of the folder stays
};

/// Programs to copy to other hosts (--ship); null: none.
using StagedFiles = std::shared_ptr<const std::vector<StagedFile>>;

/// Returns lockstep itself, its Python hook, and the folder of a Python script, or else the user's program if it was
/// given by a path; null without --ship, and where no host needs them. A program found in PATH, and every interpreter,
/// must exist on all hosts. Throws UsageError as read_staged_file() and read_staged_folder() do.
StagedFiles files_to_stage(const cli::RunOptions& options);

/// Returns the checksum that the program cksum prints (IEEE Std 1003.1, CRC-32 with the length appended). Pure.
std::uint32_t posix_checksum(std::string_view bytes);

/// Reads a file and computes its hash. Throws UsageError if the file cannot be read or is larger than 1 GiB.
StagedFile read_staged_file(const std::string& path);

/// Packs a folder with tar, as the folder `inside` of the archive, without files and folders whose names begin with a
/// dot, and without __pycache__ and runs; symbolic links become what they refer to. What cannot be read, such as a link
/// to nothing or to a folder that contains it, is left out with a warning. The same files give the same archive. Throws
/// UsageError if tar fails or the files have more than 256 MiB. Call it from the main thread.
StagedFile read_staged_folder(const std::string& path, const std::string& inside = ".");

/// Returns the POSIX shell script, free of single quotes, that runs on the other host. For each file the script prints
/// "y" if the file is already there and has the same checksum; otherwise it prints "n" and copies the file from stdin
/// to ${XDG_CACHE_HOME:-$HOME/.cache}/lockstep/HASH/NAME, accessible to the user alone; an archive is unpacked beside
/// it. If it has been, each of its files that was changed since is renamed to FILE.changed and unpacked again. Then it
/// executes the first file with `agent_arguments` as the agent, followed by the options of the other files with their
/// paths there. The script exits with code 125 if a file cannot be written. Pure.
std::string staging_script(const std::vector<StagedFile>& files, const std::vector<std::string>& agent_arguments);

/// The launcher's side of that script: a state machine without I/O.
class FileStaging {
 public:
  explicit FileStaging(std::shared_ptr<const std::vector<StagedFile>> files) : files_(std::move(files)) {}

  /// Removes the script's replies from the front of `bytes`. When complete() is true, the rest belongs to the agent.
  /// Throws Error kProtocol.
  void consume(std::string& bytes);
  /// Returns the bytes to write next; empty if there is nothing to write now.
  std::string_view pending_bytes() const;
  /// Records that `size` bytes of pending_bytes() have been written.
  void advance(std::size_t size) { sent_ += size; }
  /// Returns whether all files are on the host or have been sent, so that the script prints no further replies.
  bool complete() const { return next_ == files_->size() && pending_bytes().empty(); }

 private:
  std::shared_ptr<const std::vector<StagedFile>> files_;
  std::size_t next_ = 0;  // the file whose reply is awaited
  bool sending_ = false;  // the file before next_ is being sent
  std::size_t sent_ = 0;  // bytes of that file
};

}  // namespace lockstep::launcher::hosts

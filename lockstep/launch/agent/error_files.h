// The files in which the ranks of a host describe their failures: the error files of torchrun.
#pragma once

#include <string>

namespace lockstep::launcher::agent {

/// One file per rank, which a program writes if its main function has the decorator `record` of
/// torch.distributed.elastic, or because it follows that contract: TORCHELASTIC_ERROR_FILE names the file. The names
/// are random. A file exists only from the failure of a rank until take_message().
class ErrorFiles {
 public:
  /// Throws SystemError.
  ErrorFiles();

  /// Returns the path of the file of `rank`, below the directory for temporary files.
  std::string path(int rank) const;

  /// Reads and removes the file of `rank`. Returns its message, at most protocol::kMaxErrorMessageBytes of it; empty if
  /// there is no file or if it is not such a file. The file is untrusted.
  std::string take_message(int rank) const;

 private:
  std::string prefix_;
};

/// Returns the message in `text`, the contents of an error file: {"message": {"message": "ValueError: x", ...}} or
/// {"message": "ValueError: x"}. Empty if it is neither. Pure.
std::string error_file_message(const std::string& text);

}  // namespace lockstep::launcher::agent

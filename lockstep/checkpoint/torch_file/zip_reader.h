// The container of PyTorch's files: a zip archive whose records are stored as they are. Read without trust, without
// torch.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "lockstep/checkpoint/files/input_file.h"

namespace lockstep::checkpoint {

/// An open archive whose directory has been checked.
class ZipReader {
 public:
  struct Record {
    std::uint64_t begin = 0;  ///< of its bytes, in the file
    std::uint64_t num_bytes = 0;
    std::uint32_t crc32 = 0;
  };

  /// Checks what an archive of torch.save() keeps to: records that are neither compressed nor encrypted, that lie apart
  /// from each other and before the directory, names that are valid UTF-8 of at most 1 KiB and there once, headers that
  /// say the same as the directory; also of 64 bits. At most 200,000 records. Throws FormatError "FILE:OFFSET: reason".
  /// No record is read. Takes at most 64 MiB beside the file's directory.
  explicit ZipReader(const std::string& path);

  const InputFile& file() const { return file_; }
  const std::map<std::string, Record>& records() const { return records_; }

  /// Fills `bytes` with a record's num_bytes. With `verify` throws FormatError that calls it `what` when they are not
  /// those whose CRC-32 the directory has.
  void read(const Record& record, void* bytes, bool verify, const std::string& what) const;

 private:
  struct Directory;
  Directory find_directory() const;
  Directory find_zip64_directory(const Directory& zip32, std::uint64_t end, std::uint64_t& directory_end) const;
  void read_directory(const Directory& directory);
  std::uint64_t record_begin(const std::string& name, std::uint64_t header, std::uint64_t end) const;

  InputFile file_;
  std::map<std::string, Record> records_;
};

}  // namespace lockstep::checkpoint

// Reads the container of PyTorch's files, a zip archive, from an untrusted source and without torch.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "lockstep/checkpoint/files/input_file.h"

namespace lockstep::checkpoint::inline torch_file {

/// An open archive with a validated directory. Const methods are thread-safe.
class ZipReader {
 public:
  struct Record {
    std::uint64_t begin = 0;      ///< offset of its bytes in the file
    std::uint64_t num_bytes = 0;  ///< as stored
    std::uint32_t crc32 = 0;
    bool is_compressed = false;
  };

  /// Reads and validates the directory, but no record. An archive of torch.save() has records that are not encrypted
  /// and that do not overlap each other or the directory, unique names of valid UTF-8 with at most 1 KiB, and headers
  /// that agree with the directory; zip64 fields are supported. Records may be compressed, as the source text in an
  /// archive of C++ is, but read() does not read these. At most 200,000 records. Throws FormatError "FILE:OFFSET:
  /// reason". Allocates at most 64 MiB in addition to the file's directory.
  explicit ZipReader(const std::string& path);

  const files::InputFile& file() const { return file_; }
  const std::map<std::string, Record>& records() const { return records_; }

  /// Reads a record's num_bytes into `bytes`. Throws FormatError, which names the record as `what`, if it is
  /// compressed, and with `verify` if the CRC-32 of its bytes differs from the one in the directory.
  void read(const Record& record, void* bytes, bool verify, const std::string& what) const;

 private:
  struct Directory;
  Directory find_directory() const;
  Directory find_zip64_directory(const Directory& zip32, std::uint64_t end, std::uint64_t& directory_end) const;
  void read_directory(const Directory& directory);
  std::uint64_t record_begin(const std::string& name, std::uint64_t header, std::uint64_t end) const;

  files::InputFile file_;
  std::map<std::string, Record> records_;
};

}  // namespace lockstep::checkpoint::inline torch_file

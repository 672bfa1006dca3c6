#include "lockstep/checkpoint/torch_file/zip_reader.h"

#include <zlib.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "lockstep/base/parse.h"
#include "lockstep/base/utf8.h"
#include "lockstep/checkpoint/files/limits.h"

namespace lockstep::checkpoint::inline torch_file {
namespace {

// Signatures of "PK" and two more bytes, from PKWARE's APPNOTE.TXT.
constexpr std::uint32_t kLocalHeader = 0x04034b50, kEntry = 0x02014b50, kEndOfDirectory = 0x06054b50,
                        kZip64EndOfDirectory = 0x06064b50, kZip64Locator = 0x07064b50;
constexpr std::uint64_t kLocalHeaderBytes = 30, kEntryBytes = 46, kEndOfDirectoryBytes = 22,
                        kZip64EndOfDirectoryBytes = 56, kZip64LocatorBytes = 20;
constexpr std::uint64_t kMax16 = 0xffff, kMax32 = 0xffffffff;
constexpr std::uint64_t kDeflated = 8;  // a compression method
constexpr std::uint16_t kZip64ExtraId = 1;
constexpr std::uint64_t kReadChunkBytes = std::uint64_t{1} << 20;  // each chunk is summed while it is in cache

// Reads a little-endian field of a fixed part.
std::uint64_t read_field(const std::string& bytes, std::size_t at, std::size_t num_bytes) {
  std::uint64_t value = 0;
  std::memcpy(&value, bytes.data() + at, num_bytes);
  return value;
}

std::string read_bytes(const files::InputFile& file, std::uint64_t offset, std::uint64_t num_bytes) {
  if (offset > file.num_bytes() || num_bytes > file.num_bytes() - offset)
    file.throw_format_error(offset, "the file ends after " + std::to_string(file.num_bytes()) + " bytes; expected " +
                                        std::to_string(num_bytes) + " bytes here");
  std::string bytes(num_bytes, '\0');
  file.read(offset, bytes.data(), num_bytes);
  return bytes;
}

// The 64-bit values of the fields that do not fit into 32 bits: an extra field holds only these, in this order.
struct Zip64Fields {
  const files::InputFile& file;
  std::uint64_t at;
  std::string values;
  std::size_t used = 0;

  std::uint64_t resolve(std::uint64_t zip32) {
    if (zip32 != kMax32) return zip32;
    if (used + 8 > values.size()) file.throw_format_error(at, "a 64-bit size is missing");
    used += 8;
    return read_field(values, used - 8, 8);
  }
};

Zip64Fields read_zip64_fields(const files::InputFile& file, std::uint64_t at, const std::string& extra) {
  for (std::size_t i = 0; i + 4 <= extra.size();) {
    const std::size_t length = read_field(extra, i + 2, 2);
    if (length > extra.size() - i - 4) file.throw_format_error(at, "an extra field ends outside its entry");
    if (read_field(extra, i, 2) == kZip64ExtraId) return {file, at, extra.substr(i + 4, length)};
    i += 4 + length;
  }
  return {file, at, ""};
}

}  // namespace

struct ZipReader::Directory {
  std::uint64_t begin = 0, num_bytes = 0, num_records = 0;
};

ZipReader::ZipReader(const std::string& path) : file_(path) { read_directory(find_directory()); }

ZipReader::Directory ZipReader::find_directory() const {
  const std::uint64_t size = file_.num_bytes();
  if (size < kEndOfDirectoryBytes)
    file_.throw_format_error(0,
                             "the file has " + std::to_string(size) + " bytes; expected at least 22 for a zip archive");
  const std::uint64_t tail_bytes = std::min(size, kEndOfDirectoryBytes + kMax16);
  const std::string tail = read_bytes(file_, size - tail_bytes, tail_bytes);
  std::size_t at = tail.size() - kEndOfDirectoryBytes;
  while (at > 0 && !(read_field(tail, at, 4) == kEndOfDirectory &&
                     read_field(tail, at + 20, 2) == tail.size() - at - kEndOfDirectoryBytes))
    --at;
  if (read_field(tail, at, 4) != kEndOfDirectory ||
      read_field(tail, at + 20, 2) != tail.size() - at - kEndOfDirectoryBytes)
    file_.throw_format_error(size - kEndOfDirectoryBytes,
                             "expected the end of a zip archive here: the file is truncated or is not a zip archive");
  const std::uint64_t end = size - tail_bytes + at;
  Directory directory{read_field(tail, at + 16, 4), read_field(tail, at + 12, 4), read_field(tail, at + 10, 2)};
  std::uint64_t directory_end = end;
  // torch's writer always writes the zip64 directory.
  if (directory.begin > end || directory.num_bytes != end - directory.begin || directory.num_records == kMax16)
    directory = find_zip64_directory(directory, end, directory_end);
  if (directory.begin > directory_end || directory.num_bytes != directory_end - directory.begin)
    file_.throw_format_error(end, "the directory of " + std::to_string(directory.num_bytes) + " bytes at byte " +
                                      std::to_string(directory.begin) + " does not end at byte " +
                                      std::to_string(directory_end));
  if (directory.num_records > files::kMaxZipRecords || directory.num_bytes > files::kMaxZipDirectoryBytes)
    file_.throw_format_error(end, "a directory of " + std::to_string(directory.num_records) + " records and " +
                                      std::to_string(directory.num_bytes) + " bytes; expected at most " +
                                      std::to_string(files::kMaxZipRecords) + " and 64 MiB");
  return directory;
}

// Returns the zip64 directory, whose end is directly before `end`, after comparing it with the 32-bit fields in
// `zip32`. Returns `zip32` if there is no zip64 directory.
ZipReader::Directory ZipReader::find_zip64_directory(const Directory& zip32, std::uint64_t end,
                                                     std::uint64_t& directory_end) const {
  const bool is_zip64_required = zip32.begin == kMax32 || zip32.num_bytes == kMax32 || zip32.num_records == kMax16;
  const std::string locator = end < kZip64LocatorBytes
                                  ? std::string(kZip64LocatorBytes, '\0')
                                  : read_bytes(file_, end - kZip64LocatorBytes, kZip64LocatorBytes);
  if (read_field(locator, 0, 4) != kZip64Locator && !is_zip64_required) return zip32;
  directory_end = read_field(locator, 8, 8);
  if (read_field(locator, 0, 4) != kZip64Locator || directory_end > end - kZip64LocatorBytes)
    file_.throw_format_error(end, "the zip64 directory is missing");
  const std::string text = read_bytes(file_, directory_end, kZip64EndOfDirectoryBytes);
  if (read_field(text, 0, 4) != kZip64EndOfDirectory)
    file_.throw_format_error(directory_end, "expected the end of the zip64 directory here");
  const Directory zip64{read_field(text, 48, 8), read_field(text, 40, 8), read_field(text, 32, 8)};
  const auto same = [](std::uint64_t zip32_field, std::uint64_t zip64_field, std::uint64_t zip64_marker) {
    return zip32_field == zip64_marker || zip32_field == zip64_field;
  };
  if (!same(zip32.begin, zip64.begin, kMax32) || !same(zip32.num_bytes, zip64.num_bytes, kMax32) ||
      !same(zip32.num_records, zip64.num_records, kMax16))
    file_.throw_format_error(directory_end, "the zip64 directory differs from the 32-bit directory");
  return zip64;
}

void ZipReader::read_directory(const Directory& directory) {
  const std::string text = read_bytes(file_, directory.begin, directory.num_bytes);
  std::vector<std::pair<std::uint64_t, std::uint64_t>> used;  // the range from a record's header to its end
  std::size_t at = 0;
  for (std::uint64_t i = 0; i < directory.num_records; ++i) {
    const std::uint64_t entry_offset = directory.begin + at;
    if (text.size() - at < kEntryBytes || read_field(text, at, 4) != kEntry)
      file_.throw_format_error(entry_offset, "expected entry " + std::to_string(i) + " of the directory here");
    const std::size_t name_bytes = read_field(text, at + 28, 2), extra_bytes = read_field(text, at + 30, 2),
                      comment_bytes = read_field(text, at + 32, 2);
    if (text.size() - at - kEntryBytes < name_bytes + extra_bytes + comment_bytes)
      file_.throw_format_error(entry_offset, "the entry ends after the directory");
    const std::string name = text.substr(at + kEntryBytes, name_bytes);
    const auto fail = [&](const std::string& reason) {
      file_.throw_format_error(entry_offset, "the record " + base::quoted(name, 80) + reason);
    };
    if (name.empty() || name.size() > files::kMaxNameBytes || !base::is_utf8(name) || records_.contains(name))
      fail(" is a duplicate, or its name is not UTF-8 of 1 to 1024 bytes");
    const std::uint64_t method = read_field(text, at + 10, 2);
    if ((method != 0 && method != kDeflated) || (read_field(text, at + 8, 2) & 1) != 0)
      fail(" is encrypted or compressed by method " + std::to_string(method) + "; expected an uncompressed record");
    Zip64Fields zip64 = read_zip64_fields(file_, entry_offset, text.substr(at + kEntryBytes + name_bytes, extra_bytes));
    const std::uint64_t num_bytes = zip64.resolve(read_field(text, at + 24, 4)),
                        stored = zip64.resolve(read_field(text, at + 20, 4)),
                        header = zip64.resolve(read_field(text, at + 42, 4));
    if (method == 0 && num_bytes != stored)
      fail(" has " + std::to_string(num_bytes) + " bytes, but is stored in " + std::to_string(stored));
    const std::uint64_t begin = record_begin(name, header, directory.begin);
    if (stored > directory.begin - begin) fail(" ends after the beginning of the directory");
    const auto crc32 = static_cast<std::uint32_t>(read_field(text, at + 16, 4));
    records_.emplace(name, Record{begin, stored, crc32, method != 0});
    used.emplace_back(header, begin + stored);
    at += kEntryBytes + name_bytes + extra_bytes + comment_bytes;
  }
  if (at != text.size()) file_.throw_format_error(directory.begin + at, "the directory continues after its last entry");
  std::sort(used.begin(), used.end());
  for (std::size_t i = 1; i < used.size(); ++i)
    if (used[i].first < used[i - 1].second)
      file_.throw_format_error(used[i].first, "this record begins inside the previous one");
}

// Returns the offset of a record's bytes. The record's own header is at `header`; the bytes must begin at or before
// `end`.
std::uint64_t ZipReader::record_begin(const std::string& name, std::uint64_t header, std::uint64_t end) const {
  const std::uint64_t header_bytes = kLocalHeaderBytes + name.size();
  if (header > end || end - header < header_bytes)
    file_.throw_format_error(header, "expected the header of record " + base::quoted(name, 80) + " here");
  const std::string text = read_bytes(file_, header, header_bytes);
  const std::uint64_t begin = header + header_bytes + read_field(text, 28, 2);
  if (read_field(text, 0, 4) != kLocalHeader || read_field(text, 26, 2) != name.size() ||
      text.substr(kLocalHeaderBytes) != name || begin > end)
    file_.throw_format_error(header, "expected the header of record " + base::quoted(name, 80) + " here");
  return begin;
}

void ZipReader::read(const Record& record, void* bytes, bool verify, const std::string& what) const {
  if (record.is_compressed)
    file_.throw_format_error(record.begin, what + " is compressed; expected an uncompressed record");
  auto* to = static_cast<unsigned char*>(bytes);
  uLong sum = ::crc32(0, nullptr, 0);
  for (std::uint64_t at = 0; at < record.num_bytes;) {
    const std::uint64_t chunk_bytes = std::min(record.num_bytes - at, kReadChunkBytes);
    file_.read(record.begin + at, to + at, chunk_bytes);
    if (verify) sum = ::crc32(sum, to + at, static_cast<uInt>(chunk_bytes));
    at += chunk_bytes;
  }
  if (verify && sum != record.crc32)
    file_.throw_format_error(
        record.begin, what + " is damaged: the CRC-32 of its " + std::to_string(record.num_bytes) + " bytes is " +
                          std::to_string(sum) + "; expected " + std::to_string(record.crc32) +
                          ". If the file was written without checksums, set ReadOptions.verify = false.");
}

}  // namespace lockstep::checkpoint::inline torch_file

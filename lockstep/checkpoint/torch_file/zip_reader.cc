#include <zlib.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "lockstep/base/parse.h"
#include "lockstep/base/utf8.h"
#include "lockstep/checkpoint/files/limits.h"
#include "lockstep/checkpoint/torch_file/zip_reader.h"

namespace lockstep::checkpoint {
namespace {

// "PK" and two bytes, as APPNOTE.TXT of PKWARE has them.
constexpr std::uint32_t kLocalHeader = 0x04034b50, kEntry = 0x02014b50, kEnd = 0x06054b50, kEnd64 = 0x06064b50,
                        kLocator64 = 0x07064b50;
constexpr std::uint64_t kLocalHeaderBytes = 30, kEntryBytes = 46, kEndBytes = 22, kEnd64Bytes = 56,
                        kLocator64Bytes = 20;
constexpr std::uint64_t kMost16 = 0xffff, kMost32 = 0xffffffff;
constexpr std::uint16_t kExtra64 = 1;
constexpr std::uint64_t kReadAtOnce = std::uint64_t{1} << 20;  // what was read is summed while it is in cache

// Of a fixed part that has been read; all fields are little-endian.
std::uint64_t field(const std::string& bytes, std::size_t at, std::size_t num_bytes) {
  std::uint64_t value = 0;
  std::memcpy(&value, bytes.data() + at, num_bytes);
  return value;
}

std::string bytes_at(const InputFile& file, std::uint64_t offset, std::uint64_t num_bytes) {
  if (offset > file.num_bytes() || num_bytes > file.num_bytes() - offset)
    file.refuse(offset, "the file ends after " + std::to_string(file.num_bytes()) + " bytes; " +
                            std::to_string(num_bytes) + " are expected here");
  std::string bytes(num_bytes, '\0');
  file.read(offset, bytes.data(), num_bytes);
  return bytes;
}

// Fields that do not fit into 32 bits stand in a part of their own, in this order, and only they.
struct Wide {
  const InputFile& file;
  std::uint64_t at;
  std::string values;
  std::size_t used = 0;

  std::uint64_t of(std::uint64_t narrow) {
    if (narrow != kMost32) return narrow;
    if (used + 8 > values.size()) file.refuse(at, "a size of 64 bits is missing");
    used += 8;
    return field(values, used - 8, 8);
  }
};

Wide wide_fields(const InputFile& file, std::uint64_t at, const std::string& extra) {
  for (std::size_t i = 0; i + 4 <= extra.size();) {
    const std::size_t length = field(extra, i + 2, 2);
    if (length > extra.size() - i - 4) file.refuse(at, "an extra field ends outside of the entry");
    if (field(extra, i, 2) == kExtra64) return {file, at, extra.substr(i + 4, length)};
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
  if (size < kEndBytes)
    file_.refuse(0, "the file has " + std::to_string(size) + " bytes; a zip archive has at least 22");
  const std::uint64_t tail_bytes = std::min(size, kEndBytes + kMost16);
  const std::string tail = bytes_at(file_, size - tail_bytes, tail_bytes);
  std::size_t at = tail.size() - kEndBytes;
  while (at > 0 && !(field(tail, at, 4) == kEnd && field(tail, at + 20, 2) == tail.size() - at - kEndBytes)) --at;
  if (field(tail, at, 4) != kEnd || field(tail, at + 20, 2) != tail.size() - at - kEndBytes)
    file_.refuse(size - kEndBytes,
                 "the end of a zip archive is expected here: the file is another one, or was cut off");
  const std::uint64_t end = size - tail_bytes + at;
  Directory directory{field(tail, at + 16, 4), field(tail, at + 12, 4), field(tail, at + 10, 2)};
  std::uint64_t directory_end = end;
  // torch's writer has the one of 64 bits always.
  if (directory.begin > end || directory.num_bytes != end - directory.begin || directory.num_records == kMost16)
    directory = wide_directory(directory, end, directory_end);
  if (directory.begin > directory_end || directory.num_bytes != directory_end - directory.begin)
    file_.refuse(end, "the directory of " + std::to_string(directory.num_bytes) + " bytes at byte " +
                          std::to_string(directory.begin) + " does not end at byte " + std::to_string(directory_end));
  if (directory.num_records > kMaxZipRecords || directory.num_bytes > kMaxZipDirectoryBytes)
    file_.refuse(end, "a directory of " + std::to_string(directory.num_records) + " records and " +
                          std::to_string(directory.num_bytes) + " bytes; allowed are " +
                          std::to_string(kMaxZipRecords) + " and 64 MiB");
  return directory;
}

// The one of 64 bits, whose end lies right before `end`; `narrow` says the same where it fits. Where there is none,
// `narrow` is all.
ZipReader::Directory ZipReader::wide_directory(const Directory& narrow, std::uint64_t end,
                                               std::uint64_t& directory_end) const {
  const bool announced = narrow.begin == kMost32 || narrow.num_bytes == kMost32 || narrow.num_records == kMost16;
  const std::string locator = end < kLocator64Bytes ? std::string(kLocator64Bytes, '\0')
                                                    : bytes_at(file_, end - kLocator64Bytes, kLocator64Bytes);
  if (field(locator, 0, 4) != kLocator64 && !announced) return narrow;
  directory_end = field(locator, 8, 8);
  if (field(locator, 0, 4) != kLocator64 || directory_end > end - kLocator64Bytes)
    file_.refuse(end, "the directory of 64 bits is missing");
  const std::string text = bytes_at(file_, directory_end, kEnd64Bytes);
  if (field(text, 0, 4) != kEnd64) file_.refuse(directory_end, "the end of the directory of 64 bits is expected here");
  const Directory wide{field(text, 48, 8), field(text, 40, 8), field(text, 32, 8)};
  const auto same = [](std::uint64_t narrow_field, std::uint64_t wide_field, std::uint64_t most) {
    return narrow_field == most || narrow_field == wide_field;
  };
  if (!same(narrow.begin, wide.begin, kMost32) || !same(narrow.num_bytes, wide.num_bytes, kMost32) ||
      !same(narrow.num_records, wide.num_records, kMost16))
    file_.refuse(directory_end, "the directory of 64 bits is another one than that of 32");
  return wide;
}

void ZipReader::read_directory(const Directory& directory) {
  const std::string text = bytes_at(file_, directory.begin, directory.num_bytes);
  std::vector<std::pair<std::uint64_t, std::uint64_t>> used;  // from a record's header to its end
  std::size_t at = 0;
  for (std::uint64_t i = 0; i < directory.num_records; ++i) {
    const std::uint64_t here = directory.begin + at;
    if (text.size() - at < kEntryBytes || field(text, at, 4) != kEntry)
      file_.refuse(here, "entry " + std::to_string(i) + " of the directory is expected here");
    const std::size_t name_bytes = field(text, at + 28, 2), extra_bytes = field(text, at + 30, 2),
                      comment_bytes = field(text, at + 32, 2);
    if (text.size() - at - kEntryBytes < name_bytes + extra_bytes + comment_bytes)
      file_.refuse(here, "the entry ends behind the directory");
    const std::string name = text.substr(at + kEntryBytes, name_bytes);
    if (name.empty() || name.size() > kMaxNameBytes || !base::is_utf8(name) || records_.contains(name))
      file_.refuse(here, "the record " + base::quoted(name, 80) +
                             " is there twice, or its name is not UTF-8 of 1 to 1024 bytes");
    if (field(text, at + 10, 2) != 0 || (field(text, at + 8, 2) & 1) != 0)
      file_.refuse(here, "the record " + base::quoted(name, 80) +
                             " is compressed or encrypted; allowed are records that are stored as they are");
    Wide wide = wide_fields(file_, here, text.substr(at + kEntryBytes + name_bytes, extra_bytes));
    const std::uint64_t num_bytes = wide.of(field(text, at + 24, 4)), stored = wide.of(field(text, at + 20, 4)),
                        header = wide.of(field(text, at + 42, 4));
    if (num_bytes != stored)
      file_.refuse(here, "the record " + base::quoted(name, 80) + " has " + std::to_string(num_bytes) +
                             " bytes and is stored in " + std::to_string(stored));
    const std::uint64_t begin = begin_of(name, header, directory.begin);
    if (num_bytes > directory.begin - begin)
      file_.refuse(here, "the record " + base::quoted(name, 80) + " ends behind the beginning of the directory");
    records_.emplace(name, Record{begin, num_bytes, static_cast<std::uint32_t>(field(text, at + 16, 4))});
    used.emplace_back(header, begin + num_bytes);
    at += kEntryBytes + name_bytes + extra_bytes + comment_bytes;
  }
  if (at != text.size()) file_.refuse(directory.begin + at, "the directory goes on after its last entry");
  std::sort(used.begin(), used.end());
  for (std::size_t i = 1; i < used.size(); ++i)
    if (used[i].first < used[i - 1].second) file_.refuse(used[i].first, "this record begins inside the one before it");
}

// Where a record's bytes begin, whose own header is at `header`; not behind `end`.
std::uint64_t ZipReader::begin_of(const std::string& name, std::uint64_t header, std::uint64_t end) const {
  const std::uint64_t least = kLocalHeaderBytes + name.size();
  if (header > end || end - header < least)
    file_.refuse(header, "the record " + base::quoted(name, 80) + " is said to begin here");
  const std::string text = bytes_at(file_, header, least);
  const std::uint64_t begin = header + least + field(text, 28, 2);
  if (field(text, 0, 4) != kLocalHeader || field(text, 26, 2) != name.size() ||
      text.substr(kLocalHeaderBytes) != name || begin > end)
    file_.refuse(header, "the record " + base::quoted(name, 80) + " is said to begin here");
  return begin;
}

void ZipReader::read(const Record& record, void* bytes, bool verify, const std::string& what) const {
  auto* to = static_cast<unsigned char*>(bytes);
  uLong sum = ::crc32(0, nullptr, 0);
  for (std::uint64_t at = 0; at < record.num_bytes;) {
    const std::uint64_t now = std::min(record.num_bytes - at, kReadAtOnce);
    file_.read(record.begin + at, to + at, now);
    if (verify) sum = ::crc32(sum, to + at, static_cast<uInt>(now));
    at += now;
  }
  if (verify && sum != record.crc32)
    file_.refuse(record.begin,
                 what + " is damaged: the CRC-32 of its " + std::to_string(record.num_bytes) + " bytes is " +
                     std::to_string(sum) + ", and was " + std::to_string(record.crc32) +
                     " when they were written (a file that was written without sums is read with verify = false)");
}

}  // namespace lockstep::checkpoint

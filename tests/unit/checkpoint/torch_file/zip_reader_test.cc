#include "lockstep/checkpoint/torch_file/zip_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "lockstep/base/error.h"
#include "tests/support/temp_dir.h"

namespace lockstep::checkpoint {
namespace {

using testing::HasSubstr;
using tests::TempDir;

std::string number(std::uint64_t value, std::size_t num_bytes) {
  return {reinterpret_cast<const char*>(&value), num_bytes};
}

// One record and its directory entry; the test may set any field to a wrong value.
struct RecordSpec {
  std::string name = "a/data.pkl", content = "N.";
  std::uint64_t flags = 0, method = 0, crc = 0, stored = 2, size = 2, header = 0;
  std::string extra = "", local_name = name;

  std::string local() const {
    return number(0x04034b50, 4) + std::string(22, '\0') + number(local_name.size(), 2) + number(0, 2) + local_name +
           content;
  }
  std::string entry() const {
    return number(0x02014b50, 4) + std::string(4, '\0') + number(flags, 2) + number(method, 2) + std::string(4, '\0') +
           number(crc, 4) + number(stored, 4) + number(size, 4) + number(name.size(), 2) + number(extra.size(), 2) +
           std::string(10, '\0') + number(header, 4) + name + extra;
  }
};

std::string end_of(std::size_t num_records, std::size_t num_bytes, std::size_t begin) {
  return number(0x06054b50, 4) + std::string(4, '\0') + number(num_records, 2) + number(num_records, 2) +
         number(num_bytes, 4) + number(begin, 4) + number(0, 2);
}

std::string archive(const std::vector<RecordSpec>& specs) {
  std::string records, directory;
  for (const auto& spec : specs) records += spec.local();
  for (const auto& spec : specs) directory += spec.entry();
  return records + directory + end_of(specs.size(), directory.size(), records.size());
}

std::string zip_error(const std::string& bytes) {
  const TempDir folder;
  const auto path = folder.write("x", bytes);
  const auto message = tests::message_of<base::FormatError>([&] { ZipReader reader(path); });
  return message.empty() ? "" : message.substr(path.size());
}

TEST(ZipReader, FindsAndReadsRecords) {
  const TempDir folder;
  RecordSpec second{
      .name = "a/data/0", .content = "xyz", .stored = 3, .size = 3, .header = RecordSpec().local().size()};
  second.crc = 0xeb8eba67;  // the CRC-32 of "xyz"
  const ZipReader reader(folder.write("x", archive({RecordSpec(), second})));
  ASSERT_EQ(reader.records().size(), 2u);
  const auto& record = reader.records().at("a/data/0");
  std::string bytes(3, '\0');
  reader.read(record, bytes.data(), true, "storage 0");
  EXPECT_EQ(bytes, "xyz");
  EXPECT_THAT(tests::message_of<base::FormatError>(
                  [&] { reader.read(reader.records().at("a/data.pkl"), bytes.data(), true, "it"); }),
              HasSubstr("it is damaged: the CRC-32 of its 2 bytes is "));
  EXPECT_NO_THROW(reader.read(reader.records().at("a/data.pkl"), bytes.data(), false, "it"));
  EXPECT_EQ(zip_error(archive({})), "");
}

TEST(ZipReader, ReadsZip64Fields) {
  RecordSpec spec{.stored = 0xffffffff, .size = 0xffffffff, .header = 0xffffffff};
  spec.extra =
      number(9, 2) + number(1, 2) + "?" + number(1, 2) + number(24, 2) + number(2, 8) + number(2, 8) + number(0, 8);
  EXPECT_EQ(zip_error(archive({spec})), "");
  const std::string records = spec.local(), directory = spec.entry();
  const auto wide = [&](std::uint64_t begin, std::uint64_t at,
                        const std::string& narrow = end_of(0xffff, 0xffffffff, 0xffffffff)) {
    return records + directory + number(0x06064b50, 4) + std::string(20, '\0') + number(1, 8) + number(1, 8) +
           number(directory.size(), 8) + number(begin, 8) + number(0x07064b50, 4) + number(0, 4) + number(at, 8) +
           number(1, 4) + narrow;
  };
  EXPECT_EQ(zip_error(wide(records.size(), records.size() + directory.size())), "");
  EXPECT_EQ(
      zip_error(wide(records.size(), records.size() + directory.size(), end_of(1, directory.size(), records.size()))),
      "")
      << "as torch's writer does";
  EXPECT_THAT(zip_error(wide(records.size(), records.size() + directory.size(),
                             end_of(1, directory.size(), records.size() - 1))),
              HasSubstr("the zip64 directory differs from the 32-bit directory"));
  EXPECT_THAT(zip_error(wide(records.size() + 1, records.size() + directory.size())),
              HasSubstr("does not end at byte"));
  EXPECT_THAT(zip_error(wide(records.size(), ~std::uint64_t{0})), HasSubstr("the zip64 directory is missing"));
  EXPECT_THAT(zip_error(records + directory + end_of(0xffff, 0xffffffff, 0xffffffff)),
              HasSubstr("the zip64 directory is missing"));
  spec.extra = spec.extra.substr(0, spec.extra.size() - 8);
  spec.extra[7] = 16;
  EXPECT_THAT(zip_error(archive({spec})), HasSubstr("a 64-bit size is missing"));
}

TEST(ZipReader, AllowsCompressedRecordsThatAreNotRead) {
  const TempDir folder;
  const RecordSpec code{.name = "a/code/x.py", .method = 8, .size = 1000, .header = RecordSpec().local().size()};
  const ZipReader reader(folder.write("x", archive({RecordSpec(), code})));
  std::string bytes(2, '\0');
  reader.read(reader.records().at("a/data.pkl"), bytes.data(), false, "it");
  EXPECT_THAT(tests::message_of<base::FormatError>(
                  [&] { reader.read(reader.records().at("a/code/x.py"), bytes.data(), false, "it"); }),
              HasSubstr("it is compressed; expected an uncompressed record"));
  EXPECT_THAT(zip_error(archive({{.method = 8, .stored = 3, .size = 3}})),
              HasSubstr("ends after the beginning of the directory"));
}

TEST(ZipReader, RejectsArchivesTorchSaveDoesNotWrite) {
  EXPECT_THAT(zip_error(""), HasSubstr(":0: the file has 0 bytes"));
  EXPECT_THAT(zip_error(archive({}).substr(1) + "x"), HasSubstr("expected the end of a zip archive here"));
  EXPECT_THAT(zip_error(archive({{.method = 12}})), HasSubstr("is encrypted or compressed by method 12"));
  EXPECT_THAT(zip_error(archive({{.flags = 1}})), HasSubstr("is encrypted or compressed by method 0"));
  EXPECT_THAT(zip_error(archive({{.stored = 1}})), HasSubstr("has 2 bytes, but is stored in 1"));
  EXPECT_THAT(zip_error(archive({{.stored = 3, .size = 3}})), HasSubstr("ends after the beginning of the directory"));
  EXPECT_THAT(zip_error(archive({{.header = 1}})), HasSubstr("expected the header of record"));
  EXPECT_THAT(zip_error(archive({{.header = 0xfffffffe}})), HasSubstr("expected the header of record"));
  EXPECT_THAT(zip_error(archive({{.local_name = "a/data.pkm"}})), HasSubstr("expected the header of record"));
  EXPECT_THAT(zip_error(archive({{.name = "\xff"}})), HasSubstr("its name is not UTF-8"));
  EXPECT_THAT(zip_error(archive({{.name = std::string(1025, 'n')}})), HasSubstr("1 to 1024 bytes"));
  EXPECT_THAT(zip_error(archive({RecordSpec(), RecordSpec()})), HasSubstr("is a duplicate"));
  RecordSpec inside{.name = "b", .content = "", .stored = 0, .size = 0};
  RecordSpec around{.content = inside.local(), .stored = inside.local().size(), .size = inside.local().size()};
  inside.header = around.local().size() - around.content.size();
  const std::string directory = around.entry() + inside.entry();
  EXPECT_THAT(zip_error(around.local() + directory + end_of(2, directory.size(), around.local().size())),
              HasSubstr("begins inside the previous one"));
  EXPECT_THAT(zip_error(RecordSpec().local() + RecordSpec().entry() +
                        end_of(2, RecordSpec().entry().size(), RecordSpec().local().size())),
              HasSubstr("expected entry 1 of the directory here"));
  EXPECT_THAT(zip_error(RecordSpec().local() + RecordSpec().entry() + "x" +
                        end_of(1, RecordSpec().entry().size() + 1, RecordSpec().local().size())),
              HasSubstr("continues after its last entry"));
  EXPECT_THAT(zip_error(RecordSpec().local() + RecordSpec().entry() + end_of(1, 1000, 0)),
              HasSubstr("does not end at byte"));
}

}  // namespace
}  // namespace lockstep::checkpoint

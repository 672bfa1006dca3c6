#include "lockstep/train/loggers/logger_collection.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <filesystem>
#include <limits>

#include "lockstep/base/error.h"
#include "lockstep/train/loggers/csv_logger.h"
#include "lockstep/train/loggers/json_logger.h"
#include "lockstep/train/loggers/tensorboard_logger.h"
#include "lockstep/train/loggers/text_format.h"
#include "tests/support/temp_dir.h"

namespace lockstep::training {
namespace {

using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::MatchesRegex;
using tests::message_of;
using tests::read_file;
using tests::TempDir;

constexpr LogTimestamp at(std::int64_t step) { return {step, 1700000000.25}; }

/// While an object exists, this process cannot write beyond `bytes` in any file, as on a full disk.
class FullDisk {
 public:
  explicit FullDisk(rlim_t bytes) {
    before_handler_ = ::signal(SIGXFSZ, SIG_IGN);
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FullDisk() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    ::signal(SIGXFSZ, before_handler_);
  }
  FullDisk(const FullDisk&) = delete;
  FullDisk& operator=(const FullDisk&) = delete;

 private:
  rlimit before_{};
  void (*before_handler_)(int) = nullptr;
};

TEST(CsvLogger, WritesARowPerCall) {
  const TempDir folder;
  CsvLogger csv(folder / "a/b/m.csv", {});
  csv.log_scalars(at(1), {{"loss", 0.1}, {"lr", 1e-5}});
  csv.log_scalars(at(2), {{"lr", 2}, {"loss", -std::numeric_limits<double>::infinity()}});
  csv.flush();
  EXPECT_EQ(read_file(folder / "a/b/m.csv"),
            "step,time,loss,lr\n1,1700000000.250,0.1,1e-05\n2,1700000000.250,-inf,2\n");
}

TEST(CsvLogger, AddsColumnsForNewNames) {
  const TempDir folder;
  CsvLogger csv(folder / "m.csv", {});
  csv.log_scalars(at(1), {{"loss", 1}});
  csv.log_scalars(at(1), {{"val,loss", -std::numeric_limits<double>::quiet_NaN()}});
  csv.log_scalars(at(2), {{"loss", 3}});
  csv.log_scalars(at(3), {{"a \"b\"\nc", 4}});
  csv.flush();
  EXPECT_EQ(read_file(folder / "m.csv"),
            "step,time,loss,\"val,loss\",\"a \"\"b\"\" c\"\n"
            "1,1700000000.250,1,,\n1,1700000000.250,,nan,\n2,1700000000.250,3,,\n3,1700000000.250,,,4\n");
  EXPECT_EQ(folder.num_entries(), 1U);
}

TEST(CsvLogger, AppendsToAnExistingFile) {
  const TempDir folder;
  folder.write("m.csv", "step,time,\"a,b\",c\n5,1.000,1,2\n6,2.000,3,4\n7,3.0");  // killed while writing the last row
  CsvLogger csv(folder / "m.csv", {});
  csv.log_scalars(at(7), {{"c", 5}, {"a,b", 6}});
  csv.flush();
  EXPECT_EQ(read_file(folder / "m.csv"), "step,time,\"a,b\",c\n5,1.000,1,2\n6,2.000,3,4\n7,1700000000.250,6,5\n");
}

TEST(CsvLogger, DropsRepeatedSteps) {
  const TempDir folder;
  folder.write("m.csv", "step,time,c\n5,1.000,1\n6,2.000,3\n7,3.000,4\n5,4.000,4\n");
  CsvLogger csv(folder / "m.csv", 6);
  csv.log_scalars(at(6), {{"c", 9}});
  csv.flush();
  EXPECT_EQ(read_file(folder / "m.csv"), "step,time,c\n5,1.000,1\n5,4.000,4\n6,1700000000.250,9\n");
}

TEST(CsvLogger, RejectsAForeignTable) {
  const TempDir folder;
  folder.write("m.csv", "name,age\nx,3\n");
  CsvLogger csv(folder / "m.csv", {});
  EXPECT_EQ(message_of<base::UsageError>([&] { csv.log_scalars(at(1), {{"c", 9}}); }),
            folder / "m.csv" + " begins with \"name,age\"; expected a table that begins with step,time");
  EXPECT_EQ(read_file(folder / "m.csv"), "name,age\nx,3\n");
  EXPECT_EQ(folder.num_entries(), 1U);
}

TEST(CsvLogger, FieldsRoundTrip) {
  EXPECT_THAT(split_csv_row("a,,\"b,\"\"c\"\"\",d"), ElementsAre("a", "", "b,\"c\"", "d"));
  EXPECT_THAT(split_csv_row(""), ElementsAre(""));
}

TEST(CsvLogger, NumbersRoundTrip) {
  const TempDir folder;
  const auto read = [&](std::int64_t end) {
    std::string text;
    read_csv(folder / "m.csv", end, [&](const LogTimestamp& when, const NamedValues& values) {
      text += std::to_string(when.step) + "@" + std::to_string(when.seconds);
      for (const auto& [name, value] : values) text += " " + name + "=" + std::to_string(value);
      text += "\n";
    });
    return text;
  };
  EXPECT_EQ(read(100), "");  // the file does not exist
  CsvLogger csv(folder / "m.csv", {});
  csv.log_scalars(at(1), {{"loss", 0.1}});
  csv.log_scalars(at(2), {{"val,\"x\"", HUGE_VAL}});
  csv.log_scalars(at(3), {{"loss", std::numeric_limits<double>::quiet_NaN()}, {"val,\"x\"", -2e-9 * 1e9}});
  csv.flush();
  EXPECT_EQ(read(100),
            "1@1700000000.250000 loss=0.100000\n2@1700000000.250000 val,\"x\"=inf\n3@1700000000.250000 loss=nan "
            "val,\"x\"=-2.000000\n");
  EXPECT_EQ(read(2), "1@1700000000.250000 loss=0.100000\n");
  folder.write("m.csv", "step,time,loss\n\n1,2,3,4\nx,2,3\n4,,5\n6,7,8");
  EXPECT_EQ(read(100), "4@0.000000 loss=5.000000\n");
}

TEST(JsonLogger, DropsRepeatedSteps) {
  const TempDir folder;
  folder.write("m.jsonl", "{\"step\":5}\n{\"step\":6}\nno json\n{\"step\":7}\n{\"step\":8");
  JsonLogger json(folder / "m.jsonl", 6);
  json.log_scalars(at(6), {{"c", 9}});
  json.flush();
  EXPECT_EQ(read_file(folder / "m.jsonl"), "{\"step\":5}\nno json\n{\"step\":6,\"time\":1700000000.250,\"c\":9}\n");
}

TEST(TfRecord, MatchesTheFormatsChecksums) {
  EXPECT_EQ(crc32c("123456789"), 0xE3069283U);  // RFC 3720, B.4, has other test vectors
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8A9136AAU);
  EXPECT_EQ(encode_tfrecord("").size(), 16U);
}

TEST(Histogram, CountsEachValueOnce) {
  const Histogram histogram =
      make_histogram(std::vector<double>{0, 1, 64, 64, std::numeric_limits<double>::quiet_NaN(), HUGE_VAL, -HUGE_VAL});
  EXPECT_EQ(histogram.num_finite, 4);
  EXPECT_EQ(histogram.num_nan, 1);
  EXPECT_EQ(histogram.num_infinite, 2);
  EXPECT_EQ(histogram.sum, 129);
  EXPECT_EQ(histogram.counts[0], 2);  // a value on a limit belongs to the bucket below it
  EXPECT_EQ(histogram.counts[63], 2);
  EXPECT_EQ(histogram.limits[0], 1);
  EXPECT_EQ(histogram.limits[63], 64);
}

TEST(Histogram, HandlesExtremeValues) {
  const double max = std::numeric_limits<double>::max();
  const Histogram histogram = make_histogram(std::vector<double>{-max, 0, max});
  EXPECT_EQ(histogram.counts[0], 1);
  EXPECT_EQ(histogram.counts[31], 1);
  EXPECT_EQ(histogram.counts[63], 1);
  EXPECT_TRUE(make_histogram(std::vector<float>{}).limits.empty());
}

TEST(Image, RejectsInvalidImages) {
  EXPECT_EQ(message_of<base::UsageError>([] { encode_png({.width = 2, .height = 2, .channels = 2, .bytes = {1}}); }),
            "image: 2 x 2 pixels, 2 channels and 1 bytes; expected sides of 1 to 16384 pixels, 1, 3 or 4 channels, and "
            "one byte per channel and pixel");
}

TEST(TextEscaping, EscapesAndRepairsText) {
  EXPECT_EQ(escape_xml("<a href='x'>&\"\x01\xff\n"), "&lt;a href=&#39;x&#39;&gt;&amp;&quot;\uFFFD\n");
}

TEST(LoggerCollection, CreateNoFileBeforeTheFirstValue) {
  const TempDir folder;
  LoggerCollection loggers(0, {.directory = folder / "runs/x", .json_lines = true});
  loggers.flush();
  loggers.log_scalars(0, {});
  EXPECT_EQ(folder.num_entries(), 0U);
  loggers.log_scalars(0, {{"loss", 1}});
  loggers.flush();
  EXPECT_EQ(
      std::distance(std::filesystem::directory_iterator(folder / "runs/x"), std::filesystem::directory_iterator()), 3);
}

TEST(LoggerCollection, AreInactiveOnOtherRanks) {
  const TempDir folder;
  LoggerCollection loggers(1, {.directory = folder / "x"});
  EXPECT_FALSE(loggers.is_active());
  loggers.log_scalars(0, {{"loss", 1}});
  loggers.flush();
  EXPECT_EQ(folder.num_entries(), 0U);
}

TEST(LoggerCollection, FlushAfterTheInterval) {
  const TempDir folder;
  LoggerCollection loggers(
      0, {.directory = folder.path(), .tensorboard = false, .flush_interval = std::chrono::milliseconds(0)});
  loggers.log_scalars(0, {{"loss", 1}});
  EXPECT_THAT(read_file(folder / "metrics.csv"), EndsWith(",1\n"));
}

TEST(LoggerCollection, RejectReservedNames) {
  const TempDir folder;
  LoggerCollection loggers(0, {.directory = folder.path()});
  const auto error_of = [&](const NamedValues& values, std::int64_t step = 0) {
    return message_of<base::UsageError>([&] { loggers.log_scalars(step, values); });
  };
  EXPECT_EQ(error_of({{"x", 1}, {"step", 1}}),
            "LoggerCollection: the name of a value is \"step\"; expected a name that is not empty and not step, time, "
            "text or histogram");
  EXPECT_EQ(error_of({{"x", 1}, {"x", 1}}, 3),
            "LoggerCollection: the name \"x\" occurs twice in one call at step 3; expected unique names");
  EXPECT_EQ(error_of({{"x", 1}}, -1), "LoggerCollection: the step of \"x\" is -1; expected 0 or more");
  EXPECT_EQ(folder.num_entries(), 0U);
}

TEST(LoggerCollection, RejectInvalidOptions) {
  EXPECT_EQ(message_of<base::UsageError>([] { LoggerCollection(0, {}); }),
            "LoggerOptions.directory is empty; expected the path of a directory, such as runs/NAME");
  EXPECT_EQ(message_of<base::UsageError>([] { LoggerCollection(0, {.directory = "x", .first_step = -2}); }),
            "LoggerOptions.first_step is -2; expected 0 or more");
  EXPECT_EQ(message_of<base::UsageError>(
                [] { LoggerCollection(0, {.directory = "x", .flush_interval = std::chrono::milliseconds(-1)}); }),
            "LoggerOptions.flush_interval is -1 ms; expected 0 or more");
}

TEST(LoggerCollection, ContinueWhenTheDiskIsFull) {
  const TempDir folder;
  std::string before;
  testing::internal::CaptureStderr();
  {
    LoggerCollection loggers(0, {.directory = folder.path(), .tensorboard = false});
    for (int step = 0; step < 20; ++step) loggers.log_scalars(step, {{"loss", 1}});
    loggers.flush();
    before = read_file(folder / "metrics.csv");
    {
      const FullDisk full(before.size() + 10);  // leaves space for the captured stderr
      for (int step = 20; step < 25; ++step) {
        loggers.log_scalars(step, {{"loss", 2}});
        loggers.flush();
      }
    }
    loggers.log_scalars(28, {{"loss", 3}});
  }
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              MatchesRegex("lockstep: warning: cannot write 1 records to .*/metrics.csv: File too large; the training "
                           "continues without them\n"
                           "lockstep: warning: logging works again after 5 failures\n"));
  const std::string after = read_file(folder / "metrics.csv");
  EXPECT_EQ(after.substr(0, before.size()), before);
  EXPECT_THAT(after.substr(before.size()), MatchesRegex("28,[0-9.]*,3\n"));
}

TEST(LoggerCollection, ThrowWhenTheDiskIsFullOnRequest) {
  const TempDir folder;
  LoggerCollection loggers(0, {.directory = folder.path(), .csv = false, .on_disk_error = DiskErrorPolicy::kStop});
  const FullDisk full(10);
  EXPECT_THAT(message_of<base::SystemError>([&] { loggers.log_scalars(1, {{"loss", 1}}); }),
              HasSubstr("File too large"));
}

TEST(LoggerCollection, NameADirectoryThatCannotBeCreated) {
  const TempDir folder;
  folder.write("runs", "a file");
  LoggerCollection loggers(0, {.directory = folder / "runs/x", .on_disk_error = DiskErrorPolicy::kStop});
  EXPECT_EQ(message_of<base::SystemError>([&] { loggers.log_scalars(1, {{"loss", 1}}); }),
            "cannot create the directory " + folder / "runs/x" + ": Not a directory");
}

TEST(LoggerCollection, CallAndFlushUserLoggers) {
  struct RecordingLogger : Logger {
    explicit RecordingLogger(std::string* calls) : calls_(calls) {}
    void log_scalars(const LogTimestamp& when, const NamedValues& values) override {
      *calls_ += std::to_string(when.step) + values.front().first + " ";
    }
    void log_text(const LogTimestamp&, const std::string& name, const std::string&) override { *calls_ += name + " "; }
    void log_histogram(const LogTimestamp&, const std::string& name, const Histogram&) override {
      *calls_ += name + " ";
    }
    void log_image(const LogTimestamp&, const std::string& name, const Image&) override { *calls_ += name + " "; }
    void flush() override { *calls_ += "flush "; }
    std::string* calls_;
  };
  std::string calls;
  {
    LoggerCollection loggers(0, {.csv = false, .tensorboard = false});
    EXPECT_FALSE(loggers.is_active());
    loggers.add(std::make_unique<RecordingLogger>(&calls));
    loggers.log_scalars(3, {{"a", 1}});
    loggers.log_text(3, "b", "");
    loggers.log_histogram(3, "c", {});
    loggers.log_image(3, "d", {});
  }
  EXPECT_EQ(calls, "3a b c d flush ");
}

}  // namespace
}  // namespace lockstep::training

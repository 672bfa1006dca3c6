// Numbers as a table: a line a call, a column a name.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "lockstep/train/loggers/logger.h"
#include "lockstep/train/loggers/record_file.h"

namespace lockstep::train {

/// The first columns are "step" and "time", seconds since 1970. A field is empty when the call had no such number; NaN
/// and the infinities are nan, inf and -inf. The first line names all columns there ever are, and all lines have as
/// many: with a name that is new the file is written anew, which replaces the old one in one step. One that is there at
/// first goes on.
class CsvLogger final : public Logger {
 public:
  /// Lines of an earlier run of `first_step` and later are left out. Touches nothing yet; the first scalars() throws
  /// UsageError when the file is another kind of table.
  CsvLogger(const std::string& path, std::optional<std::int64_t> first_step) : file_(path), first_step_(first_step) {}

  void log_scalars(const LogTimestamp& at, const NamedValues& values) override;
  void text(const LogTimestamp&, const std::string&, const std::string&) override {}
  void histogram(const LogTimestamp&, const std::string&, const Histogram&) override {}
  void image(const LogTimestamp&, const std::string&, const Image&) override {}
  void flush() override { file_.flush(); }

 private:
  void adopt_existing_file();
  void add_columns(const std::vector<std::string>& names);

  RecordFile file_;
  std::optional<std::int64_t> first_step_;
  bool has_adopted_file_ = false;  // what was there before this run
  std::vector<std::string> columns_{"step", "time"};
  std::unordered_map<std::string, std::size_t> column_index_;  // of names in columns_
  std::vector<std::string> row_;
};

/// The numbers that such a table has of steps before `end`, line by line. No file is none; a line that is no such row
/// is passed over. Throws SystemError when it cannot be read.
void read_csv(const std::string& path, std::int64_t end,
              const std::function<void(const LogTimestamp& at, const NamedValues& values)>& on_row);

/// The fields of one line, without its \n; "a ""b""" is a "b". Pure.
std::vector<std::string> split_csv_row(std::string_view line);

}  // namespace lockstep::train

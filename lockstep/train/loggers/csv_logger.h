// A logger that writes scalars as a CSV table: a row per call, a column per name.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "lockstep/train/loggers/logger.h"
#include "lockstep/train/loggers/record_file.h"

namespace lockstep::training::inline loggers {

/// The first columns are "step" and "time", seconds since 1970. A field is empty when the call had no value of that
/// name; NaN and infinities are written as nan, inf and -inf. The header names all columns and all rows have the same
/// number of fields: a new name rewrites the file, which replaces the old one atomically. An existing table is
/// continued.
class CsvLogger final : public Logger {
 public:
  /// Rows of an earlier run with step `first_step` or later are removed. The constructor does not access the file; the
  /// first log_scalars() throws UsageError when the file is not such a table.
  CsvLogger(const std::string& path, std::optional<std::int64_t> first_step) : file_(path), first_step_(first_step) {}

  void log_scalars(const LogTimestamp& at, const NamedValues& values) override;
  void flush() override { file_.flush(); }

 private:
  void adopt_existing_file();
  void add_columns(const std::vector<std::string>& names);

  RecordFile file_;
  std::optional<std::int64_t> first_step_;
  bool has_adopted_file_ = false;  // rows of an earlier run were read
  std::vector<std::string> columns_{"step", "time"};
  std::unordered_map<std::string, std::size_t> column_index_;  // by name, in columns_
  std::vector<std::string> row_;
};

/// Calls `on_row` for each row of such a table with a step below `end`. A missing file has no rows; malformed rows are
/// skipped. Throws SystemError when the file cannot be read.
void read_csv(const std::string& path, std::int64_t end,
              const std::function<void(const LogTimestamp& at, const NamedValues& values)>& on_row);

/// Splits one row, without its \n, into unquoted fields: "a ""b""" becomes a "b". Pure.
std::vector<std::string> split_csv_row(std::string_view line);

}  // namespace lockstep::training::inline loggers

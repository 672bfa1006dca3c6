#include "lockstep/train/loggers/csv_logger.h"

#include <cerrno>
#include <charconv>
#include <fstream>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/train/loggers/text_format.h"

namespace lockstep::training::inline loggers {
namespace {

std::string quote_csv_field(std::string text) {
  for (char& c : text)
    if (c == '\n' || c == '\r') c = ' ';  // line breaks in quoted fields break line-based readers
  if (text.find_first_of(",\"") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
}

/// Parses a number that append_number() wrote.
std::optional<double> parse_number(const std::string& field) {
  double number = 0;
  const char* const end = field.data() + field.size();
  const auto read = std::from_chars(field.data(), end, number);
  return !field.empty() && read.ec == std::errc() && read.ptr == end ? std::optional(number) : std::nullopt;
}

std::string format_csv_row(const std::vector<std::string>& names) {
  return base::joined(names, ",", quote_csv_field) + "\n";
}

}  // namespace

std::vector<std::string> split_csv_row(std::string_view line) {
  std::vector<std::string> fields(1);
  bool quoted = false;
  for (std::size_t i = 0; i < line.size(); ++i) {
    if (line[i] == '"' && quoted && i + 1 < line.size() && line[i + 1] == '"')
      fields.back() += line[i++];
    else if (line[i] == '"')
      quoted = !quoted;
    else if (line[i] == ',' && !quoted)
      fields.emplace_back();
    else
      fields.back() += line[i];
  }
  return fields;
}

void read_csv(const std::string& path, std::int64_t end,
              const std::function<void(const LogTimestamp& at, const NamedValues& values)>& on_row) {
  std::ifstream file(path);
  if (!file && errno != ENOENT) throw base::SystemError("cannot read " + path, errno);
  std::string line;
  std::getline(file, line);
  const std::vector<std::string> columns = split_csv_row(line);
  while (std::getline(file, line) && !file.eof()) {  // an unterminated last line is an incomplete row
    const std::vector<std::string> row = split_csv_row(line);
    const auto step = base::parse_int(row[0]);
    if (!step || *step >= end || row.size() != columns.size() || row.size() < 2) continue;
    NamedValues values;
    for (std::size_t i = 2; i < row.size(); ++i)
      if (const auto number = parse_number(row[i])) values.emplace_back(columns[i], *number);
    if (!values.empty()) on_row({*step, parse_number(row[1]).value_or(0)}, values);
  }
}

void CsvLogger::adopt_existing_file() {
  std::vector<std::string> columns;
  rewrite_lines(file_.path(), [&](std::string& line) {
    if (columns.empty()) {
      if (line.empty()) line = format_csv_row(columns_);
      columns = split_csv_row(std::string_view(line).substr(0, line.size() - 1));
      if (columns.size() < 2 || columns[0] != columns_[0] || columns[1] != columns_[1])
        throw base::UsageError(file_.path() + " begins with " + base::quoted(line.substr(0, line.size() - 1), 80) +
                                   "; expected a table that begins with step,time",
                               "Use another directory, or move the file away");
    } else if (first_step_) {
      const auto step = base::parse_int(std::string_view(line).substr(0, line.find(',')));
      if (step && *step >= *first_step_) line.clear();
    }
  });
  columns_ = std::move(columns);
  for (std::size_t i = 2; i < columns_.size(); ++i) column_index_.emplace(columns_[i], i);
  has_adopted_file_ = true;
}

void CsvLogger::add_columns(const std::vector<std::string>& names) {
  std::vector<std::string> columns = columns_;
  columns.insert(columns.end(), names.begin(), names.end());
  file_.flush();
  bool first = true;
  const std::string empty(names.size(), ',');
  rewrite_lines(file_.path(), [&](std::string& line) {
    if (first)
      line = format_csv_row(columns);
    else if (!line.empty())
      line.insert(line.size() - 1, empty);
    first = false;
  });
  file_.reopen();
  for (std::size_t i = columns_.size(); i < columns.size(); ++i) column_index_.emplace(columns[i], i);
  columns_ = std::move(columns);
}

void CsvLogger::log_scalars(const LogTimestamp& at, const NamedValues& values) {
  if (!has_adopted_file_) adopt_existing_file();
  std::vector<std::string> added;
  for (const auto& [name, value] : values)
    if (!column_index_.contains(name)) added.push_back(name);
  if (!added.empty()) add_columns(added);

  row_.assign(columns_.size(), "");
  append_number(row_[0], at.step);
  append_seconds(row_[1], at.seconds);
  for (const auto& [name, value] : values) {
    std::string& field = row_[column_index_.at(name)];
    field.clear();
    append_number(field, value);
  }
  file_.append(base::joined(row_, ",") + "\n");
}

}  // namespace lockstep::training::inline loggers

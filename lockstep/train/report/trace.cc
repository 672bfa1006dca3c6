#include "lockstep/train/report/trace.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <utility>

#include "lockstep/train/loggers/record_file.h"
#include "lockstep/train/loggers/text_format.h"
#include "lockstep/train/report/timeline.h"

namespace lockstep::training::inline report {
namespace {

enum Track { kSteps = 1, kPhases = 2, kOperations = 3 };  // operations use kOperations and the tracks after it

/// Collects the events of one rank, with `shift_ns` added to their times.
class TraceEventWriter {
 public:
  TraceEventWriter(int rank, std::int64_t shift_ns) : rank_(std::to_string(rank)), shift_ns_(shift_ns) {}

  void name_process(const std::string& name) {
    add("\"ph\":\"M\",\"name\":\"process_name\",\"args\":{\"name\":" + json_string(name) + "}");
  }
  void name_track(int track, const std::string& name) {
    add("\"ph\":\"M\",\"tid\":" + std::to_string(track) +
        ",\"name\":\"thread_name\",\"args\":{\"name\":" + json_string(name) + "}");
  }
  void span(int track, const std::string& name, std::int64_t begin_ns, std::int64_t end_ns,
            const std::string& arguments) {
    char times[80];
    std::snprintf(times, sizeof times, "\"ts\":%.3f,\"dur\":%.3f", static_cast<double>(begin_ns + shift_ns_) / 1e3,
                  static_cast<double>(end_ns - begin_ns) / 1e3);
    add("\"ph\":\"X\",\"tid\":" + std::to_string(track) + ",\"name\":" + json_string(name) + "," + times +
        ",\"args\":{" + arguments + "}");
  }
  const std::string& text() const { return text_; }

 private:
  void add(const std::string& fields) {
    text_ += (text_.empty() ? "{\"pid\":" : ",\n{\"pid\":") + rank_ + "," + fields + "}";
  }

  std::string rank_;
  std::int64_t shift_ns_;
  std::string text_;
};

void add_operations(const RankRecord& record, TraceEventWriter& events) {
  std::vector<std::pair<std::int64_t, std::int64_t>> times;
  for (const OperationSpan& operation : record.operations) times.emplace_back(operation.begin_ns, operation.end_ns);
  const std::vector<int> row_of = assign_rows(times);
  const int num_rows = row_of.empty() ? 0 : *std::max_element(row_of.begin(), row_of.end()) + 1;
  for (int row = 0; row < num_rows; ++row) events.name_track(kOperations + row, "operations");
  for (std::size_t i = 0; i < row_of.size(); ++i) {
    const OperationSpan& o = record.operations[i];
    events.span(kOperations + row_of[i], o.name.empty() ? o.kind : o.kind + " " + o.name, o.begin_ns, o.end_ns,
                "\"channel\":" + json_string(o.channel) + ",\"number\":" + std::to_string(o.seq) +
                    ",\"bytes\":" + std::to_string(o.bytes));
  }
}

std::string rank_events(const RankRecord& record, std::int64_t shift_ns) {
  TraceEventWriter events(record.rank, shift_ns);
  events.name_process("rank " + std::to_string(record.rank) + " on " + record.host);
  events.name_track(kSteps, "steps");
  events.name_track(kPhases, "phases");
  for (const StepRecord& step : record.steps) {
    const std::string number = "\"step\":" + std::to_string(step.step);
    events.span(kSteps, "step " + std::to_string(step.step), step.times.begin_ns, step.times.end_ns, number);
    for (const PhaseSpan& span : step.times.spans)
      events.span(kPhases, std::string(kPhaseNames[static_cast<std::size_t>(span.phase)]), span.begin_ns, span.end_ns,
                  number);
  }
  add_operations(record, events);
  return events.text();
}

}  // namespace

std::string trace_json(const std::vector<RankRecord>& records) {
  const std::vector<std::int64_t> offsets = clock_offsets(records);
  std::int64_t origin = INT64_MAX;
  for (std::size_t i = 0; i < records.size(); ++i) {
    for (const StepRecord& step : records[i].steps) origin = std::min(origin, step.times.begin_ns + offsets[i]);
    for (const OperationSpan& operation : records[i].operations)
      origin = std::min(origin, operation.begin_ns + offsets[i]);
  }
  std::string all;
  for (std::size_t i = 0; i < records.size(); ++i)
    all += (all.empty() ? "" : ",\n") + rank_events(records[i], offsets[i] - (origin == INT64_MAX ? 0 : origin));
  return "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n" + all + "\n]}\n";
}

void write_trace(const std::string& path, const std::vector<RankRecord>& records) {
  replace_file(path, trace_json(records));
}

}  // namespace lockstep::training::inline report

#include "lockstep/train/report/rank_record.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "lockstep/base/error.h"
#include "lockstep/base/monotonic.h"
#include "lockstep/base/net/boot_id.h"
#include "lockstep/base/net/socket.h"
#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/base/telemetry/span_log.h"

namespace lockstep::training::inline report {
namespace {

using JsonValue = nlohmann::json;

std::vector<OperationSpan> operations_since(std::int64_t begin_ns) {
  std::vector<OperationSpan> spans;
  if (const auto seen = base::telemetry::find_rank_page(::getpid()))
    for (const base::telemetry::OperationRecord& operation : seen->operations)
      if (operation.is_finished() && operation.ended >= begin_ns)
        spans.push_back({operation.channel, operation.seq, operation.kind, operation.name, operation.bytes,
                         operation.started, operation.ended});
  if (const base::telemetry::SpanLog* log = base::telemetry::SpanLog::this_process())
    for (base::telemetry::Span& span : log->spans())
      if (span.end_ns >= begin_ns)
        spans.push_back({"", 0, std::move(span.kind), std::move(span.name), span.bytes, span.begin_ns, span.end_ns});
  return spans;
}

}  // namespace

// Curves, steps and operations are arrays in JSON, because a record has thousands of them. nlohmann's library finds
// these functions by their arguments, so they cannot be in the unnamed namespace.
void to_json(JsonValue& json, const CurvePoint& p) {
  json = JsonValue::array({p.first_step, p.last_step, p.min, p.max, p.sum, p.num_finite, p.num_non_finite});
}
void from_json(const JsonValue& json, CurvePoint& p) {
  p = {json.at(0), json.at(1), json.at(2), json.at(3), json.at(4), json.at(5), json.at(6)};
}

void to_json(JsonValue& json, const Curve& curve) { json = curve.points(); }
void from_json(const JsonValue& json, Curve& curve) { curve = Curve::from_points(json.get<std::vector<CurvePoint>>()); }

void to_json(JsonValue& json, const PhaseSpan& span) {
  json = JsonValue::array({static_cast<int>(span.phase), span.begin_ns, span.end_ns});
}
void from_json(const JsonValue& json, PhaseSpan& span) {
  const int phase = json.at(0);
  if (phase < 0 || phase >= static_cast<int>(kNumPhases))
    throw base::FormatError("rank record: unknown phase " + std::to_string(phase));
  span = {static_cast<Phase>(phase), json.at(1), json.at(2)};
}

void to_json(JsonValue& json, const StepRecord& step) {
  json = JsonValue::array({step.step, step.times.begin_ns, step.times.end_ns, step.times.spans});
}
void from_json(const JsonValue& json, StepRecord& step) {
  step = {json.at(0), {json.at(1), json.at(2), json.at(3).get<std::vector<PhaseSpan>>()}};
}

void to_json(JsonValue& json, const OperationSpan& o) {
  json = JsonValue::array({o.channel, o.seq, o.kind, o.name, o.bytes, o.begin_ns, o.end_ns});
}
void from_json(const JsonValue& json, OperationSpan& o) {
  o = {json.at(0), json.at(1), json.at(2), json.at(3), json.at(4), json.at(5), json.at(6)};
}

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RankRecord, rank, host, clock, monotonic_ns, unix_ns, num_steps, seconds,
                                   phase_seconds, comm_seconds, peak_bytes, step_ms, cpu_cores, memory_mib, device_mib,
                                   phase_ms, steps, operations)

std::string to_text(const RankRecord& record) {
  return JsonValue(record).dump(-1, ' ', false, JsonValue::error_handler_t::replace);
}

RankRecord rank_record_from_text(const std::string& text) {
  try {
    return JsonValue::parse(text).get<RankRecord>();
  } catch (const JsonValue::exception& error) {
    throw base::FormatError(std::string("rank record: ") + error.what());
  }
}

RankRecorder::RankRecorder(const RankRecorderOptions& options)
    : options_(options), last_sample_ns_(base::monotonic_ns()), last_sample_(ResourceUsage::now()) {
  if (options.keep_steps < 1 || options.sample_interval.count() < 1 || options.curve_points < 2)
    throw base::UsageError("RankRecorderOptions: keep_steps is " + std::to_string(options.keep_steps) +
                           ", sample_interval is " + std::to_string(options.sample_interval.count()) +
                           " ms, curve_points is " + std::to_string(options.curve_points) +
                           "; expected at least 1, 1 and 2");
  if (options.trace) base::telemetry::SpanLog::enable();
  record_.rank = options.rank;
  record_.host = base::net::host_name();
  record_.clock = base::net::boot_id();  // the monotonic clock starts with the kernel
  if (record_.clock.empty()) record_.clock = record_.host;
  for (Curve* curve : {&record_.step_ms, &record_.cpu_cores, &record_.memory_mib, &record_.device_mib})
    *curve = Curve(options.curve_points);
  record_.phase_ms.fill(Curve(options.curve_points));
}

void RankRecorder::add(std::int64_t step, const StepTimes& times, std::uint64_t device_bytes) {
  const auto x = static_cast<double>(step);
  const auto phases = times.phase_seconds();
  ++record_.num_steps;
  record_.seconds += times.seconds();
  record_.comm_seconds += static_cast<double>(times.comm_ns) / 1e9;
  record_.step_ms.add(x, times.seconds() * 1e3);
  for (std::size_t i = 0; i < kNumPhases; ++i) {
    record_.phase_seconds[i] += phases[i];
    record_.phase_ms[i].add(x, phases[i] * 1e3);
  }
  if (static_cast<std::int64_t>(steps_.size()) < options_.keep_steps) {
    steps_.push_back({step, times});
  } else {  // reuses the memory of the oldest step
    steps_.push_back(std::move(steps_.front()));
    steps_.pop_front();
    steps_.back().step = step;
    steps_.back().times = times;
  }
  const std::int64_t every_ns = std::chrono::nanoseconds(options_.sample_interval).count();
  if (times.end_ns - last_sample_ns_ >= every_ns) sample(step, times.end_ns, device_bytes);
}

void RankRecorder::sample(std::int64_t step, std::int64_t now_ns, std::uint64_t device_bytes) {
  constexpr double kMib = 1 << 20;
  const ResourceUsage use = ResourceUsage::now();
  const auto x = static_cast<double>(step);
  record_.cpu_cores.add(
      x, (use.cpu_seconds - last_sample_.cpu_seconds) * 1e9 / static_cast<double>(now_ns - last_sample_ns_));
  record_.memory_mib.add(x, static_cast<double>(use.resident_bytes) / kMib);
  if (device_bytes > 0) record_.device_mib.add(x, static_cast<double>(device_bytes) / kMib);
  last_sample_ = use;
  last_sample_ns_ = now_ns;
}

RankRecord RankRecorder::record() const {
  RankRecord record = record_;
  record.steps.assign(steps_.begin(), steps_.end());
  record.operations = operations_since(steps_.empty() ? 0 : steps_.front().times.begin_ns);
  record.peak_bytes = ResourceUsage::now().peak_resident_bytes;
  record.monotonic_ns = base::monotonic_ns();
  record.unix_ns =
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
  return record;
}

}  // namespace lockstep::training::inline report

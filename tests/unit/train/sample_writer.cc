// unit_train_sample_writer KIND FOLDER: writes the files that external_readers.py reads.
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/train/loggers/logger_collection.h"
#include "lockstep/train/report/curve_logger.h"
#include "lockstep/train/report/report.h"
#include "lockstep/train/report/trace.h"

namespace lockstep::training {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Writes the values of a run that fails after ten steps, and of a run that resumes at step 6.
void log_values(const std::string& folder) {
  const LoggerOptions options{.directory = folder, .json_lines = true};
  {
    LoggerCollection failed(0, options);
    for (int step = 0; step < 10; ++step) failed.log_scalars(step, {{"train/loss", 10.0 - step}});
  }
  LoggerOptions resumed = options;
  resumed.first_step = 6;
  LoggerCollection loggers(0, resumed);
  for (int step = 6; step < 10; ++step)
    loggers.log_scalars(step, {{"train/loss", 100.0 + step}, {"learning rate", 0.1}});
  loggers.log_scalars(10, {{"odd", kNan}, {"a,\"b\"", kInfinity}, {"bad \xff utf-8", -kInfinity}});
  loggers.log_scalars(11, {{"odd", 0.1}, {"tiny", 1e-310}});
  loggers.log_text(3, "sample", "first line\nsecond: \xe2\x9c\x93 \xff <b>");
  std::vector<float> numbers;
  for (int i = 0; i < 1000; ++i) numbers.push_back(static_cast<float>(i) / 100 - 5);
  numbers.push_back(static_cast<float>(kNan));
  loggers.log_histogram(4, "fc.weight", make_histogram(numbers));
  loggers.log_histogram(5, "fc.weight", make_histogram(std::vector<double>{2, 2, 2}));
  Image image{.width = 3, .height = 2, .channels = 3};
  for (int i = 0; i < 18; ++i) image.bytes.push_back(static_cast<std::uint8_t>(10 * i));
  loggers.log_image(7, "input", image);
  loggers.log_image(8, "grey", {.width = 2, .height = 1, .channels = 1, .bytes = {0, 255}});
}

/// Returns the record of one of four ranks on two hosts whose clocks differ by an hour: 3000 steps of 20 to 30 ms, the
/// last 32 of them with all times.
RankRecord synthetic_rank_record(int rank) {
  constexpr std::int64_t kMs = 1'000'000, kHour = 3'600'000 * kMs;
  RankRecord record;
  record.rank = rank;
  record.host = record.clock = rank < 2 ? "alpha" : "beta.example.org";
  std::int64_t now = kHour + (rank < 2 ? 0 : kHour);
  for (int step = 0; step < 3000; ++step) {
    const std::int64_t data = (step % 100 == 7 ? 9 : 1) * kMs + rank * kMs / 10, forward = 6 * kMs + step % 7 * kMs / 5,
                       backward = 12 * kMs + step % 5 * kMs / 4, optimizer = 2 * kMs;
    StepTimes times{.begin_ns = now, .end_ns = 0, .spans = {}};
    for (const auto& [phase, ns] : {std::pair(Phase::kData, data), std::pair(Phase::kForward, forward),
                                    std::pair(Phase::kBackward, backward), std::pair(Phase::kOptimizer, optimizer)}) {
      times.spans.push_back({phase, now, now + ns});
      now += ns + kMs / 20;
    }
    // All ranks end a step at the same time.
    now = times.end_ns = times.begin_ns + 9 * kMs + kMs / 2 + forward + backward + optimizer;
    const auto seconds = times.phase_seconds();
    ++record.num_steps;
    record.seconds += times.seconds();
    record.step_ms.add(step, times.seconds() * 1e3);
    for (std::size_t i = 0; i < kNumPhases; ++i) {
      record.phase_seconds[i] += seconds[i];
      record.phase_ms[i].add(step, seconds[i] * 1e3);
    }
    record.cpu_cores.add(step, 3.2 + 0.4 * std::sin(step / 200.0 + rank) + rank * 0.2);
    record.memory_mib.add(step, 900 + 60 * rank + step / 50.0);
    if (step < 2968) continue;
    record.steps.push_back({step, times});
    for (int part = 0; part < 3; ++part)
      record.operations.push_back({"world/ddp." + std::to_string(part), static_cast<std::uint64_t>(step),
                                   part < 2 ? "gradients" : "all_reduce", part < 2 ? "net" : "loss", 1U << (20 + part),
                                   times.spans[2].begin_ns + part * 3 * kMs,
                                   times.spans[2].begin_ns + 5 * kMs + part * 3 * kMs - rank % 2 * kMs / 4});
  }
  record.peak_bytes = std::uint64_t{1100 + 60 * static_cast<unsigned>(rank)} << 20;
  return record;
}

Report synthetic_report() {
  CurveLogger logged;
  for (int step = 0; step < 30'000; ++step) {
    const LogTimestamp at{step, 0};
    logged.log_scalars(
        at, {{"train/loss", 2.4 * std::exp(-step / 6000.0) + 0.25 + 0.08 * std::sin(step * 1.7) * std::cos(step * 0.3)},
             {"learning rate",
              step < 1500 ? step * 1e-3 / 1500 : 5e-4 * (1 + std::cos((step - 1500) * 3.14159265 / 28500))},
             {"throughput/samples_per_second", 31000 + 900 * std::sin(step / 90.0)},
             {"gradient norm",
              step >= 21'000 && step < 21'040 ? kNan : std::exp(3 * std::sin(step / 5000.0) + 0.2 * std::sin(step))}});
    if (step % 3000 == 2999)
      logged.log_scalars(at, {{"validation/loss", 2.4 * std::exp(-step / 6000.0) + 0.31},
                              {"validation/accuracy", 1 - 0.9 * std::exp(-step / 7000.0)}});
  }
  logged.log_scalars({29'999, 0},
                     {{"<img src=x onerror=alert(1)>", 1},
                      {"a name of a number that is much longer than any column of a page of this width could ever "
                       "be/without_a_place_to_break_it_in_two_because_it_is_one_word_only",
                       2}});
  Report report{.title = "char-gpt <script>document.title='broken'</script>",
                .facts = {},
                .curves = logged.curves(),
                .ranks = {}};
  report.facts = {{"ranks", "4 on 2 hosts"},
                  {"steps", "30000 in 3 epochs"},
                  {"began", "2026-11-23 13:53:46"},
                  {"took", "12:31"},
                  {"command", "lockstep run -n 4 ./train --lr 1e-3 --data \"a & b\""}};
  for (int rank = 0; rank < 4; ++rank) report.ranks.push_back(synthetic_rank_record(rank));
  return report;
}

}  // namespace
}  // namespace lockstep::training

int main(int argc, char** argv) {
  if (argc != 3) return 64;
  if (std::strcmp(argv[1], "values") == 0)
    lockstep::training::log_values(argv[2]);
  else if (std::strcmp(argv[1], "report") == 0)
    lockstep::training::write_report(std::string(argv[2]) + "/report.html", lockstep::training::synthetic_report());
  else if (std::strcmp(argv[1], "trace") == 0)
    lockstep::training::write_trace(std::string(argv[2]) + "/trace.json", lockstep::training::synthetic_report().ranks);
  else
    return 64;
  return 0;
}

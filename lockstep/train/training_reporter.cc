#include "lockstep/train/training_reporter.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/monotonic.h"
#include "lockstep/comm/gpu/cuda.h"
#include "lockstep/train/loggers/csv_logger.h"
#include "lockstep/train/metrics/gather_records.h"
#include "lockstep/train/report/report.h"
#include "lockstep/train/report/trace.h"

namespace lockstep::training {
namespace {

constexpr std::int64_t kRecordIntervalNs = 50'000'000;
constexpr std::int64_t kUsageIntervalNs = 1'000'000'000;
// Among the metrics of the program, names of usage begin with a character that its own do not have.
constexpr char kUsageMark = '\x1f';
const std::string kSent = "throughput/sent_mb_per_second", kGpuBusy = "gpu/busy", kGpuMemory = "gpu/memory_mib";

/// Whether CommTime sees the waits for other ranks: on a GPU, streams wait.
bool measures_comm(const comm::Group& world) { return world.size() > 1 && world.device().is_cpu(); }

LoggerOptions logger_options(const TrainerOptions& options, const ReporterOptions& plan) {
  const bool files = !plan.folder.empty();
  LoggerOptions logs{.directory = plan.folder,
                     .csv = files && options.csv,
                     .json_lines = files && options.json_lines,
                     .tensorboard = files && options.tensorboard,
                     .on_disk_error = options.on_disk_error};
  if (plan.is_resumed) logs.first_step = plan.step + 1;  // the values of a step are logged before its checkpoint
  return logs;
}

/// Prefixes names with the group: "loss" -> "train/loss", "val_loss" -> "val/loss". Names with a / are not changed.
NamedValues with_prefix(const NamedValues& values, const std::string& group) {
  NamedValues named;
  for (const auto& [name, value] : values) {
    const std::string own = name.starts_with("val_") && group == "val/" ? name.substr(4) : name;
    named.emplace_back(own.find('/') != std::string::npos ? own : group + own, value);
  }
  return named;
}

/// The curves of the report: losses first, and without the phases of a step, which have their own chart.
CurveLogger::Curves report_curves(const CurveLogger::Curves& curves) {
  CurveLogger::Curves chosen;
  for (const auto& curve : curves)
    if (!curve.first.starts_with("time/") || curve.first == "time/comm") chosen.push_back(curve);
  std::stable_partition(chosen.begin(), chosen.end(), [](const auto& curve) { return curve.first.ends_with("/loss"); });
  return chosen;
}

}  // namespace

TrainingReporter::TrainingReporter(comm::Group world, const TrainerOptions& options, const ReporterOptions& plan)
    : world_(std::move(world)),
      options_(options),
      plan_(plan),
      throughput_({.window = 100,
                   .flops_per_step = options.flops_per_step,
                   .peak_flops = options.peak_flops,
                   .comm = measures_comm(world_)}),
      loggers_(world_.rank(), logger_options(options, plan)) {
  const bool files = !plan_.folder.empty();
  if (files && options_.report) {
    auto curves = std::make_unique<CurveLogger>();
    if (plan_.is_resumed && options_.csv && world_.rank() == 0)
      read_csv(plan_.folder + "/metrics.csv", plan_.step + 1,
               [&](const LogTimestamp& at, const NamedValues& values) { curves->log_scalars(at, values); });
    curves_ = curves.get();
    loggers_.add(std::move(curves));
  }
  if (files && (options_.report || options_.trace))
    recorder_.emplace(RankRecorderOptions{.rank = world_.rank(), .trace = options_.trace});
  if (options_.progress_bar && plan_.steps_per_epoch > 0)
    progress_.emplace(world_.rank(), ProgressBarOptions{.num_epochs = plan_.num_epochs,
                                                        .steps_per_epoch = plan_.steps_per_epoch,
                                                        .steps_done = plan_.step,
                                                        .comm = measures_comm(world_)});
  if (!world_.device().is_cpu()) gpu_monitor_.emplace(comm::gpu::describe_gpu(world_.device().index()).uuid);
  read_usage();
}

std::uint64_t TrainingReporter::device_bytes() const {
  if (world_.device().is_cpu()) return 0;
  auto* const allocator = c10::getDeviceAllocator(world_.device().type());
  if (!allocator || !allocator->initialized()) return 0;
  const auto stats = allocator->getDeviceStats(world_.device().index());
  return static_cast<std::uint64_t>(
      stats.allocated_bytes[static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE)].current);
}

void TrainingReporter::record_step(std::int64_t step, std::int64_t samples, const NamedValues& progress_values) {
  FinishedStep& finished = pending_steps_[num_pending_steps_++];
  finished.step = step;
  finished.samples = samples;
  finished.times = timer_.end_step();  // reuses the memory of an earlier step
  // Records short steps in groups: a step's kernels evict other data from the caches, so accessing these structures in
  // every step would read them from memory each time.
  if (num_pending_steps_ == pending_steps_.size() ||
      finished.times.end_ns - pending_steps_.front().times.begin_ns >= kRecordIntervalNs)
    record_pending_steps();
  if (progress_) progress_->step(progress_values);
}

void TrainingReporter::record_pending_steps() {
  const std::uint64_t bytes = recorder_ ? device_bytes() : 0;
  for (std::size_t i = 0; i < num_pending_steps_; ++i) {
    if (!measures_comm(world_)) pending_steps_[i].times.comm_ns = 0;
    throughput_.add(pending_steps_[i].times, pending_steps_[i].samples * world_.size());
    if (recorder_) recorder_->add(pending_steps_[i].step, pending_steps_[i].times, bytes);
  }
  num_pending_steps_ = 0;
}

void TrainingReporter::read_usage() {
  const std::int64_t now_ns = base::monotonic_ns(), passed_ns = now_ns - usage_.read_ns;
  if (usage_.num_reads > 1 && passed_ns < kUsageIntervalNs) return;
  if (world_.num_nodes() > 1) {
    const std::uint64_t before = std::exchange(usage_.sent_bytes, sent_bytes_.total());
    usage_.megabytes_per_second =
        static_cast<double>(usage_.sent_bytes - before) * 1e3 / static_cast<double>(passed_ns);
  }
  if (gpu_monitor_) usage_.gpu = gpu_monitor_->read();
  usage_.read_ns = now_ns;
  ++usage_.num_reads;
}

void TrainingReporter::add_usage(Metrics& metrics) {
  read_usage();
  if (world_.num_nodes() > 1) metrics.add(kUsageMark + kSent, usage_.megabytes_per_second);
  if (!usage_.gpu) return;
  metrics.add(kUsageMark + kGpuBusy, usage_.gpu->busy);
  metrics.add(kUsageMark + kGpuMemory, static_cast<double>(usage_.gpu->memory_bytes) / (1 << 20));
}

void TrainingReporter::take_usage(NamedValues& means) {
  mean_usage_.clear();
  std::erase_if(means, [&](const auto& named) {
    if (!named.first.starts_with(kUsageMark)) return false;
    const std::string name = named.first.substr(1);
    // Of a host, whose ranks have each added theirs.
    const double ranks = name == kSent ? static_cast<double>(world_.size()) / world_.num_nodes() : 1;
    mean_usage_.emplace_back(name, named.second * ranks);
    return true;
  });
}

void TrainingReporter::log_metrics(std::int64_t step, const NamedValues& means, const NamedValues& learning_rates) {
  if (!loggers_.is_active()) return;
  record_pending_steps();
  NamedValues all = with_prefix(means, "train/");
  for (const auto& [name, value] : learning_rates) all.emplace_back("train/" + name, value);
  for (auto& value : throughput_.values()) all.push_back(std::move(value));
  all.insert(all.end(), mean_usage_.begin(), mean_usage_.end());
  loggers_.log_scalars(step, all);
}

void TrainingReporter::log_validation(std::int64_t step, const NamedValues& means) {
  if (loggers_.is_active() && !means.empty()) loggers_.log_scalars(step, with_prefix(means, "val/"));
}

void TrainingReporter::finish(std::int64_t steps, const std::string& stop_reason) {
  if (!recorder_) return loggers_.flush();
  record_pending_steps();
  const std::vector<RankRecord> records = gather_records(world_, recorder_->record());
  if (world_.rank() != 0) return;
  try {
    if (options_.report) {
      Report report{.title = plan_.folder.substr(plan_.folder.rfind('/') + 1)};
      report.facts = {{"ranks", std::to_string(world_.size())},
                      {"hosts", std::to_string(world_.num_nodes())},
                      {"transport", std::string(world_.transport())},
                      {"precision", options_.precision},
                      {"steps", std::to_string(steps)},
                      {"ended", stop_reason}};
      if (plan_.step > 0) report.facts.emplace_back("resumed from step", std::to_string(plan_.step));
      report.curves = report_curves(curves_->curves());
      report.ranks = records;
      write_report(plan_.folder + "/report.html", report);
    }
    if (options_.trace) write_trace(plan_.folder + "/trace.json", records);
  } catch (const base::SystemError& error) {
    if (options_.on_disk_error == DiskErrorPolicy::kStop) throw;
    base::log_warning(error.what());
  }
  loggers_.flush();
}

}  // namespace lockstep::training

// The program of docs/how-to/monitoring.md: a loop with a progress bar, loggers, throughput, a report and a trace.
//   lockstep run -n 2 docs_monitoring
#include <lockstep/lockstep.h>
#include <lockstep/train/loggers/logger_collection.h>
#include <lockstep/train/metrics/gather_records.h>
#include <lockstep/train/metrics/tensor_conversion.h>
#include <lockstep/train/report/curve_logger.h>
#include <lockstep/train/report/progress_bar.h>
#include <lockstep/train/report/report.h>
#include <lockstep/train/report/throughput.h>
#include <lockstep/train/report/trace.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>

#include "docs/programs/small_training.h"

namespace {

std::string content(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// docs: begin own
/// Writes each value as a line to stderr, for another program.
class StderrLogger final : public lockstep::training::Logger {
 public:
  void log_scalars(const lockstep::training::LogTimestamp& at, const lockstep::training::NamedValues& values) override {
    for (const auto& [name, value] : values)
      std::fprintf(stderr, "%lld %s %g\n", static_cast<long long>(at.step), name.c_str(), value);
  }
  void flush() override { std::fflush(stderr); }
};
// docs: end own

// docs: begin step
torch::Tensor train_step(torch::nn::Sequential& net, torch::optim::Optimizer& optimizer, const lockstep::Group& world,
                         int step, lockstep::training::PhaseTimer& timer) {
  using lockstep::training::Phase;
  torch::Tensor data, loss;
  {
    const auto scope = timer.enter(Phase::kData);
    data = batch(world, step);
  }
  {
    const auto scope = timer.enter(Phase::kForward);
    loss = net->forward(data).pow(2).mean();
  }
  {
    const auto scope = timer.enter(Phase::kBackward);
    optimizer.zero_grad();
    loss.backward();
  }
  const auto scope = timer.enter(Phase::kOptimizer);
  optimizer.step();
  return loss.detach();
}
// docs: end step

void check_files(const std::string& folder, const std::string& transport) {
  const std::string table = content(folder + "/metrics.csv"), page = content(folder + "/report.html"),
                    trace = content(folder + "/trace.json");
  expect(std::count(table.begin(), table.end(), '\n') == 11, "a line for every tenth step");
  expect(table.starts_with("step,time,train/loss,"), "the columns of the table");
  expect(page.find(">rank 1<") != std::string::npos, "the timeline has rank 1");
  expect(page.find("<title>gradients") != std::string::npos, "the timeline has gradient reductions");
  expect(trace.find("\"name\":\"backward\"") != std::string::npos, "the trace has phases");
  expect((trace.find("\"name\":\"bucket ") != std::string::npos) == (transport == "tcp"),
         "the trace has buckets if the transport uses them");
  expect(std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator()) == 4,
         "four files");
}

void resume_from_step_60(const lockstep::Group& world, const std::string& folder) {
  namespace training = lockstep::training;
  // docs: begin resume
  training::LoggerCollection again(world.rank(), {.directory = folder, .first_step = 60});
  // docs: end resume
  again.log_scalars(60, {{"train/loss", 1.0}});
  again.flush();
  const std::string table = content(folder + "/metrics.csv");
  expect(world.rank() != 0 || std::count(table.begin(), table.end(), '\n') == 8, "lines from step 60 on are removed");
  again.add(std::make_unique<StderrLogger>());
}

}  // namespace

int train_and_monitor(int, char**) {
  lockstep::Group world = lockstep::init();
  const std::string folder =
      std::filesystem::temp_directory_path() / ("lockstep-monitoring-" + std::to_string(::getpid()));
  auto net = make_net();
  lockstep::DistributedDataParallel ddp(net, world);
  torch::optim::SGD optimizer(net->parameters(), 0.05);

  // docs: begin loop
  namespace training = lockstep::training;
  training::LoggerCollection loggers(world.rank(), {.directory = folder});
  auto curves = std::make_unique<training::CurveLogger>();  // for the report
  const training::CurveLogger& logged = *curves;
  loggers.add(std::move(curves));
  training::ProgressBar progress(world.rank(),
                                 {.steps_per_epoch = 100, .samples_per_step = 16 * world.size(), .comm = true});
  training::Throughput throughput({.window = 50, .comm = true});
  training::RankRecorder recorder({.rank = world.rank(), .trace = true});
  training::PhaseTimer timer;

  for (int step = 0; step < 100; ++step) {
    const torch::Tensor loss = train_step(net, optimizer, world, step, timer);
    const training::StepTimes& times = timer.end_step();
    throughput.add(times, 16 * world.size());
    recorder.add(step, times);
    if (step % 10 == 0 && loggers.is_active()) {
      training::NamedValues values = throughput.values();
      values.insert(values.begin(), {"train/loss", loss.item<double>()});
      loggers.log_scalars(step, values);
    }
    progress.step([&] { return training::NamedValues{{"loss", loss.item<double>()}}; });
  }
  // docs: end loop

  // docs: begin tensors
  if (loggers.is_active())
    for (const auto& parameter : net->named_parameters())
      loggers.log_histogram(100, parameter.key(), training::make_histogram(parameter.value()));
  loggers.log_text(100, "notes", "one layer, tanh");
  loggers.log_image(100, "weights", training::make_image(net->parameters()[0] + 0.5));
  // docs: end tensors

  // docs: begin report
  const auto records = training::gather_records(world, recorder.record());  // collective
  if (world.rank() == 0) {
    training::write_report(folder + "/report.html", {.title = "small net",
                                                     .facts = {{"ranks", std::to_string(world.size())}},
                                                     .curves = logged.curves(),
                                                     .ranks = records});
    training::write_trace(folder + "/trace.json", records);
  }
  // docs: end report
  loggers.flush();
  if (world.rank() == 0) check_files(folder, std::string(world.transport()));

  resume_from_step_60(world, folder);
  std::filesystem::remove_all(folder);
  return 0;
}

int main(int argc, char** argv) { return lockstep::main(argc, argv, train_and_monitor); }

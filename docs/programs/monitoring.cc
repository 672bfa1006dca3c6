// The program of docs/18-watching-a-training.md: a loop with a progress line, loggers, throughput, a report and a
// trace.
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
/// Tells another program of each number, a line each.
class StderrLogger final : public lockstep::train::Logger {
 public:
  void log_scalars(const lockstep::train::LogTimestamp& at, const lockstep::train::NamedValues& values) override {
    for (const auto& [name, value] : values)
      std::fprintf(stderr, "%lld %s %g\n", static_cast<long long>(at.step), name.c_str(), value);
  }
  void text(const lockstep::train::LogTimestamp&, const std::string&, const std::string&) override {}
  void histogram(const lockstep::train::LogTimestamp&, const std::string&, const lockstep::train::Histogram&) override {
  }
  void image(const lockstep::train::LogTimestamp&, const std::string&, const lockstep::train::Image&) override {}
  void flush() override { std::fflush(stderr); }
};
// docs: end own

// docs: begin step
torch::Tensor train_step(torch::nn::Sequential& net, torch::optim::Optimizer& optimizer, const lockstep::Group& world,
                         int step, lockstep::train::PhaseTimer& timer) {
  using lockstep::train::Phase;
  torch::Tensor data, loss;
  {
    const auto in = timer.in(Phase::kData);
    data = batch(world, step);
  }
  {
    const auto in = timer.in(Phase::kForward);
    loss = net->forward(data).pow(2).mean();
  }
  {
    const auto in = timer.in(Phase::kBackward);
    optimizer.zero_grad();
    loss.backward();
  }
  const auto in = timer.in(Phase::kOptimizer);
  optimizer.step();
  return loss.detach();
}
// docs: end step

void check_files(const std::string& folder, const std::string& transport) {
  const std::string table = content(folder + "/metrics.csv"), page = content(folder + "/report.html"),
                    trace = content(folder + "/trace.json");
  expect(std::count(table.begin(), table.end(), '\n') == 11, "a line for each tenth step");
  expect(table.starts_with("step,time,train/loss,"), "the table's columns");
  expect(page.find(">rank 1<") != std::string::npos, "the timeline has rank 1");
  expect(page.find("<title>gradients") != std::string::npos, "and the exchange of gradients");
  expect(trace.find("\"name\":\"backward\"") != std::string::npos, "the trace has phases");
  expect((trace.find("\"name\":\"bucket ") != std::string::npos) == (transport == "gloo"),
         "and buckets, where there are some");
  expect(std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator()) == 4,
         "four files");
}

void go_on_from_step_60(const lockstep::Group& world, const std::string& folder) {
  namespace train = lockstep::train;
  // docs: begin resume
  train::LoggerCollection again(world.rank(), {.directory = folder, .first_step = 60});
  // docs: end resume
  again.log_scalars(60, {{"train/loss", 1.0}});
  again.flush();
  const std::string table = content(folder + "/metrics.csv");
  expect(world.rank() != 0 || std::count(table.begin(), table.end(), '\n') == 8, "steps from 60 on are taken back");
  again.add(std::make_unique<StderrLogger>());
}

}  // namespace

int train_and_monitor(int, char**) {
  lockstep::Group world = lockstep::init();
  const std::string folder =
      std::filesystem::temp_directory_path() / ("lockstep-watching-" + std::to_string(::getpid()));
  auto net = make_net();
  lockstep::DistributedDataParallel ddp(net, world);
  torch::optim::SGD optimizer(net->parameters(), 0.05);

  // docs: begin loop
  namespace train = lockstep::train;
  train::LoggerCollection loggers(world.rank(), {.directory = folder});
  auto curves = std::make_unique<train::CurveLogger>();  // for the report
  const train::CurveLogger& logged = *curves;
  loggers.add(std::move(curves));
  train::Progress progress(world.rank(), {.steps_per_epoch = 100, .samples_per_step = 16 * world.size()});
  train::Throughput throughput({.window = 50});
  train::RankRecorder recorder({.rank = world.rank(), .trace = true});
  train::PhaseTimer timer;

  for (int step = 0; step < 100; ++step) {
    const torch::Tensor loss = train_step(net, optimizer, world, step, timer);
    const train::StepTimes& times = timer.end_step();
    throughput.add(times, 16 * world.size());
    recorder.add(step, times);
    if (step % 10 == 0 && loggers.is_active()) {
      train::NamedValues values = throughput.values();
      values.insert(values.begin(), {"train/loss", loss.item<double>()});
      loggers.log_scalars(step, values);
    }
    progress.step([&] { return train::NamedValues{{"loss", loss.item<double>()}}; });
  }
  // docs: end loop

  // docs: begin tensors
  if (loggers.is_active())
    for (const auto& parameter : net->named_parameters())
      loggers.histogram(100, parameter.key(), train::make_histogram(parameter.value()));
  loggers.text(100, "notes", "one layer, tanh");
  loggers.image(100, "weights", train::make_image(net->parameters()[0] + 0.5));
  // docs: end tensors

  // docs: begin report
  const auto records = train::gather_records(world, recorder.record());  // all ranks call it
  if (world.rank() == 0) {
    train::write_report(folder + "/report.html", {.title = "small net",
                                                  .facts = {{"ranks", std::to_string(world.size())}},
                                                  .curves = logged.curves(),
                                                  .ranks = records});
    train::write_trace(folder + "/trace.json", records);
  }
  // docs: end report
  loggers.flush();
  if (world.rank() == 0) check_files(folder, std::string(world.transport()));

  go_on_from_step_60(world, folder);
  std::filesystem::remove_all(folder);
  return 0;
}

int main(int argc, char** argv) { return lockstep::main(argc, argv, train_and_monitor); }

// Tests the files of a training with the Trainer: metrics, report and trace, also of a training that was resumed.
#include <gmock/gmock.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/train/trainer.h"
#include "tests/conformance/train/resumable.h"
#include "tests/support/shared_dir.h"
#include "tests/support/temp_dir.h"

namespace lockstep::tests::trainer_files_test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using namespace lockstep::training;  // NOLINT(google-build-using-namespace): the tested module
using data::Example;

/// Returns the step in each line of a table of metrics.
std::vector<std::int64_t> steps_in(const std::string& table) {
  std::vector<std::int64_t> steps;
  for (std::size_t at = table.find('\n') + 1; at < table.size(); at = table.find('\n', at) + 1)
    steps.push_back(std::stoll(table.substr(at)));
  return steps;
}

TEST(TrainerFiles, MetricsAreWrittenOnceAndReportExists) {
  const SharedDir dir;
  const TrainerOptions options{
      .max_epochs = 2, .folder = dir.path(), .name = "net", .log_every_n_steps = 1, .json_lines = true, .trace = true};
  const RunResult first = run(sgd(), options, 2);
  TrainerOptions again = options;
  again.resume = "auto";
  const RunResult second = run(sgd(), again, -1);
  world().barrier();
  if (world().rank() != 0) return world().barrier();
  const std::string folder = dir.path() + "/net";
  const std::string text = read_file(folder + "/metrics.csv");
  for (const char* column :
       {"train/loss", "train/lr", "val/loss", "val/near", "throughput/steps_per_second", "time/backward"})
    EXPECT_THAT(text.substr(0, text.find('\n')), HasSubstr(column));
  std::vector<std::int64_t> steps = steps_in(text);
  steps.erase(std::unique(steps.begin(), steps.end()), steps.end());
  for (std::int64_t step = 1; step <= second.result.steps; ++step)
    EXPECT_EQ(std::count(steps.begin(), steps.end(), step), 1) << step << " in\n" << text;
  const std::string page = read_file(folder + "/report.html");
  EXPECT_THAT(page, HasSubstr("resumed from step"));
  // The first chart is that of the loss. It has one point per step, including those before the stop.
  const std::string line = page.substr(std::min(page.size(), page.find("<path class=\"line")));
  EXPECT_EQ(std::count(line.begin(), line.begin() + static_cast<std::ptrdiff_t>(line.find("/>")), 'L') + 1,
            second.result.steps);
  EXPECT_TRUE(std::filesystem::exists(folder + "/trace.json"));
  EXPECT_TRUE(std::filesystem::exists(folder + "/metrics.jsonl"));
  world().barrier();
}

TEST(TrainerFiles, MetricsOfRepeatedStepsAreReplaced) {
  struct Failing : NetImpl {
    using NetImpl::NetImpl;
    at::Tensor training_step(Example& batch, StepLog& log) {
      if (fails && log.step == 3) throw std::invalid_argument("no such word");
      return loss(batch);
    }
    bool fails = false;
  };
  const SharedDir dir;
  const auto fit = [&](bool fails) {
    auto net = std::make_shared<Failing>(sgd());
    net->fails = fails;
    TrainerOptions options{.max_epochs = 1,
                           .folder = dir.path(),
                           .name = "net",
                           .save_every_n_steps = 2,
                           .log_every_n_steps = 1,
                           .progress_bar = false,
                           .model_summary = false};
    if (!fails) options.resume = "auto";
    return Trainer(options).fit(net, loader_of());
  };
  EXPECT_THROW(fit(true), StepError);
  world().barrier();
  const std::string table = dir.path() + "/net/metrics.csv";
  EXPECT_THAT(steps_in(read_file(table)), ElementsAre(1, 2, 3));
  world().barrier();
  const FitResult result = fit(false);
  world().barrier();
  std::vector<std::int64_t> expected;
  for (std::int64_t step = 1; step <= result.steps; ++step) expected.push_back(step);
  EXPECT_EQ(steps_in(read_file(table)), expected) << read_file(table);
  world().barrier();
}

TEST(TrainerFiles, TraceContainsLatestStepsOfAllRanks) {
  const SharedDir dir;
  const RunResult ran = run(sgd(), {.max_epochs = 1, .folder = dir.path(), .name = "net", .trace = true}, -1);
  world().barrier();
  const std::string trace = read_file(dir.path() + "/net/trace.json");
  for (std::int64_t step = 1; step <= ran.result.steps; ++step) {
    const std::string name = "\"step " + std::to_string(step) + "\"";
    int count = 0;
    for (std::size_t at = trace.find(name); at != std::string::npos; at = trace.find(name, at + 1)) ++count;
    EXPECT_EQ(count, world().size()) << name;
  }
  world().barrier();
}

}  // namespace
}  // namespace lockstep::tests::trainer_files_test

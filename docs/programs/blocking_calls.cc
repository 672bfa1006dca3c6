// Checks for what each call of the public API waits, and compares the results with the table of
// docs/guide/03-how-a-step-works.md.
//   lockstep run -n 2 docs_blocking_calls docs/guide/03-how-a-step-works.md
// Rank 0 makes each call first. If the table says that the call waits for other ranks, rank 1 sets a signal before it
// makes the call, and rank 0 must find the signal when its call returns. For all other calls, rank 1 waits until rank 0
// has returned.
#include <lockstep/base/env.h>
#include <lockstep/ddp/replicas.h>
#include <lockstep/launch/launch.h>
#include <lockstep/lockstep.h>
#include <lockstep/train/loggers/logger_collection.h>
#include <lockstep/train/metrics/gather_records.h>
#include <lockstep/train/report/progress_bar.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <set>
#include <thread>

namespace {

namespace fs = std::filesystem;
namespace ddp = lockstep::ddp;
using lockstep::Group;
using lockstep::Work;
using namespace std::chrono_literals;

enum class WaitsFor { kRanks, kDevice, kNothing };
constexpr const char* kWaitNames[] = {"other ranks", "own device", "nothing"};
constexpr auto kTimeout = 20s;  // for the other rank
constexpr auto kEarlyReturnWindow =
    30ms;  // the time in which rank 1 notices that rank 0 returns too early; correct calls pass with any value

struct CallRow {
  std::string call;
  WaitsFor waits;
  std::function<void()> here;        // on rank 0
  std::function<void()> there = {};  // on rank 1; empty: the same as on rank 0 if that waits for ranks, else nothing
  std::function<void()> after = {};  // on rank 0, after rank 1 has been released
};

/// Signals between the ranks without Lockstep: files in a folder of this job.
class FileSignals {
 public:
  FileSignals(const std::string& job, bool owner)
      : owner_(owner), folder_(fs::temp_directory_path() / ("lockstep-docs-" + job)) {
    fs::create_directories(folder_);
  }
  ~FileSignals() {
    std::error_code ignored;
    if (owner_) fs::remove_all(folder_, ignored);
  }
  void set(const std::string& name) const { std::ofstream(folder_ / name).put('x'); }
  bool is_set(const std::string& name) const { return fs::exists(folder_ / name); }
  bool wait_for(const std::string& name, std::chrono::milliseconds limit) const {
    for (const auto deadline = lockstep::Deadline::in(limit); !is_set(name); std::this_thread::sleep_for(1ms))
      if (deadline.expired()) return false;
    return true;
  }
  std::string file(const std::string& name) const { return folder_ / name; }

 private:
  bool owner_;
  fs::path folder_;
};

class BlockingCallChecker {
 public:
  BlockingCallChecker(int rank, const FileSignals& signals) : rank_(rank), signals_(signals) {}

  void check(const CallRow& row) {
    const std::string id = std::to_string(checked_.size());
    checked_.emplace(row.call, kWaitNames[static_cast<int>(row.waits)]);
    if (rank_ == 0)
      call_first(row, id);
    else
      call_late(row, id);
  }

  /// Returns whether the table of `page` has exactly the checked rows.
  bool matches_table(const std::string& page) const {
    std::set<std::pair<std::string, std::string>> shown;
    std::ifstream lines(page);
    for (std::string line; std::getline(lines, line);) {
      const std::size_t call = line.find("` | ");
      if (!line.starts_with("| `") || call == std::string::npos) continue;
      shown.emplace(line.substr(3, call - 3), line.substr(call + 4, line.find(" |", call + 4) - call - 4));
    }
    for (const auto& [call, waits] : checked_)
      if (!shown.contains({call, waits})) std::cerr << page << " lacks: " << call << " | " << waits << std::endl;
    for (const auto& [call, waits] : shown)
      if (!checked_.contains({call, waits})) std::cerr << "not checked: " << call << " | " << waits << std::endl;
    return shown == checked_;
  }
  std::size_t count() const { return checked_.size(); }

 private:
  void call_first(const CallRow& row, const std::string& id) const {
    signals_.set(id + ".calling");
    row.here();
    const bool rank_1_called = signals_.is_set(id + ".came");
    signals_.set(id + ".returned");
    if (row.waits == WaitsFor::kRanks && !rank_1_called)
      throw std::runtime_error(row.call + " returned before rank 1 made the call");
    if (row.after) row.after();
  }

  void call_late(const CallRow& row, const std::string& id) const {
    if (!signals_.wait_for(id + ".calling", kTimeout)) throw std::runtime_error(row.call + " was not called on rank 0");
    if (row.waits == WaitsFor::kRanks) {
      signals_.wait_for(id + ".returned", kEarlyReturnWindow);
      signals_.set(id + ".came");
    } else if (!signals_.wait_for(id + ".returned", kTimeout)) {
      throw std::runtime_error(row.call + " does not return on rank 0 without a call on rank 1");
    }
    if (row.there || row.waits == WaitsFor::kRanks) (row.there ? row.there : row.here)();
  }

  int rank_;
  const FileSignals& signals_;
  std::set<std::pair<std::string, std::string>> checked_;
};

at::Tensor part() { return torch::ones({2}); }
at::Tensor whole() { return torch::ones({4}); }

std::vector<CallRow> collective_calls(const Group& world) {
  const bool root = world.rank() == 0;
  const auto only_root = [root](const at::Tensor& tensor) { return root ? tensor : at::Tensor(); };
  std::vector<CallRow> rows = {
      {"Group::all_reduce()", WaitsFor::kRanks, [&world] { world.all_reduce(part()); }},
      {"Group::reduce()", WaitsFor::kRanks, [&world] { world.reduce(part(), 1); }},
      {"Group::broadcast()", WaitsFor::kRanks, [&world] { world.broadcast(part(), 0); }},
      {"Group::all_gather()", WaitsFor::kRanks, [&world] { world.all_gather(whole(), part()); }},
      {"Group::all_gather_unequal()", WaitsFor::kRanks, [&world] { world.all_gather_unequal(part()); }},
      {"Group::reduce_scatter()", WaitsFor::kRanks, [&world] { world.reduce_scatter(part(), whole()); }},
      {"Group::gather()", WaitsFor::kRanks, [&world, only_root] { world.gather(only_root(whole()), part(), 0); }},
      {"Group::scatter()", WaitsFor::kRanks, [&world, only_root] { world.scatter(part(), only_root(whole()), 0); }},
      {"Group::all_to_all()", WaitsFor::kRanks, [&world] { world.all_to_all(whole(), whole()); }},
      {"Group::barrier()", WaitsFor::kRanks, [&world] { world.barrier(); }},
      {"Group::broadcast_bytes()", WaitsFor::kRanks, [&world] { world.broadcast_bytes("text", 0); }},
      {"Group::all_gather_bytes()", WaitsFor::kRanks, [&world] { world.all_gather_bytes("text"); }},
      {"Group::split()", WaitsFor::kRanks, [&world] { world.split(0); }},
      {"Group::send()", WaitsFor::kRanks, [&world] { world.send(part(), 1); }, [&world] { world.recv(part(), 0); }},
      {"Group::recv()", WaitsFor::kRanks, [&world] { world.recv(part(), 1); }, [&world] { world.send(part(), 0); }},
      // bounded: by the operation's own deadline
      {"Work::wait()", WaitsFor::kRanks, [&world] { world.all_reduce_async(part()).wait(); },
       [&world] { world.all_reduce(part()); }},
  };
  return rows;
}

/// Starts the asynchronous form of each operation.
std::vector<Work> start_all(const Group& world, std::vector<at::Tensor>& outputs) {
  const bool root = world.rank() == 0;
  const int peer = 1 - world.rank();
  return {world.all_reduce_async(part()),
          world.reduce_async(part(), 0),
          world.broadcast_async(part(), 0),
          world.all_gather_async(whole(), part()),
          world.all_gather_unequal_async(outputs, part()),
          world.reduce_scatter_async(part(), whole()),
          world.gather_async(root ? whole() : at::Tensor(), part(), 0),
          world.scatter_async(part(), root ? whole() : at::Tensor(), 0),
          world.all_to_all_async(whole(), whole()),
          world.barrier_async(),
          world.send_async(part(), peer),
          world.recv_async(part(), peer)};
}

std::vector<CallRow> non_blocking_calls(const Group& world, std::optional<Group>& sub) {
  const auto works = std::make_shared<std::vector<Work>>();
  const auto outputs = std::make_shared<std::vector<at::Tensor>>();
  const auto start = [&world, works, outputs] { *works = start_all(world, *outputs); };
  const auto finish = [works] {
    for (Work& work : *works) work.wait();  // bounded: the ranks wait for each other, and the DeadlockDetector for all
  };
  const auto both = [](std::string call, const std::function<void()>& run) {
    return CallRow{std::move(call), WaitsFor::kNothing, run, run};
  };
  return {
      {"init() again", WaitsFor::kNothing, [] { lockstep::init(); }},
      {"Group::rank(), size(), device(), name() ...", WaitsFor::kNothing,
       [&world] {
         std::cout << world.name() << " " << world.rank() << "/" << world.size() << " " << world.transport() << " "
                   << world.device() << " " << world.num_nodes() << std::endl;
       }},
      {"Group::..._async()", WaitsFor::kNothing, start, [start, finish] { start(), finish(); }, finish},
      {"Work::done(), error()", WaitsFor::kNothing,
       [&world, works] {
         *works = {world.all_reduce_async(part())};
         if (works->front().done() || works->front().error()) throw std::runtime_error("done without rank 1");
       },
       [&world] { world.all_reduce(part()); }, finish},
      both("Group::step(), steps()", [&world] { world.step(), world.steps(); }),
      both("Group::alive(), busy()",
           [&world] {
             world.alive();
             const auto busy = world.busy("work");
           }),
      both("~Group()", [&sub] { sub.reset(); }),
      {"launch() in a rank", WaitsFor::kNothing, [] { lockstep::launch({}, 0, nullptr); }},
  };
}

/// A model with its optimizers and wrappers.
struct Training {
  torch::nn::Linear net{2, 1};
  torch::optim::SGD optimizer{net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)};
  std::optional<lockstep::DistributedDataParallel> parallel;
  std::optional<lockstep::optim::SGD> fused;
  at::Tensor loss;
  lockstep::SyncBatchNorm norm{nullptr};
  torch::nn::BatchNorm1d plain{2};
  at::Tensor normed;
  lockstep::GradScaler scaler;
};

struct ValidatedModule : torch::nn::Module {
  at::Tensor validation_step(at::Tensor& batch, lockstep::training::StepLog&) { return batch.mean(); }
};

void use_local_objects(Training& t) {
  {
    const lockstep::Autocast autocast;
    const lockstep::amp::DisableAutocast keep;
    t.net->forward(torch::ones({3, 2}));
  }
  lockstep::amp::MasterWeights(t.net->parameters()).copy_values_from_model();
  lockstep::optim::Ema(*t.net).update();
  lockstep::optim::Scheduler(t.optimizer, lockstep::optim::constant()).step();
}

std::vector<CallRow> training_calls(const Group& world, Training& t) {
  const auto forward = [&t] { t.loss = t.net->forward(torch::ones({3, 2})).sum(); };
  const auto backward = [&t] { t.loss.backward(); };
  t.norm = lockstep::SyncBatchNorm(world, torch::nn::BatchNormOptions(2));
  const auto both = [](std::string call, const std::function<void()>& run) {
    return CallRow{std::move(call), WaitsFor::kNothing, run, run};
  };
  return {
      {"DistributedDataParallel()", WaitsFor::kRanks, [&] { t.parallel.emplace(t.net, world); }},
      both("forward()", forward),
      {"backward(), the first", WaitsFor::kRanks, backward},
      both("optimizer.step(), zero_grad()", [&t, forward] { t.optimizer.step(), t.optimizer.zero_grad(), forward(); }),
      {"backward()", WaitsFor::kRanks, backward},
      both("backward() under no_sync()",
           [&t, forward, backward] {
             forward();
             const auto no_sync_guard = t.parallel->no_sync();
             backward();
           }),
      {"SyncBatchNorm, its forward()", WaitsFor::kRanks,
       [&t] { t.normed = t.norm->forward(torch::ones({3, 2}).requires_grad_()).sum(); }},
      {"its backward()", WaitsFor::kRanks, [&t] { t.normed.backward(); }},
      both("its forward() in eval()", [&t] { t.norm->eval(), t.norm->forward(torch::ones({3, 2})); }),
      both("convert_sync_batch_norm()", [&] { lockstep::convert_sync_batch_norm(t.plain, world); }),
      both("DistributedDataParallel::stats(), group()", [&t] { t.parallel->stats(), t.parallel->group(); }),
      {"optim::SGD(ddp), Adam, AdamW, Adagrad, LAMB, LARS", WaitsFor::kRanks,
       [&t] { t.fused.emplace(*t.parallel, lockstep::optim::SGDOptions{.lr = 0.1}); }},
      both("backward() with it", [forward, backward] { forward(), backward(); }),
      {"clip_grad_norm() with it", WaitsFor::kRanks, [&t] { lockstep::clip_grad_norm(*t.fused, 1); }},
      both("clip_grad_value() with it", [&t] { lockstep::clip_grad_value(*t.fused, 1); }),
      {"its step()", WaitsFor::kRanks, [&t] { t.fused->step(); }},
      both("GradScaler::scale()", [&t, forward] { forward(), t.scaler.scale(t.loss).backward(); }),
      {"its unscale_(), step() with it", WaitsFor::kRanks,
       [&t] { t.scaler.unscale_(*t.fused), t.scaler.step(*t.fused); }},
      both("its update()", [&t] { t.scaler.update(); }),
      {"its average_gradients()", WaitsFor::kRanks, [&t] { t.fused->average_gradients(); }},
      {"its change_parameters(), load_state_dict()", WaitsFor::kRanks, [&t] { t.fused->change_parameters([] {}); }},
      both("its zero_grad(), state_dict(), destructor",
           [&t] { t.fused->zero_grad(), t.fused->state_dict(), t.fused.reset(); }),
      {"join()", WaitsFor::kRanks, [&t] { lockstep::join(*t.parallel, [] {}); }},
      both("~DistributedDataParallel()", [&t] { t.parallel.reset(); }),
      {"broadcast_parameters()", WaitsFor::kRanks, [&] { lockstep::broadcast_parameters(*t.net, world); }},
      {"broadcast_optimizer_state()", WaitsFor::kRanks,
       [&] { lockstep::broadcast_optimizer_state(t.optimizer, world); }},
      {"ddp::compare_models()", WaitsFor::kRanks,
       [&] { ddp::compare_models(ddp::named_parameters(*t.net), {}, "", world); }},
      {"ddp::broadcast_tensors()", WaitsFor::kRanks,
       [&] { ddp::broadcast_tensors(ddp::named_parameters(*t.net), world); }},
      both("ddp::hash_tensors()", [&t] { ddp::hash_tensors(ddp::named_parameters(*t.net)); }),
  };
}

std::vector<CallRow> other_calls(const Group& world, Training& t, const std::string& file) {
  const auto walk = [&world] {
    auto loader = lockstep::data::make_loader(6, [](std::size_t) { return part(); }, world, {.batch_size = 1});
    for (auto& batch : loader.epoch(0)) batch.sum();
  };
  return {
      {"data::make_loader(), its epochs and batches", WaitsFor::kNothing, walk, walk},
      {"seed_everything()", WaitsFor::kNothing, [] { lockstep::seed_everything(1); }},
      {"save(), load()", WaitsFor::kNothing, [&t, file] { lockstep::save(t.net, file), lockstep::load(t.net, file); }},
      {"Autocast, DisableAutocast, MasterWeights, Ema, Scheduler", WaitsFor::kNothing, [&t] { use_local_objects(t); }},
      {"FiniteChecker, its check()", WaitsFor::kDevice,
       [&t] { lockstep::amp::FiniteChecker(*t.net).check(t.net->forward(torch::ones({3, 2}))); }},
      {"DataParallel::forward()", WaitsFor::kNothing,
       [&t] {
         lockstep::DataParallel(t.net, lockstep::DataParallelOptions{.devices = {at::kCPU, at::kCPU}})
             .forward(torch::ones({3, 2}));
       }},
      {"Trainer() in a rank", WaitsFor::kNothing, [] { const lockstep::Trainer trainer; }},
      {"its fit(), validate()", WaitsFor::kRanks,
       [&world] {
         lockstep::Trainer trainer;
         trainer.validate(std::make_shared<ValidatedModule>(),
                          lockstep::data::make_loader(4, [](std::size_t) { return part(); }, world, {}));
       }},
      {"training::ProgressBar, its step()", WaitsFor::kNothing,
       [&world] { lockstep::training::ProgressBar(world.rank(), {}).step(); }},
      {"training::LoggerCollection, its calls", WaitsFor::kNothing,
       [&world, file] {
         lockstep::training::LoggerCollection(world.rank(), {.directory = file + ".logs"}).log_scalars(0, {{"x", 1}});
       }},
      {"training::gather_records()", WaitsFor::kRanks,
       [&world] { lockstep::training::gather_records(world, lockstep::training::RankRecorder({}).record()); }},
      {"tensor.item(), tensor.cpu()", WaitsFor::kDevice, [] { part().cpu()[0].item<double>(); }},
      {"torch::cuda::synchronize()", WaitsFor::kDevice,
       [] {
         if (torch::cuda::is_available())
           torch::cuda::synchronize();
         else
           std::cout << "no GPU: torch::cuda::synchronize() was not called" << std::endl;
       }},
  };
}

/// Returns the median time of a barrier: the cost of an operation without data, since a barrier only compares calls.
std::chrono::microseconds measure_barrier(const Group& world) {
  std::vector<std::chrono::microseconds> times;
  for (int i = 0; i < 501; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    world.barrier();
    times.push_back(std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - begin));
  }
  std::nth_element(times.begin(), times.begin() + 250, times.end());
  return times[250];
}

int run(const std::string& page) {
  const lockstep::base::Env& env = lockstep::base::Env::this_process();
  if (env.lockstep_world_size != "2")
    throw lockstep::UsageError("start it with: lockstep run -n 2 docs_blocking_calls PAGE");
  const int rank = *env.lockstep_rank == "0" ? 0 : 1;
  const FileSignals signals(*env.lockstep_job, rank == 0);
  BlockingCallChecker checker(rank, signals);

  std::optional<Group> world;
  checker.check({"init()", WaitsFor::kRanks, [&] { world.emplace(lockstep::init()); }});
  std::optional<Group> sub = world->split(0);
  Training training;
  for (const auto& rows : {collective_calls(*world), non_blocking_calls(*world, sub), training_calls(*world, training),
                           other_calls(*world, training, signals.file("net.safetensors"))})
    for (const CallRow& row : rows) checker.check(row);

  const auto barrier = measure_barrier(*world);
  if (rank == 0) std::cout << checker.count() << " rows hold; a barrier took " << barrier.count() << " us" << std::endl;
  const auto leave = [&world] { world.reset(); };  // must be last
  checker.check({"~Group()", WaitsFor::kNothing, leave, [&] { leave(), signals.set("bye"); },
                 [&] { signals.wait_for("bye", kTimeout); }});
  return rank != 0 || checker.matches_table(page) ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 2) throw lockstep::UsageError("one argument required: the page whose table is compared");
  return run(argv[1]);
} catch (const std::exception& error) {
  std::cerr << "blocking_calls: " << error.what() << std::endl;
  return 1;
}

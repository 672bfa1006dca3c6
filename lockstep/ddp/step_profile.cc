#include "lockstep/ddp/step_profile.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "lockstep/base/env.h"
#include "lockstep/base/monotonic.h"
#include "lockstep/base/telemetry/rank_page.h"

namespace lockstep::ddp {
namespace {

// Peers may still need this process for the end of the last reduction.
constexpr auto kBeforeExit = std::chrono::milliseconds(500);

constexpr double kMostSteps = 1000;

struct DeviceOrder {
  bool operator()(at::Device a, at::Device b) const {
    return a.type() != b.type() ? a.type() < b.type() : a.index() < b.index();
  }
};

/// Whoever reads the file finds all of it. Several ranks may write one.
void write_file(const std::string& path, const std::string& text) {
  const std::string unfinished = path + "." + std::to_string(::getpid());
  std::ofstream(unfinished) << text;
  std::rename(unfinished.c_str(), path.c_str());
}

std::unique_ptr<c10::Event> record_event(at::Device device) {
  auto event = std::make_unique<c10::Event>(device.type(), c10::EventFlag::BACKEND_DEFAULT);  // with its time
  event->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  return event;
}

}  // namespace

StepProfile* StepProfile::this_process() {
  // Never destroyed: it holds tensors.
  static StepProfile* const profile = [] {
    auto request = base::profile_request();
    if (!request) return static_cast<StepProfile*>(nullptr);
    auto* const made = new StepProfile(request->steps, std::move(request->folder));
    std::atexit([] {
      StepProfile& recorded = *this_process();
      const std::lock_guard lock(recorded.mutex_);
      if (recorded.ends_ns_.size() > kWarmUpSteps + 1) recorded.write();
    });
    return made;
  }();
  return profile;
}

std::size_t StepProfile::add_model(const std::vector<at::Tensor>& parameters) {
  const std::lock_guard lock(mutex_);
  Model& model = models_.emplace_back(Model{.parameters = parameters});
  for (const at::Tensor& parameter : parameters) {
    const std::int64_t rows = parameter.dim() > 1 ? parameter.size(0) : 1;
    model.gradients.push_back({.bytes = static_cast<std::int64_t>(parameter.nbytes()),
                               .rows = rows,
                               .columns = rows > 0 ? parameter.numel() / rows : 0,
                               .is_float32 = parameter.scalar_type() == at::kFloat});
  }
  return models_.size() - 1;
}

void StepProfile::on_gradient(std::size_t model, std::size_t index) {
  const std::lock_guard lock(mutex_);
  const at::Device device = models_[model].parameters[index].device();
  models_[model].ready.push_back({index, base::monotonic_ns(), device.is_cpu() ? nullptr : record_event(device)});
}

void StepProfile::on_backward_end(std::size_t model_index) {
  const std::lock_guard lock(mutex_);
  Model& model = models_[model_index];
  std::map<at::Device, std::unique_ptr<c10::Event>, DeviceOrder> ends;
  for (const Ready& ready : model.ready) {
    const at::Device device = model.parameters[ready.index].device();
    if (ready.event && !ends[device]) ends[device] = record_event(device);
  }
  for (const auto& [device, end] : ends) end->synchronize();
  const std::int64_t now = base::monotonic_ns();
  for (const Ready& ready : model.ready) {
    if (!is_warm()) break;
    Gradient& gradient = model.gradients[ready.index];
    const auto end = ends.find(model.parameters[ready.index].device());
    gradient.lead_s +=
        ready.event ? ready.event->elapsedTime(*end->second) * 1e-3 : static_cast<double>(now - ready.ns) * 1e-9;
    ++gradient.count;
  }
  model.passes += is_warm() && !model.ready.empty();
  model.ready.clear();
}

void StepProfile::on_backward_error(std::size_t model) {
  const std::lock_guard lock(mutex_);
  models_[model].ready.clear();
}

void StepProfile::on_step_end(std::size_t model) {
  const std::lock_guard lock(mutex_);
  if (model != counted_) {
    if (++models_[model].passes_since_end < kOtherPasses) return;
    counted_ = model;  // on all ranks alike
    ends_ns_.clear();
    for (Model& one : models_) one.passes = 0, one.passes_since_end = 0;
  }
  for (Model& one : models_) one.passes_since_end = 0;
  ends_ns_.push_back(base::monotonic_ns());
  if (ends_ns_.size() == 1) write_file(folder_ + "/begun", "");
  if (!has_agreed_) agree_on_steps();
  if (!has_agreed_ || static_cast<int>(ends_ns_.size()) < 1 + kWarmUpSteps + steps_) return;
  write();
  std::this_thread::sleep_for(kBeforeExit);
  base::telemetry::RankPage::this_process().has_left.store(1);
  _exit(0);
}

void StepProfile::agree_on_steps() {
  const auto recorded = static_cast<int>(ends_ns_.size()) - 1 - kWarmUpSteps;
  const int rank = base::telemetry::RankPage::this_process().rank;
  const std::string file = folder_ + "/steps";
  if (rank == 0 && recorded == 1) {
    const double step_s = static_cast<double>(ends_ns_.back() - ends_ns_.front()) * 1e-9 / (kWarmUpSteps + 1);
    steps_ = static_cast<int>(std::max<double>(steps_, std::min(kLeastS / step_s, kMostSteps)));
    write_file(file, std::to_string(steps_));
    has_agreed_ = true;
  } else if (rank != 0 && recorded > 1) {  // rank 0 has written the file before this rank could end this step
    std::ifstream in(file);
    has_agreed_ = static_cast<bool>(in >> steps_);
  }
}

void StepProfile::write() {
  nlohmann::json steps = nlohmann::json::array(), models = nlohmann::json::array();
  for (std::size_t i = kWarmUpSteps + 1; i < ends_ns_.size(); ++i)
    steps.push_back(static_cast<double>(ends_ns_[i] - ends_ns_[i - 1]) * 1e-9);
  for (const Model& model : models_) {
    nlohmann::json gradients = nlohmann::json::array();
    for (const Gradient& gradient : model.gradients)
      gradients.push_back({{"bytes", gradient.bytes},
                           {"rows", gradient.rows},
                           {"columns", gradient.columns},
                           {"is_float32", gradient.is_float32},
                           {"count", gradient.count},
                           {"lead_s", gradient.lead_s / std::max(1, gradient.count)}});
    if (model.passes > 0)
      models.push_back({{"passes_per_step", static_cast<double>(model.passes) / static_cast<double>(steps.size())},
                        {"gradients", std::move(gradients)}});
  }
  const base::telemetry::RankPage& page = base::telemetry::RankPage::this_process();
  const nlohmann::json profile = {
      {"world_size", page.world_size}, {"steps_s", std::move(steps)}, {"models", std::move(models)}};
  write_file(folder_ + "/" + std::to_string(page.rank) + ".json", profile.dump());
}

}  // namespace lockstep::ddp

// What `lockstep plan` learns from a program that it runs: the time of a step, and when each gradient is ready.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace lockstep::ddp {

/// Records the steps of this process's models. After kWarmUpSteps and the steps that LOCKSTEP_PROFILE asks for, of the
/// first model, or more if these take less than kLeastS, it writes the file FOLDER/RANK.json, which
/// launch/predict/host_profile.h reads, and ends the process; if the program ends before that, it writes the file
/// then. Every rank makes as many steps as rank 0, which writes their number to FOLDER/steps, so all of them end
/// together. If another model has made kOtherPasses steps since the first one's last, the steps of that one count from
/// then on: the first was replaced. Thread-safe.
class StepProfile {
 public:
  static constexpr int kWarmUpSteps = 5;
  static constexpr double kLeastS = 3;
  static constexpr int kOtherPasses = 50;

  /// Null unless LOCKSTEP_PROFILE is set: "STEPS:FOLDER".
  static StepProfile* this_process();

  /// Returns the number of a model with these parameters, for the calls below.
  std::size_t add_model(const std::vector<at::Tensor>& parameters);
  /// The gradient of parameter `index` has been computed, in a backward() that ends a step of the model.
  void on_gradient(std::size_t model, std::size_t index);
  /// That backward() has computed all gradients.
  void on_backward_end(std::size_t model);
  /// That backward() has failed.
  void on_backward_error(std::size_t model);
  /// Its gradients are those of all ranks, or will be when the optimizer reads them. May end the process.
  void on_step_end(std::size_t model);

 private:
  /// A gradient of the backward() that runs: when it was ready, by the clock, or by an event on its device.
  struct Ready {
    std::size_t index;
    std::int64_t ns;
    std::unique_ptr<c10::Event> event;
  };
  struct Gradient {
    std::int64_t bytes = 0, rows = 0, columns = 0;
    bool is_float32 = false;
    double lead_s = 0;  ///< sum of the times from then until the end of backward()
    int count = 0;
  };
  struct Model {
    std::vector<at::Tensor> parameters;
    std::vector<Gradient> gradients;
    std::vector<Ready> ready;
    int passes = 0;            ///< after the warm-up
    int passes_since_end = 0;  ///< since the last step of the model that counts
  };

  StepProfile(int steps, std::string folder) : steps_(steps), folder_(std::move(folder)) {}
  void agree_on_steps();
  bool is_warm() const { return ends_ns_.size() > kWarmUpSteps; }
  void write();

  int steps_;  // until has_agreed_, the least number
  const std::string folder_;
  std::mutex mutex_;         // guards the members below
  std::size_t counted_ = 0;  // the model whose steps count
  bool has_agreed_ = false;
  std::deque<Model> models_;
  std::vector<std::int64_t> ends_ns_;  // of the steps of that model
};

}  // namespace lockstep::ddp

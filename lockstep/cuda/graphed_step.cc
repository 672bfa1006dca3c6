// Warm-up, comparison, capture and replay of a step.
#include "lockstep/cuda/graphed_step.h"

#include <ATen/autocast_mode.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <optional>
#include <sstream>
#include <string>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/comm/interface/captured_step.h"
#include "lockstep/cuda/capture.h"
#include "lockstep/cuda/op_trace.h"

namespace lockstep::cuda {
namespace {

using base::UsageError;
using comm::CapturedStep;
using Tensors = GraphedStep::Tensors;

constexpr const char* kRemedy =
    ". Move what the host does, decides or counts before or after the step (docs/how-to/cuda-graphs.md)";

void check_range(const char* option, int value, int high) {
  if (value < 1 || value > high)
    throw UsageError("GraphedStepOptions." + std::string(option) + " is " + std::to_string(value) + "; expected 1 to " +
                     std::to_string(high));
}

std::string shape_key(const Tensors& inputs) {
  std::ostringstream key;
  for (const at::Tensor& input : inputs) key << input.scalar_type() << input.sizes() << input.strides();
  return key.str();
}

/// Orders all work submitted to `first` so far before all later work on `then`.
void order_streams(const at::Stream& first, const at::Stream& then) {
  c10::Event event(first.device_type());
  event.record(first);
  event.block(then);
}

}  // namespace

class GraphedStep::Impl {
 public:
  Impl(at::Device device, Body body, const GraphedStepOptions& options)
      : device_(device), body_(std::move(body)), options_(options) {
    check_range("warmup", options.warmup, 1000);
    check_range("max_graphs", options.max_graphs, 1024);
    if (!device.is_cpu() && !device.is_cuda())
      throw UsageError("GraphedStep: the device is " + device.str() + "; expected cpu or cuda");
    if (device.is_cpu() || !options.enabled) return;
    const c10::impl::VirtualGuardImpl gpus(device.type());
    if (!device.has_index()) device_ = gpus.getDevice();
    capture_stream_ = gpus.getStreamFromGlobalPool(device_);
  }

  Tensors step(const Tensors& inputs) {
    if (!capture_stream_) return run_eagerly(inputs);
    check_inputs(inputs);
    GraphVariant* variant = find_or_add_variant(inputs);
    if (!variant) return run_eagerly(inputs);
    if (variant->replay) {
      const at::NoGradGuard no_grad;
      for (std::size_t i = 0; i < inputs.size(); ++i) variant->inputs[i].copy_(inputs[i], /*non_blocking=*/true);
    } else if (variant->runs < options_.warmup) {
      return run_warmup(*variant, inputs);
    } else {
      capture_graph(*variant, inputs);
    }
    for (const auto& work : variant->host_work) work();
    variant->replay();
    ++stats_.replayed;
    return variant->outputs;
  }

  GraphedStepStats stats_;

 private:
  /// The state for one set of input shapes.
  struct GraphVariant {
    std::string key;
    int runs = 0;
    OpTrace calls;  // of the last run
    Tensors inputs, outputs;
    CapturedStep::HostWork host_work;  // before each replay
    std::function<void()> replay;      // empty before the capture
  };

  at::Stream current() const { return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_); }

  void check_inputs(const Tensors& inputs) const {
    for (std::size_t i = 0; i < inputs.size(); ++i)
      if (!inputs[i].defined() || inputs[i].device() != device_ || inputs[i].layout() != at::kStrided)
        throw UsageError("GraphedStep: input " + std::to_string(i) + " is " +
                         (inputs[i].defined() ? "on " + inputs[i].device().str() : "undefined") +
                         "; expected a dense tensor on " + device_.str() +
                         " (LoaderOptions.device moves batches there)");
    if (at::autocast::is_autocast_enabled(device_.type()) && at::autocast::is_autocast_cache_enabled())
      throw UsageError(
          "GraphedStep: called inside an Autocast, whose cached casts every replay would use again; expected an "
          "Autocast inside the body");
  }

  /// Null if there are max_graphs variants already.
  GraphVariant* find_or_add_variant(const Tensors& inputs) {
    const std::string key = shape_key(inputs);
    for (GraphVariant& variant : variants_)
      if (variant.key == key) return &variant;
    if (variants_.size() < static_cast<std::size_t>(options_.max_graphs)) {
      variants_.push_back({.key = key});
      return &variants_.back();
    }
    if (!std::exchange(warned_, true))
      base::log_warning("GraphedStep: the inputs have more than " + std::to_string(options_.max_graphs) +
                        " different shapes (max_graphs); steps with further shapes, such as " + key +
                        ", run without a graph");
    return nullptr;
  }

  Tensors run_eagerly(const Tensors& inputs) {
    ++stats_.eager;
    return body_(inputs);
  }

  Tensors run_warmup(GraphVariant& variant, const Tensors& inputs) {
    Tensors outputs;
    const at::Stream outer = current();
    order_streams(outer, *capture_stream_);
    {
      const c10::StreamGuard guard(*capture_stream_);
      const CapturedStep running(/*capturing=*/false);
      const auto run = [&] { outputs = run_eagerly(inputs); };
      if (variant.runs + 1 < options_.warmup)
        run();
      else
        variant.calls = trace_ops(run);
    }
    order_streams(*capture_stream_, outer);
    for (const at::Tensor& input : inputs) input.record_stream(*capture_stream_);
    for (const at::Tensor& output : outputs)
      if (output.defined() && output.device() == device_) output.record_stream(outer);
    ++variant.runs;
    return outputs;
  }

  void capture_graph(GraphVariant& variant, const Tensors& inputs) {
    if (variant.calls.cpu_tensor) throw_not_capturable(*variant.calls.cpu_tensor + " has a tensor on the CPU");
    const at::Stream outer = current();
    Tensors static_inputs, outputs;
    for (const at::Tensor& input : inputs) static_inputs.push_back(input.detach().clone());
    order_streams(outer, *capture_stream_);
    std::function<void()> replay;
    CapturedStep::HostWork host_work;
    OpTrace calls;
    try {
      const c10::StreamGuard guard(*capture_stream_);
      CapturedStep running(/*capturing=*/true);
      replay = capture([&] { calls = trace_ops([&] { outputs = body_(static_inputs); }); });
      host_work = running.take_host_work();
    } catch (const c10::Error& error) {
      const std::string text = error.what_without_backtrace();
      if (text.find("captur") == std::string::npos) throw;
      throw_not_capturable("an operation waits for the GPU or uses another stream: " + text.substr(0, text.find('\n')));
    }
    if (const auto differs = find_difference(variant.calls, calls))
      throw_not_capturable(*differs + ", but a graph replays only one of them");
    order_streams(*capture_stream_, outer);
    variant.inputs = std::move(static_inputs);
    variant.outputs = std::move(outputs);
    variant.calls = {};
    variant.host_work = std::move(host_work);
    variant.replay = std::move(replay);
    ++stats_.captured;
  }

  [[noreturn]] static void throw_not_capturable(const std::string& reason) {
    throw UsageError("GraphedStep: the step cannot be captured as a graph: " + reason + kRemedy);
  }

  at::Device device_;
  const Body body_;
  const GraphedStepOptions options_;
  std::optional<at::Stream> capture_stream_;  // for captures; empty: all steps run eagerly
  std::vector<GraphVariant> variants_;
  bool warned_ = false;
};

GraphedStep::GraphedStep(at::Device device, Body body, const GraphedStepOptions& options)
    : impl_(std::make_unique<Impl>(device, std::move(body), options)) {}
GraphedStep::~GraphedStep() = default;
GraphedStep::GraphedStep(GraphedStep&&) noexcept = default;

GraphedStep::Tensors GraphedStep::operator()(const Tensors& inputs) { return impl_->step(inputs); }
const GraphedStepStats& GraphedStep::stats() const { return impl_->stats_; }

}  // namespace lockstep::cuda

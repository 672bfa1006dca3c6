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
#include "lockstep/comm/channel/forbid_collectives.h"
#include "lockstep/cuda/op_trace.h"
#include "lockstep/cuda/capture.h"

namespace lockstep::cuda {
namespace {

using base::UsageError;
using Tensors = GraphedStep::Tensors;

constexpr const char* kInstead = "; what the host does, decides or counts belongs before or after the step (docs/16)";

void require(const char* option, int value, int high) {
  if (value < 1 || value > high)
    throw UsageError("GraphedStepOptions." + std::string(option) + " is " + std::to_string(value) +
                     "; allowed is 1 to " + std::to_string(high));
}

std::string key_of(const Tensors& inputs) {
  std::ostringstream key;
  for (const at::Tensor& input : inputs) key << input.scalar_type() << input.sizes() << input.strides();
  return key.str();
}

/// What is on `first` so far comes before what will be on `then`.
void order(const at::Stream& first, const at::Stream& then) {
  c10::Event event(first.device_type());
  event.record(first);
  event.block(then);
}

}  // namespace

class GraphedStep::Impl {
 public:
  Impl(at::Device device, Body body, const GraphedStepOptions& options)
      : device_(device), body_(std::move(body)), options_(options) {
    require("warmup", options.warmup, 1000);
    require("max_graphs", options.max_graphs, 1024);
    if (!device.is_cpu() && !device.is_cuda())
      throw UsageError("GraphedStep: the device is " + device.str() + "; allowed are cpu and cuda");
    if (device.is_cpu() || !options.enabled) return;
    const c10::impl::VirtualGuardImpl gpus(device.type());
    if (!device.has_index()) device_ = gpus.getDevice();
    side_ = gpus.getStreamFromGlobalPool(device_);
  }

  Tensors step(const Tensors& inputs) {
    if (!side_) return eager(inputs);
    expect_fit(inputs);
    Way* way = way_for(inputs);
    if (!way) return eager(inputs);
    if (way->graph) {
      const at::NoGradGuard no_grad;
      for (std::size_t i = 0; i < inputs.size(); ++i) way->inputs[i].copy_(inputs[i], /*non_blocking=*/true);
    } else if (way->runs < options_.warmup) {
      return warm_up(*way, inputs);
    } else {
      make_graph(*way, inputs);
    }
    way->graph->replay();
    ++stats_.replayed;
    return way->outputs;
  }

  GraphedStepStats stats_;

 private:
  /// For inputs of the same shapes.
  struct Way {
    std::string key;
    int runs = 0;
    CallList calls;  // of the last run
    Tensors inputs, outputs;
    std::unique_ptr<Graph> graph;
  };

  at::Stream current() const { return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_); }

  void expect_fit(const Tensors& inputs) const {
    for (std::size_t i = 0; i < inputs.size(); ++i)
      if (!inputs[i].defined() || inputs[i].device() != device_ || inputs[i].layout() != at::kStrided)
        throw UsageError("GraphedStep: input " + std::to_string(i) + " is " +
                         (inputs[i].defined() ? "on " + inputs[i].device().str() : "undefined") +
                         "; allowed are dense tensors on " + device_.str() +
                         " (LoaderOptions.device brings batches there)");
    if (at::autocast::is_autocast_enabled(device_.type()) && at::autocast::is_autocast_cache_enabled())
      throw UsageError(
          "GraphedStep: it is called inside an Autocast, whose casts of weights would be those of now in every replay; "
          "allowed is an Autocast inside the body");
  }

  /// Null when there are too many.
  Way* way_for(const Tensors& inputs) {
    const std::string key = key_of(inputs);
    for (Way& way : ways_)
      if (way.key == key) return &way;
    if (ways_.size() < static_cast<std::size_t>(options_.max_graphs)) {
      ways_.push_back({.key = key});
      return &ways_.back();
    }
    if (!std::exchange(warned_, true))
      base::log_warning("GraphedStep: inputs of more than " + std::to_string(options_.max_graphs) +
                        " different shapes (max_graphs); those of further ones, such as " + key + ", take no graph");
    return nullptr;
  }

  Tensors eager(const Tensors& inputs) {
    ++stats_.eager;
    return body_(inputs);
  }

  Tensors warm_up(Way& way, const Tensors& inputs) {
    Tensors outputs;
    const at::Stream outer = current();
    order(outer, *side_);
    {
      const c10::StreamGuard guard(*side_);
      const comm::NoHostPart part("a step that is to be a CUDA graph");
      const auto run = [&] { outputs = eager(inputs); };
      if (way.runs + 1 < options_.warmup)
        run();
      else
        way.calls = calls_of(run);
    }
    order(*side_, outer);
    for (const at::Tensor& input : inputs) input.record_stream(*side_);
    for (const at::Tensor& output : outputs)
      if (output.defined() && output.device() == device_) output.record_stream(outer);
    ++way.runs;
    return outputs;
  }

  void make_graph(Way& way, const Tensors& inputs) {
    if (way.calls.cpu_tensor) refuse(*way.calls.cpu_tensor + " has a tensor on the CPU");
    const at::Stream outer = current();
    Tensors own, outputs;
    for (const at::Tensor& input : inputs) own.push_back(input.detach().clone());
    order(outer, *side_);
    std::unique_ptr<Graph> graph;
    CallList calls;
    try {
      const c10::StreamGuard guard(*side_);
      const comm::NoHostPart part("a step that is to be a CUDA graph");
      graph = capture([&] { calls = calls_of([&] { outputs = body_(own); }); });
    } catch (const c10::Error& error) {
      const std::string text = error.what_without_backtrace();
      if (text.find("captur") == std::string::npos) throw;
      refuse("an operation waits for the GPU: " + text.substr(0, text.find('\n')));
    }
    if (const auto differs = difference(way.calls, calls)) refuse(*differs + ", and a graph has one of them for ever");
    order(*side_, outer);
    way.inputs = std::move(own);
    way.outputs = std::move(outputs);
    way.calls = {};
    way.graph = std::move(graph);
    ++stats_.captured;
  }

  [[noreturn]] static void refuse(const std::string& reason) {
    throw UsageError("GraphedStep: the step cannot be a graph: " + reason + kInstead);
  }

  at::Device device_;
  const Body body_;
  const GraphedStepOptions options_;
  std::optional<at::Stream> side_;  // where steps are captured; empty: none ever is
  std::vector<Way> ways_;
  bool warned_ = false;
};

GraphedStep::GraphedStep(at::Device device, Body body, const GraphedStepOptions& options)
    : impl_(std::make_unique<Impl>(device, std::move(body), options)) {}
GraphedStep::~GraphedStep() = default;
GraphedStep::GraphedStep(GraphedStep&&) noexcept = default;

GraphedStep::Tensors GraphedStep::operator()(const Tensors& inputs) { return impl_->step(inputs); }
const GraphedStepStats& GraphedStep::stats() const { return impl_->stats_; }

}  // namespace lockstep::cuda

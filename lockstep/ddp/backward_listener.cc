#include "lockstep/ddp/backward_listener.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <mutex>
#include <vector>

namespace lockstep::ddp {
namespace {

using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::variable_list;

std::mutex listeners_mutex;  // guards listeners
std::vector<BackwardListener*> listeners;

std::vector<BackwardListener*> current_listeners() {
  const std::lock_guard lock(listeners_mutex);
  return listeners;
}

class WatchingEngine final : public Engine {
 public:
  explicit WatchingEngine(Engine& inner) : inner_(inner) {}

  variable_list execute(const edge_list& roots, const variable_list& inputs, bool keep_graph, bool create_graph,
                        bool accumulate_grad, const edge_list& outputs) override {
    const auto pass_on = [&] {
      return inner_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
    };
    if (!accumulate_grad) return pass_on();
    const auto told = current_listeners();
    // Inside a node's function, on whatever thread of the engine, there is a current graph task.
    if (torch::autograd::get_current_graph_task_id() != -1) {
      for (BackwardListener* listener : told) listener->backward_nested();
      return pass_on();
    }
    for (BackwardListener* listener : told) listener->backward_begun();
    try {
      variable_list result = pass_on();
      for (BackwardListener* listener : told) listener->backward_ended();
      return result;
    } catch (const std::exception& error) {
      for (BackwardListener* listener : told) listener->backward_failed(error.what());
      throw;
    }
  }

  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<torch::autograd::GraphTask>& task, decltype(torch::autograd::Edge::function) root,
      torch::autograd::InputBuffer&& input) override {
    return inner_.execute_with_graph_task(task, std::move(root), std::move(input));
  }
  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return inner_.make_anomaly_metadata();
  }
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return inner_.get_default_saved_variable_hooks();
  }

 private:
  Engine& inner_;
};

WatchingEngine* watching_engine = nullptr;

void install() {
  static const bool installed = [] {
    // Never destroyed: engines outlive static destructors, whose tensors may still run backward.
    watching_engine = new WatchingEngine(Engine::get_default_engine());
    torch::autograd::set_default_engine_stub([]() -> Engine& { return *watching_engine; });
    return true;
  }();
  (void)installed;
}

}  // namespace

void listen(BackwardListener* listener) {
  install();
  const std::lock_guard lock(listeners_mutex);
  listeners.push_back(listener);
}

void unlisten(BackwardListener* listener) {
  const std::lock_guard lock(listeners_mutex);
  std::erase(listeners, listener);
}

}  // namespace lockstep::ddp

// An autograd engine that notifies listeners and forwards to the default engine.
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

class NotifyingEngine final : public Engine {
 public:
  explicit NotifyingEngine(Engine& inner) : inner_(inner) {}

  variable_list execute(const edge_list& roots, const variable_list& inputs, bool keep_graph, bool create_graph,
                        bool accumulate_grad, const edge_list& outputs) override {
    const auto execute_inner = [&] {
      return inner_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
    };
    if (!accumulate_grad) return execute_inner();
    const auto notified = current_listeners();
    // A current graph task exists only inside a node's function, on any thread of the engine: this call is nested.
    if (torch::autograd::get_current_graph_task_id() != -1) {
      for (BackwardListener* listener : notified) listener->on_nested_backward();
      return execute_inner();
    }
    for (BackwardListener* listener : notified) listener->on_backward_begin();
    try {
      variable_list result = execute_inner();
      for (BackwardListener* listener : notified) listener->on_backward_end();
      return result;
    } catch (const std::exception& error) {
      for (BackwardListener* listener : notified) listener->on_backward_error(error.what());
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

NotifyingEngine* notifying_engine = nullptr;

void install_notifying_engine() {
  static const bool installed = [] {
    // Never destroyed: objects with static storage duration may still call backward() in their destructors.
    notifying_engine = new NotifyingEngine(Engine::get_default_engine());
    torch::autograd::set_default_engine_stub([]() -> Engine& { return *notifying_engine; });
    return true;
  }();
  (void)installed;
}

}  // namespace

void add_backward_listener(BackwardListener* listener) {
  install_notifying_engine();
  const std::lock_guard lock(listeners_mutex);
  listeners.push_back(listener);
}

void remove_backward_listener(BackwardListener* listener) {
  const std::lock_guard lock(listeners_mutex);
  std::erase(listeners, listener);
}

}  // namespace lockstep::ddp

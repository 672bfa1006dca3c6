// An autograd engine that tells models about their backward() calls and forwards to the default engine.
#include "lockstep/ddp/backward.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <memory>
#include <unordered_set>
#include <utility>

#if defined(__SANITIZE_THREAD__)
extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);
#endif

namespace lockstep::ddp {
namespace {

using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::Node;
using torch::autograd::variable_list;

/// What a thread did before released(address) happens before what a thread does after a later acquired(address).
inline void released([[maybe_unused]] void* address) noexcept {
#if defined(__SANITIZE_THREAD__)
  __tsan_release(address);
#endif
}
inline void acquired([[maybe_unused]] void* address) noexcept {
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(address);
#endif
}

/// A participant and the thread whose backward() calls it checks.
struct Registration {
  BackwardParticipant* participant;
  std::thread::id thread;
};
std::mutex registrations_mutex;  // guards registrations
std::vector<Registration> registrations;

std::vector<BackwardParticipant*> participants_of_this_thread() {
  const std::lock_guard lock(registrations_mutex);
  std::vector<BackwardParticipant*> found;
  for (const Registration& registration : registrations)
    if (registration.thread == std::this_thread::get_id()) found.push_back(registration.participant);
  return found;
}

char hook_order;  // its address stands for the order of HookScope

/// Carries a Backward to the threads on which autograd runs it. Autograd copies the debug information of the thread
/// that calls backward() to them, and to backward() calls inside.
struct BackwardInfo final : c10::DebugInfoBase {
  explicit BackwardInfo(Backward& the_backward) : backward(the_backward) {}
  Backward& backward;
};
const auto kInfoKind = c10::DebugInfoKind::PRODUCER_INFO;  // not used by libtorch itself

std::string text_of(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception of a type that does not derive from std::exception";
  }
}

/// The nodes of a graph that accumulate gradients in leaves.
std::vector<Node*> leaves_of(const edge_list& roots) {
  std::vector<Node*> leaves, open;
  std::unordered_set<Node*> seen;
  const auto visit = [&](const torch::autograd::Edge& edge) {
    Node* node = edge.function.get();
    if (node && seen.insert(node).second) open.push_back(node);
  };
  for (const auto& root : roots) visit(root);
  while (!open.empty()) {
    Node* node = open.back();
    open.pop_back();
    if (dynamic_cast<torch::autograd::AccumulateGrad*>(node)) leaves.push_back(node);
    for (const auto& edge : node->next_edges()) visit(edge);
  }
  return leaves;
}

/// If a participant throws, those after it are told that this backward() fails.
void report_end(const std::vector<BackwardParticipant*>& joined) {
  for (std::size_t i = 0; i < joined.size(); ++i) {
    try {
      joined[i]->on_backward_end();
    } catch (...) {
      const std::string why = text_of(std::current_exception());
      for (std::size_t k = i + 1; k < joined.size(); ++k) joined[k]->on_backward_error(why, {});
      throw;
    }
  }
}

void report_failure(std::vector<BackwardParticipant*> concerned, const std::string& why,
                    const std::vector<Node*>& leaves) {
  for (BackwardParticipant* participant : participants_of_this_thread())
    if (std::find(concerned.begin(), concerned.end(), participant) == concerned.end()) concerned.push_back(participant);
  for (BackwardParticipant* participant : concerned) participant->on_backward_error(why, leaves);
}

}  // namespace

void watch_backward(const edge_list& roots, const std::function<void()>& run) {
  if (Backward* outer = Backward::current()) {
    outer->is_nested_.store(true, std::memory_order_relaxed);
    return run();
  }
  for (BackwardParticipant* participant : participants_of_this_thread()) participant->check_before_backward();
  Backward backward;
  std::exception_ptr error;
  try {
    const c10::DebugInfoGuard guard(kInfoKind, std::make_shared<BackwardInfo>(backward));
    released(&hook_order);
    run();
  } catch (...) {
    error = std::current_exception();
  }
  acquired(&hook_order);
  if (error) {
    if (const auto of_hook = backward.error()) error = of_hook;  // an engine may have made another one of it
    report_failure(backward.joined(), text_of(error), leaves_of(roots));
    std::rethrow_exception(error);
  }
  report_end(backward.joined());
}

void accumulate_on_current_stream(Node& leaf, const at::Tensor& parameter) {
  const at::Device device = parameter.device();
  if (device.is_cpu()) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  torch::autograd::InputMetadata& metadata = leaf.mutable_input_metadata(0);
  if (metadata.stream() == guard.getStream(device)) return;
  // It takes the current stream when it is constructed, and cannot be assigned.
  std::destroy_at(&metadata);
  std::construct_at(&metadata, parameter);
}

class BackwardEngine final : public Engine {
 public:
  explicit BackwardEngine(Engine& inner) : inner_(inner) {}

  variable_list execute(const edge_list& roots, const variable_list& inputs, bool keep_graph, bool create_graph,
                        bool accumulate_grad, const edge_list& outputs) override {
    variable_list result;
    const auto run = [&] {
      result = inner_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
    };
    accumulate_grad ? watch_backward(roots, run) : run();  // not for torch::autograd::grad
    return result;
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

namespace {

std::atomic<BackwardEngine*> backward_engine{nullptr};  // read by every thread that calls backward()

void install_backward_engine() {
  static const bool installed = [] {
    // Never destroyed: objects with static storage duration may still call backward() in their destructors.
    backward_engine.store(new BackwardEngine(Engine::get_default_engine()), std::memory_order_release);
    torch::autograd::set_default_engine_stub(
        []() -> Engine& { return *backward_engine.load(std::memory_order_acquire); });
    return true;
  }();
  (void)installed;
}

}  // namespace

HookScope::HookScope() noexcept { acquired(&hook_order); }
HookScope::~HookScope() { released(&hook_order); }

Backward* Backward::current() noexcept {
  auto* info = dynamic_cast<BackwardInfo*>(c10::ThreadLocalDebugInfo::get(kInfoKind));
  return info ? &info->backward : nullptr;
}

const std::vector<BackwardParticipant*>& Backward::joined() const {
  const std::lock_guard lock(mutex_);
  return joined_;
}

std::exception_ptr Backward::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

void Backward::record_error() noexcept {
  Backward* const now = current();
  if (!now) return;
  const std::lock_guard lock(now->mutex_);
  if (!now->error_) now->error_ = std::current_exception();
}

void Backward::join(BackwardParticipant& participant) {
  {
    const std::lock_guard lock(mutex_);
    joined_.push_back(&participant);
  }
  const std::lock_guard lock(registrations_mutex);
  for (Registration& registration : registrations)
    if (registration.participant == &participant) registration.thread = thread_;
}

void add_backward_participant(BackwardParticipant* participant) {
  install_backward_engine();
  const std::lock_guard lock(registrations_mutex);
  registrations.push_back({participant, std::this_thread::get_id()});
}

void remove_backward_participant(BackwardParticipant* participant) {
  const std::lock_guard lock(registrations_mutex);
  std::erase_if(registrations, [&](const Registration& known) { return known.participant == participant; });
}

bool belongs_to_this_thread(const BackwardParticipant* participant) {
  const auto own = participants_of_this_thread();
  return std::find(own.begin(), own.end(), participant) != own.end();
}

}  // namespace lockstep::ddp

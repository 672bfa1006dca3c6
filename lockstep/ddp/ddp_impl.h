// The state behind a DistributedDataParallel. Private to ddp/.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/comm/interface/gradient_reducer.h"
#include "lockstep/ddp/backward_listener.h"
#include "lockstep/ddp/buffer_sync.h"
#include "lockstep/ddp/ddp.h"
#include "lockstep/ddp/gradient_source.h"
#include "lockstep/ddp/gradient_fingerprint.h"
#include "lockstep/ddp/host_averager.h"
#include "lockstep/ddp/replicas.h"

namespace lockstep::ddp {

class DistributedDataParallel::Impl final : public BackwardListener, public GradientSource, private comm::Sink {
 public:
  Impl(torch::nn::Module& module, comm::Group group, DdpOptions options);
  ~Impl() override;
  /// Lets go of the module.
  void close();

  void backward_begun() override;
  void backward_nested() override;
  void backward_ended() override;
  void backward_failed(const std::string& why) noexcept override;

  /// Called by autograd when parameter `index` has accumulated its gradient: on the thread that called backward(), or
  /// one of autograd's for a GPU meanwhile.
  void accumulated(std::size_t index);

  void enter_no_sync();
  void leave_no_sync();

  // For join(): an exchange in which this rank only keeps the others company.
  void begin_company(bool divide_by_active);
  bool company_has_come() const { return exchange_->all_have_begun(); }
  /// True while some rank still trains.
  bool end_company();
  void end_join();
  void abandon(const std::string& why) noexcept;
  /// Throws UsageError when these options and join() do not go together.
  void check_join() const;

  void average_hosts();

  // GradientSource
  std::vector<Parameter> parameters() const override;
  comm::Group& sharers() override { return sharers_ ? *sharers_ : peers_; }
  bool attach(comm::PieceSink* updated) override;
  Owners owners() override;
  bool own_gradients() const override;
  std::uint64_t backwards() const override { return backwards_; }
  void update_in_backward(BackwardUpdater* updater) override;
  void require_unchanged() const override;
  void detach() noexcept override;
  void updated() override;
  comm::CommonMemory make_common(std::size_t bytes) override;
  void average() override;
  void give(comm::Use use, std::uint64_t options, comm::PieceSink& sink) override;

  comm::Group& group() { return group_; }
  comm::ExchangeStats stats() const { return exchange_->stats(); }

 private:
  /// A parameter and the autograd node that accumulates its gradient, which a tensor holds weakly.
  struct Watched {
    std::string name;
    at::Tensor tensor;
    std::shared_ptr<void> node;  // keeps the node, and with it the hook, alive
    torch::autograd::Node* raw = nullptr;
    std::uintptr_t hook = 0;
    bool dirty = false;  // accumulated under no_sync() since the last exchange
  };

  void watch(std::size_t index);
  void begin_exchange(comm::StepIdentity step);
  void finish_exchange();
  void close_exchange(const comm::Attendance& attendance, bool ends_step);
  void end_step();
  void give_own(comm::StepIdentity step, comm::PieceSink& sink);
  void give_means(comm::StepIdentity step, comm::PieceSink& sink);
  void require_open() const;
  void begin_update();
  void end_update();
  void refuse_early_update() const;
  /// backward() leaves each rank its own gradients, for an optimizer.
  bool leaves_gradients() const { return updated_ != nullptr && exchange_->pieces() != nullptr; }
  void hand_over(std::size_t index, bool fresh);
  void take(std::size_t index, const at::Tensor& mean) override;
  std::vector<comm::Collective> pack_along();
  void check_replicas();

  comm::Group group_;
  const DdpOptions options_;
  std::unique_ptr<HostSync> host_sync_;  // with host_sync_every
  comm::Group peers_;  // whose gradients are averaged: all, or with host_sync_every those of this host
  std::vector<Watched> parameters_;
  NamedTensors all_tensors_;  // parameters and buffers, for the last word of join()
  BufferSync buffers_;
  std::unique_ptr<comm::Exchange> exchange_;

  std::thread::id caller_;              // of backward()
  std::mutex accumulated_mutex_;        // a model on several devices gets gradients on several threads: one at a time
  bool closed_ = false;                 // the module may be gone
  std::optional<comm::Group> sharers_;  // with an optimizer, when peers_ are on several hosts: those of this host
  std::unique_ptr<comm::Exchange> among_sharers_;  // of the means that exchange_ has brought
  bool divided_ = false;                           // the optimizer's state is divided between owners()
  bool has_optimizer_ = false;                     // of lockstep::optim
  comm::PieceSink* updated_ = nullptr;             // its; null: it has none
  BackwardUpdater* updater_ = nullptr;             // the same optimizer, when it updates in backward()
  bool averaged_ = false;                          // where it leaves gradients: they are means
  std::uint64_t backwards_ = 0;                    // that reached a parameter
  GradientWitness witness_;
  bool left_over_ = false;         // gradients were there before this backward
  bool open_ = false;              // this backward has begun an exchange
  bool deferred_ = false;          // nothing is given to the exchange before the end of this backward
  bool reentrant_ = false;         // the model has been seen to run backward inside backward
  std::vector<std::size_t> born_;  // parameters of this backward, in order, while deferred_
  bool reached_ = false;           // this backward has reached a parameter
  int no_sync_ = 0;
  std::int64_t lost_backwards_ = 0;
  bool accumulating_ = false;
  std::int64_t exchanges_ = 0;
  NamedTensors replicas_;  // what check_replicas() compares
  at::Tensor hashes_;
  at::Tensor all_hashes_;
  bool comparing_ = false;
  bool anyone_joined_ = false;
  bool stop_wanted_ = false;  // by some rank of an exchange
  int last_active_ = 0;
};

}  // namespace lockstep::ddp

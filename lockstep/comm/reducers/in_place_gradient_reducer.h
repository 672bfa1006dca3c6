// The exchange of ranks that reach each other's memory: gradients are reduced where they lie.
#pragma once

#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "lockstep/comm/reducers/reducer_base.h"
#include "lockstep/comm/interface/peer_memory_reducer.h"

namespace lockstep::comm {

/// ready() shows the others where a gradient lies, and reduces this rank's share of what all have shown; finish() the
/// rest. Which parts a rank has travels with what it shows, so that unused ones cost nothing. No gradient is copied but
/// one that the others cannot reach or whose strides are not the parameter's: it is written into memory of the
/// exchange, is counted in passes_in, and rank 0 says so the first time.
class DirectExchange final : public HeadedExchange, public PieceExchange {
 public:
  DirectExchange(std::string name, std::vector<Part> parts, std::unique_ptr<Channel> channel,
                 std::unique_ptr<InPlaceReducer> reducer);
  ~DirectExchange() override;

  void begin(const StepIdentity& step, std::vector<Collective> along) override;
  at::Tensor ready(std::size_t index, const at::Tensor& gradient, bool fresh) override;
  bool is_ready(std::size_t index) const override { return states_[index].ready; }
  Attendance finish(Sink& sink) override;
  ExchangeStats stats() const override;

  PieceExchange* pieces() override { return this; }
  Attendance finish_pieces(PieceSink& sink) override;
  void give_to(PieceSink& sink) override { early_sink_ = &sink; }
  CommonMemory make_common(std::size_t bytes) override { return reducer_->make_common(bytes); }

 private:
  struct State {
    bool ready = false;
    at::Tensor gradient;  // as it came
    at::Tensor mean;      // where the mean will be: what was shown
  };
  bool lies_well(std::size_t index, const at::Tensor& gradient) const;
  void report_copies();
  template <typename Work>
  Attendance end(const Work& work);
  void give_early();
  void reduce_all();
  void give_all(PieceSink& sink);
  void read_missing();
  void deliver(Sink& sink);

  const std::unique_ptr<InPlaceReducer> reducer_;
  std::vector<std::vector<std::int64_t>> strides_;  // in which all ranks show a part
  std::vector<State> states_;
  std::unordered_set<const void*> shown_;  // in this exchange: two parameters may have one gradient
  bool open_ = false;
  PieceSink* early_sink_ = nullptr;  // that gets nothing yet
  bool averaged_ = false;            // what is shown in this exchange, already
  std::vector<std::size_t> order_;   // of the last exchange
  std::vector<std::size_t> copied_;  // in this exchange, because they do not lie well
  bool copies_reported_ = false;
};

}  // namespace lockstep::comm

// The Work objects of the backend for torch.distributed.
#pragma once

#include <ATen/ThreadLocalState.h>

#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "lockstep/comm/work.h"

namespace lockstep::python {

/// A collective operation, which another thread executes. Its future is done with it.
class CollectiveWork final : public c10d::Work {
 public:
  /// `title` and `inputs` are for the profiler; `results` become those of the future.
  CollectiveWork(int rank, c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
                 std::vector<at::Tensor> results);

  /// Calls `operation` with the calling thread's state of torch that create() has found; stores its error.
  void execute(const std::function<void()>& operation) noexcept;

  /// Blocks until the operation has ended. Ctrl-C ends the wait. Throws the operation's error; a c10::Error after
  /// `timeout`.
  bool wait(std::chrono::milliseconds timeout) override;
  std::vector<at::Tensor> result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  const std::vector<at::Tensor> results_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
  const at::ThreadLocalState state_;
};

/// A send or a receive.
class PointToPointWork final : public c10d::Work {
 public:
  /// `title` and `tensor` are those of the profiler's event. `complete` is called once, by the wait() that finds the
  /// operation done. `source` is the rank that the data come from, known by then.
  PointToPointWork(int rank, c10d::OpType type, const char* title, const at::Tensor& tensor, comm::Work work,
                   std::shared_ptr<int> source, std::function<void()> complete)
      : c10d::Work(rank, type, title, std::vector<at::Tensor>{tensor}),
        work_(std::move(work)),
        source_(std::move(source)),
        complete_(std::move(complete)) {}

  bool isCompleted() override { return work_.done(); }
  bool isSuccess() const override { return work_.done() && !work_.error(); }
  std::exception_ptr exception() const override { return work_.error(); }
  int sourceRank() const override { return *source_; }
  bool wait(std::chrono::milliseconds timeout) override;

 private:
  comm::Work work_;
  const std::shared_ptr<int> source_;
  std::function<void()> complete_;
};

/// Several operations that have started.
class JoinedWork final : public c10d::Work {
 public:
  JoinedWork(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works)
      : c10d::Work(rank, c10d::OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override;
  bool isSuccess() const override;
  void synchronize() override;
  /// Waits for one after the other, each at most for `timeout`.
  bool wait(std::chrono::milliseconds timeout) override;

 private:
  const std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace lockstep::python

// Why is this wait long? Ranks that wait tell each other, through the store, in what; two that wait for each other in
// different operations are a DESYNC at once, not a timeout in five minutes.
#pragma once

#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/job/store.h"

namespace lockstep::comm {

/// An operation that a rank waits in.
struct Waiting {
  std::string channel;              ///< the same name on all members
  std::uint64_t seq = 0;            ///< its number there
  std::string label;                ///< "all_reduce(fc.weight)#12"
  std::string text;                 ///< "all_reduce(float32[1024])"
  const std::vector<int>* members;  ///< world ranks that must take part
};

/// One a process and world. The quick path is started(): a number under a lock. Everything else happens only in waits of
/// more than 200 ms and after failures. Any thread.
///
/// Two ranks A and B wait for each other when A is blocked in operation s of channel X, B in operation t of channel Y, B has
/// not started s and A has not started t. Each publishes (operation, counts of started operations, a beat that moves only
/// while it is blocked); a beat that moved between two looks proves that B was blocked while A was, which then can never end.
class Watch {
 public:
  Watch(std::shared_ptr<job::Store> store, int rank, int world_size, std::string host);

  /// This rank has started operation `seq` of `channel`.
  void started(const std::string& channel, std::uint64_t seq);

  /// Remembers what was seen between the looks of one wait.
  struct Looks {
    std::map<int, std::string> beats;
    bool published = false;
  };
  /// Called now and then by a wait that lasts. Throws DesyncError, CommError (kUnevenInput), or the job's first cause when
  /// there is one; returns when the wait may go on.
  void look(const Waiting& waiting, Looks& looks);
  /// The wait has ended.
  void end(Looks& looks) noexcept;

  /// The wait has come to its deadline: a TimeoutError that names who has not come.
  [[noreturn]] void timed_out(const Waiting& waiting);

  /// The wire failed with `text`: finds out why (a peer that died, left, or a first cause) and throws that.
  [[noreturn]] void wire_failed(const Waiting& waiting, const std::string& text);

  /// Publishes `error` as the job's first cause unless there is one.
  void publish(const base::CommError& error) noexcept;

  /// This rank will not end what it started on `channel`; `text` says why.
  void abandon(const std::string& channel, const std::string& text) noexcept;

  /// This rank closes its world in good order.
  void leave() noexcept;

  int rank() const { return rank_; }

 private:
  struct Peer;
  std::string record(const Waiting* waiting);
  void throw_first_cause(const Waiting& waiting);
  void throw_if_abandoned(const Waiting& waiting);
  void check_peer(const Waiting& waiting, int peer, Looks& looks);
  void check_left(const Waiting& waiting, int peer);
  std::string missing(const Waiting& waiting);

  std::shared_ptr<job::Store> store_;
  const int rank_;
  const int world_size_;
  const std::string host_;
  std::mutex mutex_;  // guards started_ and beat_
  std::map<std::string, std::uint64_t> started_;
  std::uint64_t beat_ = 0;
};

}  // namespace lockstep::comm

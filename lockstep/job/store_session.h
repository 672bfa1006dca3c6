// One connection to a StoreServer as bytes in and bytes out, without a socket: who may speak, and what is answered.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/base/deadline.h"
#include "lockstep/job/job_key.h"
#include "lockstep/job/local_store.h"
#include "lockstep/job/store_wire.h"

namespace lockstep::job {

class StoreSession {
 public:
  /// Both outlive it.
  StoreSession(const Credentials& credentials, LocalStore& store) : credentials_(credentials), store_(store) {}

  /// How many bytes receive() takes at most now: what a stranger may send is bounded.
  std::size_t room() const;
  /// Takes what has come, and answers it. Throws SystemError when the system has no random bytes.
  void receive(std::string_view bytes);
  /// A request that waits has its answer, if there is one now.
  void look();

  /// What is to be sent; who has sent some of it takes that away.
  std::string& out() { return out_; }
  /// The other end has proved that it has the job's key.
  bool admitted() const { return state_ == State::kAdmitted; }
  /// Nothing it says is of interest any more: send out(), and close.
  bool over() const { return state_ == State::kOver; }
  /// When look() must be called next at the latest, because of a request that waits.
  base::Deadline wait_until() const { return waiting_ ? wait_until_ : base::Deadline::never(); }
  /// The rank that the other end says it is, once it is admitted; -1: none.
  int rank() const { return rank_; }
  /// Why it was turned away, for whoever watches the server; "" when it was not.
  const std::string& refusal() const { return refusal_; }

 private:
  enum class State { kHello, kProof, kAdmitted, kOver };

  bool step();
  bool take_hello();
  bool take_proof();
  bool take_request();
  void handle(std::string_view frame);
  void challenge(wire::Verdict verdict, const std::string& refusal);
  void turn_away(const std::string& refusal);
  void reply(wire::Status status, std::string_view value);

  const Credentials& credentials_;
  LocalStore& store_;
  State state_ = State::kHello;
  std::string in_, out_;
  std::string refusal_;
  int rank_ = -1;
  Mac proof_{};  // that the client is expected to send
  wire::Seal requests_{JobKey(), wire::kRequests}, replies_{JobKey(), wire::kReplies};
  bool waiting_ = false;
  std::string waits_for_;  // a key
  base::Deadline wait_until_ = base::Deadline::never();
};

}  // namespace lockstep::job

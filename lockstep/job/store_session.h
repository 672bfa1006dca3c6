// One connection to a StoreServer as bytes in and bytes out, without a socket: who may speak, and what is answered.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/base/deadline.h"
#include "lockstep/job/job_key.h"
#include "lockstep/job/local_store.h"
#include "lockstep/job/store_protocol.h"

namespace lockstep::job {

class StoreSession {
 public:
  /// Why a connection was turned away.
  enum class Refusal { kNone, kStranger, kProtocol, kJob, kGeneration, kKey, kFrame };

  /// Credentials and store outlive it. `server` is a random number: a client that comes back to an address must find
  /// the store that it has left there.
  StoreSession(const Credentials& credentials, std::uint64_t server, LocalStore& store)
      : credentials_(credentials), server_(server), store_(store) {}

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
  bool waits() const { return waiting_; }
  base::Deadline wait_until() const { return waiting_ ? wait_until_ : base::Deadline::never(); }
  /// The rank that the other end says it is, once it is admitted; -1: none.
  int rank() const { return rank_; }
  /// Why it was turned away, and who, for people who watch the server.
  Refusal refusal() const { return refusal_; }
  const std::string& refused() const { return refused_; }
  /// It has said who it is: what is missing is its proof.
  bool has_said_hello() const { return state_ != State::kHello; }

 private:
  enum class State { kHello, kProof, kAdmitted, kOver };

  bool step();
  bool take_hello();
  bool take_proof();
  bool take_request();
  void handle(std::string_view frame);
  void challenge(wire::Verdict verdict, Refusal refusal, const std::string& who);
  void turn_away(Refusal refusal, const std::string& who);
  void reply(wire::Status status, std::string_view value);

  const Credentials& credentials_;
  const std::uint64_t server_;
  LocalStore& store_;
  State state_ = State::kHello;
  std::string in_, out_;
  Refusal refusal_ = Refusal::kNone;
  std::string refused_;
  int rank_ = -1;
  Mac proof_{};  // that the client is expected to send
  wire::Seal requests_{JobKey(), wire::kRequests}, replies_{JobKey(), wire::kReplies};
  bool waiting_ = false;
  std::string waits_for_;  // a key
  base::Deadline wait_until_ = base::Deadline::never();
};

}  // namespace lockstep::job

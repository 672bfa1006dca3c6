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
  enum class Refusal { kNone, kStranger, kProtocol, kJob, kGeneration, kKey, kBadFrame };

  /// Credentials and store outlive it. `server` is a random number: a client that comes back to an address must find
  /// the store that it has left there.
  StoreSession(const Credentials& credentials, std::uint64_t server, LocalStore& store)
      : credentials_(credentials), server_(server), store_(store) {}

  /// How many bytes receive() takes at most now: what a stranger may send is bounded.
  std::size_t receive_capacity() const;
  /// Takes what has come, and answers it. Throws SystemError when the system has no random bytes.
  void receive(std::string_view bytes);
  /// A request that waits has its answer, if there is one now.
  void answer_waiting();

  /// What is to be sent; who has sent some of it takes that away.
  std::string& output() { return output_; }
  /// The other end has proved that it has the job's key.
  bool is_authenticated() const { return state_ == State::kAuthenticated; }
  /// Nothing it says is of interest any more: send out(), and close.
  bool is_closed() const { return state_ == State::kClosed; }
  /// When look() must be called next at the latest, because of a request that waits.
  bool waits() const { return is_waiting_; }
  base::Deadline wait_until() const { return is_waiting_ ? wait_until_ : base::Deadline::never(); }
  /// The rank that the other end says it is, once it is admitted; -1: none.
  int rank() const { return rank_; }
  /// Why it was turned away, and who, for people who watch the server.
  Refusal refusal() const { return refusal_; }
  const std::string& refused_peer() const { return refused_peer_; }
  /// It has said who it is: what is missing is its proof.
  bool has_received_hello() const { return state_ != State::kHello; }

 private:
  enum class State { kHello, kProof, kAuthenticated, kClosed };

  bool process_next();
  bool process_hello();
  bool process_proof();
  bool process_request();
  void execute_request(std::string_view frame);
  void send_challenge(store_protocol::HandshakeResult verdict, Refusal refusal, const std::string& who);
  void refuse(Refusal refusal, const std::string& who);
  void reply(store_protocol::ReplyStatus status, std::string_view value);

  const Credentials& credentials_;
  const std::uint64_t server_;
  LocalStore& store_;
  State state_ = State::kHello;
  std::string input_, output_;
  Refusal refusal_ = Refusal::kNone;
  std::string refused_peer_;
  int rank_ = -1;
  Mac proof_{};  // that the client is expected to send
  store_protocol::FrameAuthenticator requests_{JobKey(), store_protocol::kRequestDirection},
      replies_{JobKey(), store_protocol::kReplyDirection};
  bool is_waiting_ = false;
  std::string waiting_key_;  // a key
  base::Deadline wait_until_ = base::Deadline::never();
};

}  // namespace lockstep::job

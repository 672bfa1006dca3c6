// The server's side of one connection to a StoreServer, without a socket: bytes in, bytes out.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "lockstep/base/deadline.h"
#include "lockstep/job/job_key.h"
#include "lockstep/job/local_store.h"
#include "lockstep/job/store_protocol.h"

namespace lockstep::job {

/// Authenticates a client and executes its requests on a LocalStore. Not thread-safe.
class StoreSession {
 public:
  /// Why a connection was rejected.
  enum class Refusal { kNone, kNotLockstep, kProtocol, kJob, kGeneration, kKey, kBadFrame };

  /// `credentials` and `store` must outlive the session. A client that reconnects compares `server`, a random number,
  /// to recognise the same server.
  StoreSession(const Credentials& credentials, std::uint64_t server, LocalStore& store)
      : credentials_(credentials), server_(server), store_(store) {}

  /// Returns the maximum number of bytes that the caller may pass to receive() now: 0 if the session is closed. An
  /// unauthenticated client may have at most kMaxUnauthenticatedBytes of unprocessed input.
  std::size_t receive_capacity() const;
  /// Processes received bytes and appends the replies to output(). Throws SystemError if the kernel returns no random
  /// bytes.
  void receive(std::string_view bytes);
  /// Replies to the waiting request if its key has a value now or its time limit has passed, and then processes the
  /// input that has arrived since.
  void answer_waiting();

  /// Returns the bytes to send. The caller removes the bytes that it has sent.
  std::string& output() { return output_; }
  /// Returns whether the client has proved that it has the job's key.
  bool is_authenticated() const { return state_ == State::kAuthenticated; }
  /// Returns whether the session has ended. If so, the caller must send output() and close the connection.
  bool is_closed() const { return state_ == State::kClosed; }
  /// Returns the time at which the caller must call answer_waiting() at the latest, never() if no request waits for a
  /// value. The caller must also call it after each change of waiting_key(), which is empty if no request waits.
  base::Deadline wait_until() const { return is_waiting_ ? wait_until_ : base::Deadline::never(); }
  std::string_view waiting_key() const { return is_waiting_ ? std::string_view(waiting_key_) : std::string_view(); }
  /// Returns the rank that the client claims to be; it can be trusted once is_authenticated() is true. -1 means that
  /// the client is not a rank.
  int rank() const { return rank_; }
  /// Returns why the connection was rejected, and a description of the client for the log.
  Refusal refusal() const { return refusal_; }
  const std::string& refused_peer() const { return refused_peer_; }
  bool has_received_hello() const { return state_ != State::kHello; }

 private:
  enum class State { kHello, kProof, kAuthenticated, kClosed };

  bool process_next();
  bool process_hello();
  bool process_proof();
  bool process_request();
  void execute_request(std::string_view frame);
  void send_challenge(store_protocol::HandshakeResult result, Refusal refusal, const std::string& peer);
  void refuse(Refusal refusal, const std::string& peer);
  void reply(store_protocol::ReplyStatus status, std::string_view value);

  const Credentials& credentials_;
  const std::uint64_t server_;
  LocalStore& store_;
  State state_ = State::kHello;
  std::string input_, output_;
  Refusal refusal_ = Refusal::kNone;
  std::string refused_peer_;
  int rank_ = -1;
  Mac proof_{};  // the proof that the client is expected to send
  store_protocol::FrameAuthenticator requests_{JobKey(), store_protocol::kRequestDirection},
      replies_{JobKey(), store_protocol::kReplyDirection};
  bool is_waiting_ = false;
  std::string waiting_key_;
  base::Deadline wait_until_ = base::Deadline::never();
};

}  // namespace lockstep::job

#include "lockstep/comm/tcp/mesh.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <iterator>
#include <list>
#include <optional>

#include "lockstep/base/byte_codec.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/base/net/socket.h"
#include "lockstep/base/parse.h"

namespace lockstep::comm::tcp {
namespace {

using base::Deadline;
using base::Fd;
using job::Mac;

constexpr std::string_view kMagic = "LOCKMESH";
constexpr std::size_t kHelloBytes = kMagic.size() + 4 + 1 + sizeof(Mac);
constexpr std::size_t kChallengeBytes = 2 * sizeof(Mac);
constexpr std::size_t kProofBytes = sizeof(Mac);
constexpr std::size_t kMaxStrangers = 64;  // connections beside those of the ranks
constexpr std::uint64_t kOwnFiles = 512;   // descriptors that the program may still open
constexpr std::chrono::seconds kUnauthenticatedTime{2};
constexpr std::chrono::seconds kConnectAttempt{1};
constexpr std::chrono::milliseconds kRetryPause{20};

/// What a rank writes to the store.
struct Listening {
  std::string number;  // random
  base::net::Address address;
};

/// An attempt to connect to another rank. While `fd` is empty it waits for `until` to try again.
struct Outgoing {
  int peer;
  std::uint8_t purpose;
  Fd fd;
  bool is_connected = false;
  bool has_proved = false;  // and waits for the admission
  Deadline until = Deadline::in(std::chrono::seconds(0));
  std::string hello;
  std::string input;
};

/// A connection from a process that may be a rank.
struct Incoming {
  Fd fd;
  Deadline until;
  std::string input;
  std::optional<Mac> proof;  // that the other end must send; set once its hello has arrived
  std::size_t peer = 0;
  std::uint8_t purpose = 0;
};

/// Receives what is missing of `size` bytes. Returns whether they are complete; throws SystemError if the connection
/// ended.
bool receive_up_to(int fd, std::string& input, std::size_t size) {
  char bytes[kChallengeBytes];
  static_assert(sizeof bytes >= kHelloBytes && sizeof bytes >= kProofBytes);
  const ssize_t received = ::recv(fd, bytes, size - input.size(), 0);
  if (received > 0) input.append(bytes, static_cast<std::size_t>(received));
  if (received == 0 || (received < 0 && errno != EAGAIN && errno != EINTR))
    throw base::SystemError("recv", received == 0 ? ECONNRESET : errno, base::Cause::kPeerUnreachable);
  return input.size() == size;
}

class Mesh {
 public:
  explicit Mesh(const TcpOptions& options)
      : options_(options),
        deadline_(Deadline::in(options.timeout)),
        number_(job::mac_bytes(job::random_nonce())),
        sockets_(options.members.size()) {}

  std::vector<PeerSockets> connect() {
    listener_ = base::net::listen_on({own_address(), 0});
    raise_descriptor_limit();
    const std::string address = base::net::to_string(base::net::local_address(listener_.get()));
    options_.store->set(std::to_string(options_.rank), number_ + address, deadline_);
    for (int peer = 0; peer < options_.rank; ++peer) find_peer(peer);
    while (std::optional<std::size_t> missing = find_missing()) {
      if (deadline_.expired()) throw_not_connected(*missing);
      poll_once();
    }
    for (PeerSockets& peer : sockets_)
      for (const Fd& fd : peer)
        if (fd) base::net::allow_pauses(fd.get());
    return std::move(sockets_);
  }

 private:
  std::size_t max_incoming() const { return kMaxStrangers + kNumPurposes * sockets_.size(); }

  void raise_descriptor_limit() const {
    std::error_code unknown;
    const std::filesystem::directory_iterator first("/proc/self/fd", unknown), end;
    const auto open_now = static_cast<std::uint64_t>(std::distance(first, end));
    const std::uint64_t needed = open_now + kNumPurposes * sockets_.size() + max_incoming();
    try {
      base::raise_fd_limit(needed + kOwnFiles);
    } catch (const base::SystemError&) {
      base::raise_fd_limit(needed);
    }
  }

  std::string own_address() const {
    if (options_.interface.empty()) return options_.address;
    std::string address = base::net::address_of_interface(options_.interface);
    if (address.empty())
      throw base::UsageError("LOCKSTEP_INTERFACE is " + base::quoted(options_.interface, 80) +
                                 "; expected an interface that has an address",
                             "set it to a network interface of this host that has an address (ip addr lists them)");
    return address;
  }

  /// Waits until `peer` listens, and plans the connections to it.
  void find_peer(int peer) {
    const auto value = options_.store->get(std::to_string(peer), deadline_);
    if (!value) throw_not_connected(static_cast<std::size_t>(peer));
    base::ByteReader reader(*value, "the address of a rank");
    listening_.push_back({std::string(reader.bytes(sizeof(Mac))), {}});
    listening_.back().address = base::net::parse_address("the address of a rank", reader.remaining());
    for (std::uint8_t purpose = 0; purpose < kNumPurposes; ++purpose)
      outgoing_.push_back({.peer = peer, .purpose = purpose, .fd = {}, .hello = {}, .input = {}});
  }

  std::optional<std::size_t> find_missing() const {
    for (std::size_t peer = 0; peer < sockets_.size(); ++peer)
      if (static_cast<int>(peer) != options_.rank &&
          !std::all_of(sockets_[peer].begin(), sockets_[peer].end(), [](const Fd& fd) { return bool(fd); }))
        return peer;
    return std::nullopt;
  }

  [[noreturn]] void throw_not_connected(std::size_t peer) const {
    const int own = options_.members[static_cast<std::size_t>(options_.rank)];
    std::string what = "no connection to rank " + std::to_string(options_.members[peer]) + " in time";
    if (peer < listening_.size())
      what += ", which listens at " + base::net::to_string(listening_[peer].address) +
              (last_error_.empty() ? "" : ": " + last_error_);
    throw base::CommError(base::Cause::kPeerUnreachable, "connect", own, options_.members[peer], what,
                          "set LOCKSTEP_INTERFACE to the network interface to use");
  }

  void poll_once() {
    std::vector<pollfd> ready{{accept_again_.expired() ? listener_.get() : -1, POLLIN, 0}};
    Deadline until = deadline_;
    if (!accept_again_.expired()) until = earlier(until, accept_again_);
    for (const Incoming& each : incoming_) {
      ready.push_back({each.fd.get(), POLLIN, 0});
      until = earlier(until, each.until);
    }
    for (const Outgoing& each : outgoing_) {
      ready.push_back({each.fd.get(), static_cast<short>(each.is_connected ? POLLIN : POLLOUT), 0});
      if (!each.is_connected) until = earlier(until, each.until);
    }
    if (::poll(ready.data(), ready.size(), until.poll_ms()) < 0 && errno != EINTR)
      throw base::SystemError("poll", errno);
    auto next = ready.begin() + 1;
    std::erase_if(incoming_, [&](Incoming& each) { return (next++)->revents ? !advance(each) : each.until.expired(); });
    std::erase_if(outgoing_, [&](Outgoing& each) {
      if ((next++)->revents) return advance(each);
      if (!each.is_connected && each.until.expired()) start(each);
      return false;
    });
    if (ready.front().revents) accept_all();
  }

  void accept_all() {
    for (int i = 0; i < 64; ++i) {  // and then looks at the others
      Fd fd = base::net::try_accept(listener_.get());
      if (!fd) {
        if (errno == EMFILE || errno == ENFILE) accept_again_ = Deadline::in(kRetryPause);
        return;
      }
      if (incoming_.size() == max_incoming()) evict();
      incoming_.push_back({.fd = std::move(fd), .until = Deadline::in(kUnauthenticatedTime), .input = {}, .proof = {}});
    }
  }

  /// Closes the oldest connection that has not sent a hello, or else the oldest.
  void evict() {
    const auto silent =
        std::find_if(incoming_.begin(), incoming_.end(), [](const Incoming& each) { return !each.proof; });
    incoming_.erase(silent == incoming_.end() ? incoming_.begin() : silent);
  }

  struct Proofs {
    Mac of_accepting, of_connecting;
  };
  /// The concatenations are unambiguous, because all parts have fixed lengths.
  Proofs derive(std::string_view hello, std::string_view number, int accepting, std::string_view nonce) const {
    std::string rank;
    base::put_number(rank, static_cast<std::uint32_t>(accepting));
    return {.of_accepting = options_.key.mac({"mesh accept:", hello, number, rank, nonce}),
            .of_connecting = options_.key.mac({"mesh connect", hello, number, rank, nonce})};
  }

  /// Returns whether the connection may stay.
  bool advance(Incoming& each) {
    try {
      if (!each.proof) {
        if (receive_up_to(each.fd.get(), each.input, kHelloBytes)) answer_hello(each);
        return each.proof || each.input.size() < kHelloBytes;
      }
      if (!receive_up_to(each.fd.get(), each.input, kProofBytes)) return true;
      if (!job::equal_constant_time(*each.proof, each.input)) return false;
      base::net::send_all(each.fd.get(), "+", Deadline::in(std::chrono::seconds(0)));  // the admission
      sockets_[each.peer][each.purpose] = std::move(each.fd);
    } catch (const base::Error&) {
      // Whoever it was has gone, or is no rank.
    }
    return false;
  }

  /// Sets `proof` if the hello may be that of a rank.
  void answer_hello(Incoming& each) {
    base::ByteReader reader(each.input, "the connections of a group");
    if (reader.bytes(kMagic.size()) != kMagic) return;
    each.peer = reader.number<std::uint32_t>();
    each.purpose = reader.number<std::uint8_t>();
    if (each.peer >= sockets_.size() || static_cast<int>(each.peer) <= options_.rank || each.purpose >= kNumPurposes)
      return;
    const Mac nonce = job::random_nonce();
    const auto derived = derive(each.input, number_, options_.rank, job::mac_bytes(nonce));
    std::string challenge(job::mac_bytes(nonce));
    challenge += job::mac_bytes(derived.of_accepting);
    base::net::send_all(each.fd.get(), challenge, Deadline::in(std::chrono::seconds(0)));  // fits into the buffer
    each.proof = derived.of_connecting;
    each.input.clear();
  }

  void start(Outgoing& each) {
    each.until = Deadline::in(kConnectAttempt);
    each.is_connected = each.has_proved = false;
    try {
      each.fd = base::net::start_connect(listening_[static_cast<std::size_t>(each.peer)].address, "");
    } catch (const base::SystemError& error) {
      retry(each, error.what());
    }
  }

  void retry(Outgoing& each, const std::string& why) {
    last_error_ = why;
    each.fd.reset();
    each.is_connected = each.has_proved = false;
    each.until = Deadline::in(kRetryPause);
  }

  /// Returns whether the connection is complete.
  bool advance(Outgoing& each) {
    try {
      if (!each.is_connected) {
        if (const int error = base::net::connect_error(each.fd.get()))
          throw base::SystemError("cannot connect", error, base::Cause::kPeerUnreachable);
        each.is_connected = true;
        each.input.clear();
        each.hello = kMagic;
        base::put_number(each.hello, static_cast<std::uint32_t>(options_.rank));
        base::put_number(each.hello, each.purpose);
        each.hello += job::mac_bytes(job::random_nonce());
        base::net::send_all(each.fd.get(), each.hello, Deadline::in(std::chrono::seconds(0)));
        return false;
      }
      if (each.has_proved) {
        if (!receive_up_to(each.fd.get(), each.input, 1)) return false;
        sockets_[static_cast<std::size_t>(each.peer)][each.purpose] = std::move(each.fd);
        return true;
      }
      if (receive_up_to(each.fd.get(), each.input, kChallengeBytes)) answer_challenge(each);
      return false;
    } catch (const base::Error& error) {
      retry(each, error.what());
      return false;
    }
  }

  void answer_challenge(Outgoing& each) const {
    const std::string_view challenge = each.input;
    const auto derived = derive(each.hello, listening_[static_cast<std::size_t>(each.peer)].number, each.peer,
                                challenge.substr(0, sizeof(Mac)));
    if (!job::equal_constant_time(derived.of_accepting, challenge.substr(sizeof(Mac))))
      throw base::Error(base::Cause::kProtocol, "the process there does not have the key of this job");
    base::net::send_all(each.fd.get(), job::mac_bytes(derived.of_connecting), Deadline::in(std::chrono::seconds(0)));
    each.has_proved = true;
    each.input.clear();
  }

  const TcpOptions& options_;
  const Deadline deadline_;
  const std::string number_;
  std::vector<PeerSockets> sockets_;
  Fd listener_;
  Deadline accept_again_ = Deadline::in(std::chrono::seconds(0));  // after a lack of descriptors
  std::vector<Listening> listening_;                               // of the ranks before this one
  std::list<Incoming> incoming_;
  std::list<Outgoing> outgoing_;
  std::string last_error_;  // of an attempt to connect
};

}  // namespace

std::vector<PeerSockets> connect_mesh(const TcpOptions& options) { return Mesh(options).connect(); }

}  // namespace lockstep::comm::tcp

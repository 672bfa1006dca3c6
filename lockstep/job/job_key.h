// The secret key of a job: only processes that have it can join the job.
#pragma once

#include <array>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>

namespace lockstep::job {

/// A message authentication code: HMAC-SHA256 (RFC 2104, FIPS 180-4), computed by libsodium.
using Mac = std::array<unsigned char, 32>;

/// 32 secret bytes that appear neither in a command line, nor in the environment, nor in a core dump. `lockstep run`
/// generates them, and each rank reads them from the page that its agent created. Ranks started by MPI or torchrun
/// receive them from rank 0, through MPI or torchrun's store. All other ranks may read them from a file.
class JobKey {
 public:
  static constexpr std::size_t kBytes = 32;

  /// Constructs an unset key. With it, every process that can reach the store may join.
  JobKey() = default;
  /// Constructs a key from exactly 32 bytes; all zeros mean an unset key. Throws UsageError for another length.
  explicit JobKey(std::string_view bytes);
  /// Returns a random key from getrandom(2). Throws SystemError.
  static JobKey random();
  /// Derives a key from the content of a file of 32 to 4096 bytes. Throws UsageError if the file cannot be read,
  /// belongs to another user, or is readable or writable by users other than its owner; except a file of root that its
  /// owner and group may only read, as Kubernetes mounts a Secret in pods of other users.
  static JobKey from_file(const std::string& path);
  /// Returns the key in the page that this process inherited, or an unset key.
  static JobKey inherited();

  bool is_set() const { return bytes_ != nullptr; }
  /// The 32 bytes, which are zero for an unset key. Do not copy them.
  std::string_view bytes() const;

  /// Returns the MAC of the concatenation of `texts`. The caller must ensure that only one sequence of texts has this
  /// concatenation.
  Mac mac(std::initializer_list<std::string_view> texts) const;

 private:
  std::shared_ptr<const unsigned char> bytes_;  // in memory that core dumps leave out; null for an unset key
};

/// Returns whether `mac` and `bytes` are equal, in a time that does not depend on their content.
bool equal_constant_time(const Mac& mac, std::string_view bytes);
inline std::string_view mac_bytes(const Mac& mac) { return {reinterpret_cast<const char*>(mac.data()), mac.size()}; }

/// Returns 32 random bytes for one use. Throws SystemError.
Mac random_nonce();

/// The values that must be equal on both ends of a connection to the store.
struct Credentials {
  std::string job;     ///< name that distinguishes two jobs at one address; at most 128 bytes
  int generation = 0;  ///< how many times the job was started before
  JobKey key{};
};

}  // namespace lockstep::job

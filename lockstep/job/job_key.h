// The secret of a job: whoever has it may join, and nobody else.
#pragma once

#include <array>
#include <initializer_list>
#include <string>
#include <string_view>

namespace lockstep::job {

/// HMAC-SHA256 (RFC 2104, FIPS 180-4), as libsodium computes it.
using Mac = std::array<unsigned char, 32>;

/// 32 bytes that stand in no command line and in no environment: the launcher makes them, and each rank finds them in
/// the page that its agent made for it; ranks that MPI or torchrun has started hear them from rank 0, by MPI or
/// torchrun's store; others may have a file.
class JobKey {
 public:
  static constexpr std::size_t kBytes = 32;

  /// No secret: anybody who reaches the store may join.
  JobKey() = default;
  /// Exactly 32 bytes; all of them zero is no secret.
  explicit JobKey(std::string_view bytes);
  /// Random ones, from getrandom(2). Throws SystemError.
  static JobKey random();
  /// Made from what lies in a file of 32 to 4096 bytes. UsageError when it cannot be read, belongs to another user than
  /// this process, or anybody but its owner may read or write it.
  static JobKey from_file(const std::string& path);
  /// The one in the page that this process was given, or none.
  static JobKey inherited();

  bool is_set() const;
  std::string_view bytes() const { return {reinterpret_cast<const char*>(bytes_.data()), bytes_.size()}; }

  /// Of these texts one after another: who uses it sees to it that they cannot be cut otherwise.
  Mac mac(std::initializer_list<std::string_view> texts) const;

 private:
  std::array<unsigned char, kBytes> bytes_{};
};

/// Takes the same time whatever they are.
bool equal_constant_time(const Mac& mac, std::string_view bytes);
inline std::string_view mac_bytes(const Mac& mac) { return {reinterpret_cast<const char*>(mac.data()), mac.size()}; }

/// Random bytes that are used once. Throws SystemError.
Mac random_nonce();

/// What the two ends of a connection must have in common.
struct Credentials {
  std::string job;     ///< at most 128 bytes; keeps two jobs at one address apart
  int generation = 0;  ///< of the job: how often it was started before
  JobKey key{};
};

}  // namespace lockstep::job

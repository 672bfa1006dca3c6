#include "lockstep/job/job_key.h"

#include <fcntl.h>
#include <sodium.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/telemetry/rank_page.h"

namespace lockstep::job {
namespace {

constexpr std::size_t kMaxKeyFileBytes = 4096;
static_assert(sizeof(Mac) == crypto_auth_hmacsha256_BYTES && JobKey::kBytes == sizeof base::telemetry::RankPage::key);

constexpr std::array<char, JobKey::kBytes> kUnset{};

void fill_random(unsigned char* bytes, std::size_t size) {
  // bounded: getrandom blocks only until the kernel's pool is initialised, shortly after boot
  if (::getrandom(bytes, size, 0) != static_cast<ssize_t>(size)) throw base::SystemError("getrandom", errno);
}

/// sodium_malloc() makes the kernel leave the pages out of core dumps (MADV_DONTDUMP), and sodium_free() overwrites
/// them.
std::shared_ptr<unsigned char> allocate_secret() {
  if (::sodium_init() < 0) throw base::SystemError("sodium_init", ENOSYS);
  auto* const bytes = static_cast<unsigned char*>(::sodium_malloc(JobKey::kBytes));
  if (bytes == nullptr) throw base::SystemError("cannot allocate memory for a key", errno);
  return {bytes, ::sodium_free};
}

}  // namespace

JobKey::JobKey(std::string_view bytes) {
  if (bytes.size() != kBytes)
    throw base::UsageError("the job key has " + std::to_string(bytes.size()) + " bytes; expected 32");
  if (bytes == std::string_view(kUnset.data(), kUnset.size())) return;
  const auto secret = allocate_secret();
  std::copy(bytes.begin(), bytes.end(), secret.get());
  bytes_ = secret;
}

std::string_view JobKey::bytes() const {
  return {bytes_ ? reinterpret_cast<const char*>(bytes_.get()) : kUnset.data(), kBytes};
}

JobKey JobKey::random() {
  const auto secret = allocate_secret();
  fill_random(secret.get(), kBytes);
  JobKey key;
  key.bytes_ = secret;
  return key;
}

JobKey JobKey::from_file(const std::string& path) {
  const auto refuse = [&](const std::string& why) {
    throw base::UsageError("the job key file " + base::quoted(path, 256) + " " + why,
                           "create it with head -c 32 /dev/urandom > FILE; chmod 600 FILE; and copy it to every host");
  };
  const base::Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status{};
  if (!fd || ::fstat(fd.get(), &status) != 0) refuse(std::string("cannot be read: ") + std::strerror(errno));
  if (!S_ISREG(status.st_mode)) refuse("is not a regular file");
  const bool is_secret = status.st_uid == 0 && (status.st_mode & 0777) == 0440;
  if (!is_secret && status.st_uid != ::geteuid()) refuse("belongs to another user");
  if (!is_secret && (status.st_mode & 077) != 0) refuse("is readable or writable by users other than its owner");
  char text[kMaxKeyFileBytes + 1];
  const ssize_t size = ::read(fd.get(), text, sizeof text);
  if (size < static_cast<ssize_t>(kBytes) || size > static_cast<ssize_t>(kMaxKeyFileBytes))
    refuse("has " + std::to_string(status.st_size) + " bytes; expected 32 to 4096");
  Mac derived = JobKey().mac({"a job's key from a file:", {text, static_cast<std::size_t>(size)}});
  JobKey key(mac_bytes(derived));
  ::sodium_memzero(text, sizeof text);
  ::sodium_memzero(derived.data(), derived.size());
  return key;
}

JobKey JobKey::inherited() {
  base::telemetry::JobKeyBytes bytes = base::telemetry::inherited_job_key();
  JobKey key({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  ::sodium_memzero(bytes.data(), bytes.size());
  return key;
}

Mac JobKey::mac(std::initializer_list<std::string_view> texts) const {
  crypto_auth_hmacsha256_state state;
  crypto_auth_hmacsha256_init(&state, reinterpret_cast<const unsigned char*>(bytes().data()), kBytes);
  for (const std::string_view text : texts)
    crypto_auth_hmacsha256_update(&state, reinterpret_cast<const unsigned char*>(text.data()), text.size());
  Mac mac;
  crypto_auth_hmacsha256_final(&state, mac.data());
  ::sodium_memzero(&state, sizeof state);
  return mac;
}

bool equal_constant_time(const Mac& mac, std::string_view bytes) {
  return bytes.size() == mac.size() && sodium_memcmp(mac.data(), bytes.data(), mac.size()) == 0;
}

Mac random_nonce() {
  Mac nonce;
  fill_random(nonce.data(), nonce.size());
  return nonce;
}

}  // namespace lockstep::job

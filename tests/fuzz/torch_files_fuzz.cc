// Fuzzes the readers of checkpoint files. The first byte selects the file format.
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"
#include "lockstep/checkpoint/files/embedded_hash.h"
#include "lockstep/checkpoint/files/limits.h"
#include "lockstep/checkpoint/manifest.h"
#include "lockstep/checkpoint/strict_json.h"
#include "lockstep/checkpoint/torch_file/pickle.h"
#include "lockstep/checkpoint/torch_file/zip_reader.h"

using namespace lockstep;
using checkpoint::Pickle;

namespace {

// Visits all nodes of the tree, as the code that builds values from it does. Returns their number. The visit must end.
std::size_t walk(const Pickle& pickle, Pickle::Index index, std::size_t depth) {
  if (depth > checkpoint::files::kMaxTreeDepth) std::abort();
  std::size_t num_values = 1;
  const auto& value = pickle.values.at(index);
  if (const auto* const container = std::get_if<Pickle::Container>(&value))
    for (const auto item : container->items) num_values += walk(pickle, item, depth + 1);
  if (const auto* const at = std::get_if<Pickle::TensorRef>(&value)) {
    const auto& tensor = pickle.tensors.at(at->index);
    const auto& storage = pickle.storages.at(tensor.storage);
    const auto num_bytes = static_cast<__int128>(storage.num_elements) * (storage.dtype ? storage.dtype->num_bytes : 1);
    __int128 last = tensor.offset;
    bool empty = false;
    for (std::size_t i = 0; i < tensor.sizes.size(); ++i) {
      empty = empty || tensor.sizes[i] == 0;
      last += static_cast<__int128>(tensor.sizes[i] - 1) * tensor.strides[i];
    }
    if (!empty && (last + 1) * static_cast<__int128>(tensor.dtype->num_bytes) > num_bytes) std::abort();
  }
  if (num_values > checkpoint::files::kMaxTreeBytes / 64) std::abort();
  return num_values;
}

void pickle(std::string_view bytes) {
  const Pickle read = checkpoint::parse_pickle(bytes, "file", 0);
  walk(read, read.root, 1);
}

void zip(std::string_view bytes) {
  const base::Fd fd(::memfd_create("zip", MFD_CLOEXEC));
  if (::write(fd.get(), bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size())) std::abort();
  const checkpoint::ZipReader reader("/proc/self/fd/" + std::to_string(fd.get()));
  for (const auto& [name, record] : reader.records()) {
    std::string content(record.num_bytes, '\0');
    if (content.size() > bytes.size()) std::abort();
    reader.read(record, content.data(), false, name);
  }
}

// No input can contain its own hash, so the hash is inserted.
void manifest(std::string_view bytes) {
  std::string text(bytes);
  constexpr std::size_t kSealAt = 13;
  if (text.size() >= kSealAt + checkpoint::files::kHashDigits) {
    text.replace(kSealAt, checkpoint::files::kHashDigits, checkpoint::files::kHashPlaceholder);
    checkpoint::files::embed_hash(text, kSealAt);
  }
  const auto read = checkpoint::parse_manifest(text, "file");
  if (checkpoint::parse_manifest(checkpoint::to_text(read), "file") != read) std::abort();
}

void json(std::string_view bytes) { checkpoint::parse_json(bytes, 2, "file"); }

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 1) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  constexpr void (*kinds[])(std::string_view) = {pickle, zip, manifest, json};
  try {
    kinds[data[0] % 4](bytes);
  } catch (const base::Error&) {
  }
  return 0;
}

#include <torch/types.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/utf8.h"
#include "lockstep/checkpoint/atomic_file.h"
#include "lockstep/checkpoint/limits.h"
#include "lockstep/checkpoint/safetensors.h"

namespace lockstep::checkpoint {
namespace {

struct Planned {
  const std::string* name;
  const at::Tensor* tensor;
  const Dtype* dtype;
};

void check_name(const std::string& name) {
  if (name.size() > kMaxNameBytes || !base::is_utf8(name) || name == "__metadata__")
    throw base::UsageError("cannot save a tensor under the name " + base::quoted(name, 80) +
                           "; allowed is UTF-8 of at most 1024 bytes that is not \"__metadata__\"");
}

// The order in the file: large elements first, so that every tensor is aligned for those who map the file.
std::vector<Planned> planned(const TensorMap& tensors) {
  std::vector<Planned> plan;
  for (const auto& [name, tensor] : tensors) {
    check_name(name);
    if (!tensor.defined()) throw base::UsageError("cannot save the undefined tensor " + base::quoted(name, 80));
    const Dtype* const dtype = find_dtype(tensor.scalar_type());
    if (!dtype || tensor.layout() != c10::kStrided)
      throw base::UsageError("cannot save tensor " + base::quoted(name, 80) + " of dtype " +
                             c10::toString(tensor.scalar_type()) +
                             (tensor.layout() == c10::kStrided ? "" : ", which is sparse") +
                             "; allowed are dense tensors of " + dtype_names());
    plan.push_back({&name, &tensor, dtype});
  }
  std::stable_sort(plan.begin(), plan.end(),
                   [](const Planned& a, const Planned& b) { return a.dtype->num_bytes > b.dtype->num_bytes; });
  return plan;
}

nlohmann::ordered_json metadata_of(const SaveOptions& options) {
  nlohmann::ordered_json metadata = {{"format", "pt"}};
  for (const auto& [key, value] : options.metadata) {
    if (key.size() > kMaxNameBytes || value.size() > kMaxTokenBytes / 8 || !base::is_utf8(key) || !base::is_utf8(value))
      throw base::UsageError("SaveOptions.metadata has " + base::quoted(key, 80) + " = " + base::quoted(value, 80) +
                             "; allowed are keys of at most 1024 bytes and values of at most 128 KiB, both UTF-8");
    metadata[key] = value;
  }
  return metadata;
}

std::pair<std::string, std::uint64_t> header_of(const std::vector<Planned>& plan, const SaveOptions& options) {
  nlohmann::ordered_json metadata = metadata_of(options);
  std::string text = "{\"__metadata__\":" + metadata.dump();
  std::uint64_t end = 0;
  for (const auto& [name, tensor, dtype] : plan) {
    const std::uint64_t begin = end;
    end += static_cast<std::uint64_t>(tensor->numel()) * dtype->num_bytes;
    text += "," + nlohmann::json(*name).dump() + ":{\"dtype\":\"" + std::string(dtype->name) +
            "\",\"shape\":" + nlohmann::json(tensor->sizes().vec()).dump() + ",\"data_offsets\":[" + std::to_string(begin) + "," +
            std::to_string(end) + "]}";
  }
  text += "}";
  text.append((8 - text.size() % 8) % 8, ' ');
  return {text, end};
}

}  // namespace

void save_tensors(const TensorMap& tensors, const std::string& path, const SaveOptions& options) {
  const auto plan = planned(tensors);
  const auto [header, num_data_bytes] = header_of(plan, options);
  if (header.size() > kMaxHeaderBytes)
    throw base::FormatError(path + ":0: the header of " + std::to_string(tensors.size()) + " tensors has " +
                            std::to_string(header.size()) + " bytes; allowed is 16 MiB");
  // Nothing is written that could not be read.
  parse_header(header, num_data_bytes, path);
  AtomicFile file(path);
  const std::uint64_t header_bytes = header.size();
  file.write(&header_bytes, sizeof header_bytes);
  file.write(header.data(), header.size());
  for (const auto& entry : plan) {
    const at::Tensor dense = entry.tensor->detach().to(c10::kCPU).resolve_neg().contiguous();
    file.write(dense.const_data_ptr(), dense.nbytes());
  }
  file.commit();
}

}  // namespace lockstep::checkpoint

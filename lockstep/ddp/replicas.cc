#include "lockstep/ddp/replicas.h"

#define XXH_INLINE_ALL
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>
#include <xxhash.h>

#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <unordered_set>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/comm/group_access.h"

namespace lockstep::ddp {
namespace {

constexpr std::int64_t kMessageBytes = std::int64_t{32} << 20;

template <typename Dict>
NamedTensors unique_tensors(const Dict& named) {
  NamedTensors tensors;
  std::unordered_set<const void*> seen;
  for (const auto& item : named)
    if (item.value().defined() && seen.insert(item.value().unsafeGetTensorImpl()).second)
      tensors.emplace_back(item.key(), item.value());
  return tensors;
}

std::string format_sizes(at::IntArrayRef values) {
  std::ostringstream text;
  text << values;
  return text.str();
}

/// One line per tensor, "KIND NAME<TAB>DESCRIPTION"; lines must be equal on all ranks.
std::vector<std::string> describe_tensors(const NamedTensors& tensors, const std::string& kind) {
  std::vector<std::string> lines;
  for (const auto& [name, t] : tensors)
    lines.push_back(kind + " " + name + "\t" + c10::toString(t.scalar_type()) + format_sizes(t.sizes()) + " strides " +
                    format_sizes(t.strides()) + " on " + c10::DeviceTypeName(t.device().type(), true) +
                    (kind == "parameter" ? (t.requires_grad() ? ", requires_grad" : ", frozen") : ""));
  return lines;
}

/// Whether an operation on flat bytes can use the tensor's own memory.
bool is_flat(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg() && !tensor.is_inference();
}

/// Runs `operation` on one flat copy of `batch`, and copies the results back; a single tensor is not copied.
template <typename Operation>
void run_on_flat_batch(std::vector<at::Tensor>& batch, const Operation& operation) {
  if (batch.size() == 1 && is_flat(batch[0])) {
    operation(batch[0].view({-1}));
    torch::autograd::impl::bump_version(batch[0]);
    return;
  }
  std::int64_t total = 0;
  for (const at::Tensor& t : batch) total += t.numel();
  const at::Tensor flat = at::empty({total}, batch[0].options());
  const auto each = [&](const auto& copy) {
    std::int64_t at = 0;
    for (at::Tensor& t : batch) {
      copy(t, flat.narrow(0, at, t.numel()).view(t.sizes()));
      at += t.numel();
    }
  };
  each([](const at::Tensor& t, const at::Tensor& slice) { slice.copy_(t); });
  operation(flat);
  each([](const at::Tensor& t, const at::Tensor& slice) { copy_values(slice, t); });
}

/// Runs `operation` on batches of consecutive `tensors` of one dtype and device, flat and small.
template <typename Operation>
void for_each_flat_batch(const NamedTensors& tensors, const Operation& operation) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> batch;
  std::int64_t bytes = 0;
  const auto flush = [&] {
    if (!batch.empty()) run_on_flat_batch(batch, operation);
    batch.clear();
    bytes = 0;
  };
  for (const auto& [name, t] : tensors) {
    const bool fits = batch.empty() || (batch[0].scalar_type() == t.scalar_type() && batch[0].device() == t.device() &&
                                        bytes + static_cast<std::int64_t>(t.nbytes()) <= kMessageBytes);
    if (!fits) flush();
    batch.push_back(t.detach());
    bytes += static_cast<std::int64_t>(t.nbytes());
  }
  flush();
}

std::uint64_t hash_of(const at::Tensor& dense) {
  if (dense.is_cpu()) return XXH3_64bits(dense.const_data_ptr(), dense.nbytes());
  const at::Tensor flat = dense.detach().as_strided({dense.numel()}, {1});
  const auto slice = static_cast<std::int64_t>(kMessageBytes / dense.element_size());
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  for (std::int64_t at = 0; at < flat.numel(); at += slice) {
    const at::Tensor here = flat.narrow(0, at, std::min(slice, flat.numel() - at)).cpu();
    XXH3_64bits_update(&state, here.const_data_ptr(), here.nbytes());
  }
  return XXH3_64bits_digest(&state);
}

using nlohmann::json;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

// For broadcast_optimizer_state(): the optimizer saves itself into an archive, which is sent as a JSON tree of numbers
// and as tensors.

/// Converts the archive to JSON and appends its tensors to `tensors`. A tensor becomes {"tensor": index in `tensors`,
/// "defined", "gpu", "dtype", "sizes"}.
json archive_to_json(InputArchive& archive, std::vector<at::Tensor>& tensors) {
  json tree = json::object();
  for (const std::string& key : archive.keys()) {
    InputArchive child;
    c10::IValue value;
    if (archive.try_read(key, child)) {
      tree[key] = {{"archive", archive_to_json(child, tensors)}};
    } else if (archive.try_read(key, value) && value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      tree[key] = {{"tensor", tensors.size()},
                   {"defined", tensor.defined()},
                   {"gpu", tensor.defined() && tensor.is_cuda()},
                   {"dtype", tensor.defined() ? static_cast<int>(tensor.scalar_type()) : 0},
                   {"sizes", tensor.defined() ? tensor.sizes().vec() : std::vector<std::int64_t>()}};
      tensors.push_back(tensor);
    } else if (value.isInt()) {
      tree[key] = {{"int", value.toInt()}};
    } else if (value.isDouble()) {
      tree[key] = {{"double", value.toDouble()}};
    } else if (value.isBool()) {
      tree[key] = {{"bool", value.toBool()}};
    } else if (value.isString()) {
      tree[key] = {{"string", value.toStringRef()}};
    } else if (value.isDoubleList() || value.isTuple()) {
      json list = json::array();
      if (value.isTuple())
        for (const auto& element : value.toTupleRef().elements()) list.push_back(element.toDouble());
      else
        for (const double element : value.toDoubleVector()) list.push_back(element);
      tree[key] = {{value.isTuple() ? "tuple" : "doubles", list}};
    } else if (value.isNone()) {
      tree[key] = {{"none", true}};
    } else {
      throw base::UsageError("broadcast_optimizer_state: the optimizer's \"" + key + "\" is of type " +
                             value.tagKind() + "; expected a tensor, number, boolean, string or list of doubles");
    }
  }
  return tree;
}

void json_to_archive(OutputArchive& archive, const json& tree, const std::vector<at::Tensor>& tensors) {
  for (const auto& [key, entry] : tree.items()) {
    if (entry.contains("archive")) {
      OutputArchive child(archive.compilation_unit());
      json_to_archive(child, entry["archive"], tensors);
      archive.write(key, child);
    } else if (entry.contains("tensor")) {
      archive.write(key, tensors.at(entry["tensor"].get<std::size_t>()), /*is_buffer=*/true);
    } else if (entry.contains("int")) {
      archive.write(key, c10::IValue(entry["int"].get<std::int64_t>()));
    } else if (entry.contains("double")) {
      archive.write(key, c10::IValue(entry["double"].get<double>()));
    } else if (entry.contains("bool")) {
      archive.write(key, c10::IValue(entry["bool"].get<bool>()));
    } else if (entry.contains("string")) {
      archive.write(key, c10::IValue(entry["string"].get<std::string>()));
    } else if (entry.contains("doubles")) {
      archive.write(key, c10::IValue(entry["doubles"].get<std::vector<double>>()));
    } else if (entry.contains("tuple")) {
      std::vector<c10::IValue> values;
      for (const auto& element : entry["tuple"]) values.emplace_back(element.get<double>());
      archive.write(key, c10::IValue(c10::ivalue::Tuple::create(std::move(values))));
    } else {
      archive.write(key, c10::IValue());
    }
  }
}

/// Collects every "tensor" entry of the tree, ordered by its index.
void list_tensors(const json& tree, std::vector<json>& entries) {
  for (const auto& [key, entry] : tree.items()) {
    if (entry.contains("archive")) list_tensors(entry["archive"], entries);
    if (!entry.contains("tensor")) continue;
    const auto place = entry["tensor"].get<std::size_t>();
    if (entries.size() <= place) entries.resize(place + 1);
    entries[place] = entry;
  }
}

}  // namespace

NamedTensors named_parameters(torch::nn::Module& module) { return unique_tensors(module.named_parameters()); }
NamedTensors named_buffers(torch::nn::Module& module) { return unique_tensors(module.named_buffers()); }

void copy_values(const at::Tensor& values, const at::Tensor& tensor) {
  at::Tensor source = values, target = tensor;
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim)
    if (tensor.stride(dim) == 0 && tensor.size(dim) > 1) {  // copy_() refuses it
      source = source.narrow(dim, 0, 1);
      target = target.narrow(dim, 0, 1);
    }
  target.copy_(source);
}

void require_dense(const NamedTensors& tensors, const std::string& kind, const std::string& operation) {
  for (const auto& [name, tensor] : tensors)
    if (tensor.layout() != at::kStrided)
      throw base::UsageError(
          operation + ": " + kind + " " + name + " is sparse; expected a dense tensor",
          "leave it out: with DdpOptions.ignore, or by ddp::broadcast_tensors() of the other tensors");
}

void compare_models(const NamedTensors& parameters, const NamedTensors& buffers, const std::string& options,
                    const comm::Group& group) {
  if (group.size() == 1) return;
  std::vector<std::string> mine = describe_tensors(parameters, "parameter");
  for (std::string& line : describe_tensors(buffers, "buffer")) mine.push_back(std::move(line));
  mine.push_back("options\t" + options);
  std::string text;
  for (const std::string& line : mine) text += line + "\n";
  const auto all = group.all_gather_bytes(text, {.name = "compare_models"});
  const auto named = [&](int rank) { return "rank " + std::to_string(group.global_rank(rank)); };
  for (int rank = 1; rank < group.size(); ++rank) {
    if (all[static_cast<std::size_t>(rank)] == all[0]) continue;
    const auto first = base::split(all[0], '\n');
    const auto theirs = base::split(all[static_cast<std::size_t>(rank)], '\n');
    std::size_t i = 0;
    while (i < first.size() && i < theirs.size() && first[i] == theirs[i]) ++i;
    const auto describe_at = [&](const std::vector<std::string>& lines) {
      std::string line = i < lines.size() ? lines[i] : "";
      std::replace(line.begin(), line.end(), '\t', ' ');
      return line.empty() ? "nothing more" : line;
    };
    comm::GroupAccess::fail(group, {base::Cause::kConfigMismatch, "DistributedDataParallel",
                                    group.global_rank(group.rank()), group.global_rank(rank),
                                    "the model differs between ranks: " + named(0) + " has " + describe_at(first) +
                                        "; " + named(rank) + " has " + describe_at(theirs),
                                    "build the same model with the same options on every rank"});
  }
}

void broadcast_tensors(const NamedTensors& tensors, const comm::Group& group, int root) {
  if (group.size() == 1) return;
  // As bytes: a group does not accept every dtype.
  for_each_flat_batch(
      tensors, [&](const at::Tensor& flat) { group.broadcast(flat.view(at::kByte), root, {.name = "parameters"}); });
}

void broadcast_parameters(nn::ModuleRef module, const comm::Group& group, int root) {
  NamedTensors tensors = named_parameters(*module);
  require_dense(tensors, "parameter", "broadcast_parameters");
  require_dense(named_buffers(*module), "buffer", "broadcast_parameters");
  for (auto& buffer : named_buffers(*module)) tensors.push_back(std::move(buffer));
  broadcast_tensors(tensors, group, root);
}

std::vector<std::int64_t> hash_tensors(const NamedTensors& tensors) {
  std::vector<std::int64_t> hashes;
  for (const auto& [name, t] : tensors) {
    const at::Tensor flat = t.is_non_overlapping_and_dense() ? t : t.contiguous();
    hashes.push_back(static_cast<std::int64_t>(hash_of(flat)));
  }
  return hashes;
}

std::string describe_divergence(const NamedTensors& tensors, const std::vector<std::int64_t>& all,
                                const std::vector<int>& ranks, int& outlier_rank) {
  const std::size_t count = tensors.size();
  for (std::size_t i = 0; i < count; ++i) {
    std::map<std::int64_t, std::vector<int>> ranks_by_hash;
    for (std::size_t r = 0; r < ranks.size(); ++r) ranks_by_hash[all[r * count + i]].push_back(ranks[r]);
    if (ranks_by_hash.size() < 2) continue;
    // A majority vote: the smallest set of ranks is reported; among sets of equal size, one without the first rank.
    const std::vector<int>* smallest = nullptr;
    for (const auto& [hash, holding_ranks] : ranks_by_hash)
      if (!smallest || holding_ranks.size() < smallest->size() ||
          (holding_ranks.size() == smallest->size() && smallest->front() == ranks.front()))
        smallest = &holding_ranks;
    outlier_rank = smallest->front();
    std::string text = "parameter " + tensors[i].first + " differs between ranks:";
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      char hex[20];
      std::snprintf(hex, sizeof hex, "%016llx", static_cast<unsigned long long>(all[r * count + i]));
      text += std::string(r ? ", rank " : " rank ") + std::to_string(ranks[r]) + " has hash " + hex;
    }
    return text;
  }
  return "";
}

void broadcast_optimizer_state(torch::optim::Optimizer& optimizer, const comm::Group& group, int root) {
  if (group.size() == 1) return;
  json tree;
  std::vector<at::Tensor> tensors;
  if (group.rank() == root) {
    OutputArchive out;
    optimizer.save(out);
    std::stringstream bytes;
    out.save_to(bytes);
    InputArchive own;
    own.load_from(bytes);  // trusted: written by this process just now
    tree = archive_to_json(own, tensors);
  }
  tree = json::parse(group.broadcast_bytes(tree.dump(), root, {.name = "optimizer state"}));
  std::vector<json> entries;
  list_tensors(tree, entries);
  tensors.resize(entries.size());
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (!entries[i]["defined"].get<bool>()) continue;
    const auto sizes = entries[i]["sizes"].get<std::vector<std::int64_t>>();
    const auto dtype = static_cast<at::ScalarType>(entries[i]["dtype"].get<int>());
    if (group.rank() != root) tensors[i] = at::empty(sizes, dtype);
    at::Tensor host = tensors[i].cpu();
    group.broadcast(host, root, {.name = "optimizer state"});
    tensors[i] = entries[i]["gpu"].get<bool>() ? host.to(group.device()) : host;
  }
  if (group.rank() == root) return;
  OutputArchive out;
  json_to_archive(out, tree, tensors);
  std::stringstream bytes;
  out.save_to(bytes);
  InputArchive in;
  in.load_from(bytes);  // trusted as well
  optimizer.load(in);
}

}  // namespace lockstep::ddp

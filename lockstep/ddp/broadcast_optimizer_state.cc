// broadcast_optimizer_state(): the optimizer saves itself into an archive, which is sent as a JSON tree of numbers and
// as tensors.
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "lockstep/base/error.h"
#include "lockstep/ddp/replicas.h"

namespace lockstep::ddp {
namespace {

using nlohmann::json;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

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
        for (const auto& one : value.toTupleRef().elements()) list.push_back(one.toDouble());
      else
        for (const double one : value.toDoubleVector()) list.push_back(one);
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
      for (const auto& one : entry["tuple"]) values.emplace_back(one.get<double>());
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

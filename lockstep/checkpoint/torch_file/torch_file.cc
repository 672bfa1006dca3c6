#include "lockstep/checkpoint/torch_file/torch_file.h"

#include <torch/types.h>

#include <algorithm>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/checkpoint/files/limits.h"
#include "lockstep/checkpoint/torch_file/pickle.h"
#include "lockstep/checkpoint/torch_file/zip_reader.h"

namespace lockstep::checkpoint::inline torch_file {
namespace {

// A safetensors file begins with the length of its header. These bytes would be lengths above the limit.
constexpr std::string_view kZipMagic = "PK\x03\x04", kLegacyMagic = "\x80\x02\x8a\x0a";

std::string first_bytes(const std::string& path) {
  const files::InputFile file(path);
  std::string bytes(std::min<std::uint64_t>(file.num_bytes(), kZipMagic.size()), '\0');
  file.read(0, bytes.data(), bytes.size());
  return bytes;
}

class TorchFileReader {
 public:
  TorchFileReader(const std::string& path, const ReadOptions& options) : zip_(path), verify_(options.verify) {
    find_root();
    const std::string order = read_text("byteorder");
    if (!order.empty() && order != "little")
      zip_.file().throw_format_error(0, "the byte order is " + base::quoted(order, 20) + "; expected \"little\"");
    const ZipReader::Record& record = zip_.records().at(root_ + "data.pkl");
    if (record.num_bytes > files::kMaxPickleBytes)
      zip_.file().throw_format_error(
          record.begin, "the pickle has " + std::to_string(record.num_bytes) + " bytes; expected at most 32 MiB");
    pickle_bytes_.resize(record.num_bytes);
    zip_.read(record, pickle_bytes_.data(), verify_, "data.pkl");
    pickle_ = parse_pickle(pickle_bytes_, zip_.file().path(), record.begin);
  }

  Value load() {
    for (const auto& storage : pickle_.storages) storages_.push_back(load(storage));
    return convert(pickle_.root);
  }

 private:
  // All records are in one directory of the archive, which has the name of the file or is called "archive".
  void find_root() {
    std::size_t num_found = 0;
    for (const auto& [name, record] : zip_.records()) {
      const std::size_t slash = name.find('/');
      if (slash == std::string::npos || name.substr(slash + 1) != "data.pkl") continue;
      root_ = name.substr(0, slash + 1);
      ++num_found;
    }
    if (num_found == 1) return;
    throw base::UsageError("cannot load " + zip_.file().path() +
                               ": it is a zip archive, but not of torch.save(); expected a file of torch.save() in "
                               "Python or of torch::save() in C++",
                           "", base::Cause::kBadFile);
  }

  std::string read_text(const std::string& name) const {
    const auto found = zip_.records().find(root_ + name);
    if (found == zip_.records().end() || found->second.num_bytes > 64) return "";
    std::string bytes(found->second.num_bytes, '\0');
    zip_.read(found->second, bytes.data(), verify_, name);
    return bytes;
  }

  c10::Storage load(const Pickle::Storage& storage) const {
    const auto found = zip_.records().find(root_ + "data/" + storage.key);
    const std::uint64_t num_bytes = storage.num_elements * (storage.dtype ? storage.dtype->num_bytes : 1);
    const std::string what = "storage " + base::quoted(storage.key, 80);
    if (found == zip_.records().end()) zip_.file().throw_format_error(0, what + " is not in the archive");
    if (found->second.num_bytes != num_bytes)
      zip_.file().throw_format_error(found->second.begin, what + " has " + std::to_string(found->second.num_bytes) +
                                                              " bytes; expected " + std::to_string(num_bytes) +
                                                              " for its tensors");
    const at::Tensor bytes = torch::empty({static_cast<std::int64_t>(num_bytes)}, torch::kUInt8);
    auto* const data = static_cast<std::uint8_t*>(bytes.mutable_data_ptr());
    zip_.read(found->second, data, verify_, what);
    // Using a bool with another value is undefined behaviour.
    if (storage.dtype && storage.dtype->type == c10::ScalarType::Bool &&
        std::any_of(data, data + num_bytes, [](std::uint8_t byte) { return byte > 1; }))
      zip_.file().throw_format_error(found->second.begin, what + " has a bool that is neither 0 nor 1");
    return bytes.storage();
  }

  at::Tensor tensor(const Pickle::Tensor& tensor) const {
    at::Tensor result = torch::empty({0}, torch::TensorOptions(tensor.dtype->type));
    result.set_(storages_[tensor.storage], tensor.offset, tensor.sizes, tensor.strides);
    return tensor.requires_grad ? result.requires_grad_() : result;
  }

  // validate_pickle() has checked that the tree is finite and within the limits.
  Value convert(Pickle::Index index) {
    const Pickle::Value& from = pickle_.values[index];
    if (const auto* const it = std::get_if<bool>(&from)) return *it;
    if (const auto* const it = std::get_if<std::int64_t>(&from)) return *it;
    if (const auto* const it = std::get_if<double>(&from)) return *it;
    if (const auto* const it = std::get_if<std::string_view>(&from)) return std::string(*it);
    if (const auto* const it = std::get_if<Pickle::ByteString>(&from)) return ByteString{std::string(it->bytes)};
    if (const auto* const it = std::get_if<Pickle::TensorRef>(&from)) return shared_tensor(it->index);
    if (const auto* const it = std::get_if<Pickle::Container>(&from)) return convert_container(*it);
    return None{};
  }

  Value convert_container(const Pickle::Container& from) {
    using Kind = Pickle::Kind;
    if (from.kind == Kind::kDict || from.kind == Kind::kOrderedDict || from.kind == Kind::kModule) {
      Dict dict{{}, from.kind == Kind::kOrderedDict, from.kind == Kind::kModule};
      dict.items.reserve(from.items.size() / 2);
      for (std::size_t i = 0; i < from.items.size(); i += 2)
        dict.add(convert(from.items[i]), convert(from.items[i + 1]));
      return dict;
    }
    Sequence sequence{from.kind == Kind::kList    ? Sequence::Kind::kList
                      : from.kind == Kind::kTuple ? Sequence::Kind::kTuple
                                                  : Sequence::Kind::kSet,
                      {}};
    sequence.items.reserve(from.items.size());
    for (const auto item : from.items) sequence.items.push_back(convert(item));
    return sequence;
  }

  // A tensor that occurs several times becomes one object.
  at::Tensor shared_tensor(std::uint32_t index) {
    at::Tensor& result = tensors_.try_emplace(index).first->second;
    if (!result.defined()) result = tensor(pickle_.tensors[index]);
    return result;
  }

  ZipReader zip_;
  const bool verify_;
  std::string root_;
  std::string pickle_bytes_;
  Pickle pickle_;
  std::vector<c10::Storage> storages_;
  std::map<std::uint32_t, at::Tensor> tensors_;
};

}  // namespace

Value load_torch_file(const std::string& path, const ReadOptions& options) {
  const std::string first = first_bytes(path);
  if (first == kLegacyMagic)
    throw base::UsageError(
        "cannot load " + path + ": it has the format of torch.save() before PyTorch 1.6; expected the current one",
        "load and save the file once in Python", base::Cause::kBadFile);
  return TorchFileReader(path, options).load();
}

bool is_torch_file(const std::string& path) {
  const std::string first = first_bytes(path);
  return first == kZipMagic || first == kLegacyMagic;
}

bool has_torch_extension(std::string_view path) { return path.ends_with(".pt") || path.ends_with(".pth"); }

}  // namespace lockstep::checkpoint::inline torch_file

// Writes files that torch.load(weights_only=True) reads.
#include <ATen/core/Tensor.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/types.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <exception>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/utf8.h"
#include "lockstep/checkpoint/files/atomic_file.h"
#include "lockstep/checkpoint/files/limits.h"
#include "lockstep/checkpoint/torch_file/torch_dtype.h"
#include "lockstep/checkpoint/torch_file/torch_file.h"
#include "lockstep/checkpoint/torch_file/value.h"

namespace lockstep::checkpoint::inline torch_file {
namespace {

/// The location of a tensor in the file.
struct StoredTensor {
  std::string storage;             ///< key of the storage
  std::uint64_t num_elements = 0;  ///< size of the storage, in elements of the tensor's dtype
  std::int64_t offset = 0;         ///< offset in the storage, in elements
  std::vector<std::int64_t> sizes, strides;
};

at::Tensor materialize(const at::Tensor& tensor) {
  if (!tensor.defined()) throw base::UsageError("cannot save a tensor that is undefined");
  if (!find_torch_dtype(tensor.scalar_type()) || tensor.layout() != c10::kStrided || tensor.is_meta())
    throw base::UsageError(std::string("cannot save a tensor of dtype ") + c10::toString(tensor.scalar_type()) +
                           (tensor.layout() == c10::kStrided ? "" : ", which is sparse") +
                           (tensor.is_meta() ? ", which has no memory" : "") + "; expected a dense tensor of " +
                           torch_dtype_names());
  const torch::NoGradGuard no_grad;
  return tensor.resolve_conj().resolve_neg();
}

// Returns the number of elements from the first to the last one in memory, including gaps.
std::int64_t num_spanned_elements(const at::Tensor& tensor) {
  std::int64_t last = 0;
  for (std::int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return last + 1;
}

class StorageLayout {
 public:
  /// Tensors that overlap in memory share one storage, which reaches from the first to the last of their elements;
  /// every other tensor has its own. A tensor with gaps between its elements that shares no memory is stored densely.
  /// Throws UsageError for tensors that a file cannot hold.
  explicit StorageLayout(const std::vector<at::Tensor>& tensors) : tensors_(tensors.size()) {
    std::vector<std::vector<TensorSpan>> groups;
    std::map<std::pair<const void*, c10::ScalarType>, std::vector<TensorSpan>> by_memory;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const at::Tensor tensor = materialize(tensors[i]);
      if (tensor.numel() == 0)
        groups.push_back(std::vector<TensorSpan>{TensorSpan{tensor, i, 0, 0}});
      else
        by_memory[{tensor.storage().unsafeGetStorageImpl(), tensor.scalar_type()}].push_back(
            {tensor, i, tensor.storage_offset(), tensor.storage_offset() + num_spanned_elements(tensor)});
    }
    for (auto& [memory, tensor_spans] : by_memory) {
      std::stable_sort(tensor_spans.begin(), tensor_spans.end(),
                       [](const TensorSpan& a, const TensorSpan& b) { return a.begin < b.begin; });
      std::int64_t end = -1;
      for (TensorSpan& tensor_span : tensor_spans) {
        if (tensor_span.begin >= end) groups.emplace_back();
        end = std::max(end, tensor_span.end);
        groups.back().push_back(std::move(tensor_span));
      }
    }
    // Sorts by tensor number, so that the file does not depend on addresses.
    const auto first = [](const std::vector<TensorSpan>& tensor_spans) {
      return std::min_element(tensor_spans.begin(), tensor_spans.end(),
                              [](const TensorSpan& a, const TensorSpan& b) { return a.number < b.number; })
          ->number;
    };
    std::sort(groups.begin(), groups.end(), [&](const auto& a, const auto& b) { return first(a) < first(b); });
    for (const auto& tensor_spans : groups) add_storage(tensor_spans);
  }

  /// Returns the location of tensor number `number` of the constructor's list.
  const StoredTensor& stored(std::size_t number) const { return tensors_[number]; }

  std::size_t num_storages() const { return storages_.size(); }
  /// Returns the contents of storage number `number` as a one-dimensional tensor on the CPU; copies it if it is on a
  /// device.
  at::Tensor storage(std::size_t number) const { return storages_[number].to(c10::kCPU); }

 private:
  struct TensorSpan {
    at::Tensor tensor;
    std::size_t number;       // index of the tensor in the list
    std::int64_t begin, end;  // element range in its memory; 0 and 0 if it is empty
  };

  void add_storage(const std::vector<TensorSpan>& tensor_spans) {
    const torch::NoGradGuard no_grad;
    const std::string key = std::to_string(storages_.size());
    const TensorSpan& first = tensor_spans.front();
    std::int64_t end = 0;
    for (const TensorSpan& tensor_span : tensor_spans) end = std::max(end, tensor_span.end);
    const std::int64_t num_elements = end - first.begin;
    const auto make_stored = [&](const at::Tensor& tensor, std::int64_t offset, std::int64_t number) {
      return StoredTensor{key, static_cast<std::uint64_t>(number), offset, tensor.sizes().vec(),
                          tensor.strides().vec()};
    };
    if (tensor_spans.size() == 1 && num_elements > first.tensor.numel()) {
      const at::Tensor dense = first.tensor.detach().contiguous();
      tensors_[first.number] = make_stored(dense, 0, dense.numel());
      return storages_.push_back(dense.view(-1));
    }
    for (const TensorSpan& tensor_span : tensor_spans)
      tensors_[tensor_span.number] = make_stored(tensor_span.tensor, tensor_span.begin - first.begin, num_elements);
    storages_.push_back(torch::empty({0}, first.tensor.options().requires_grad(false))
                            .set_(first.tensor.storage(), first.begin, {num_elements}, {1}));
  }

  std::vector<StoredTensor> tensors_;
  std::vector<at::Tensor> storages_;  // views on the original devices
};

class Pickler {
 public:
  /// `layout`: of the tensors of the value that dump() gets, in the order of collect_tensors().
  explicit Pickler(const StorageLayout& layout) : layout_(layout) {}

  std::string dump(const Value& value) {
    output_ = "\x80\x02";
    write(value, 1);
    output_ += '.';
    return std::move(output_);
  }

 private:
  [[noreturn]] static void throw_usage_error(const std::string& reason) {
    throw base::UsageError("cannot save " + reason);
  }

  void number(std::uint64_t value, std::size_t num_bytes) {
    for (std::size_t i = 0; i < num_bytes; ++i) output_ += static_cast<char>(value >> (8 * i));
  }
  void global(std::string_view module, std::string_view name) {
    ((output_ += 'c').append(module) += '\n').append(name) += '\n';
  }
  void ordered_dict() {
    global("collections", "OrderedDict");
    output_ += ")R";
  }

  void integer(std::int64_t value) {
    if (value >= 0 && value < 256) {
      output_ += 'K';
      number(static_cast<std::uint64_t>(value), 1);
    } else if (value == static_cast<std::int32_t>(value)) {
      output_ += 'J';
      number(static_cast<std::uint64_t>(value), 4);
    } else {
      output_ += "\x8a\x08";
      number(static_cast<std::uint64_t>(value), 8);
    }
  }

  void string(std::string_view value) {
    if (!base::is_utf8(value) || value.size() > files::kMaxPickleBytes)
      throw_usage_error("the string " + base::quoted(value, 80) + "; expected UTF-8 of at most 32 MiB");
    output_ += 'X';
    number(value.size(), 4);
    output_ += value;
  }

  void floating(double value) {
    const auto bits = std::bit_cast<std::uint64_t>(value);
    output_ += 'G';
    number(__builtin_bswap64(bits), 8);
  }

  // Writes bytes as a string with one character per byte, whose code point is the byte's value. Python encodes it as
  // Latin-1.
  void bytes(const std::string& value) {
    std::string latin1;
    for (const char c : value) {
      const auto byte = static_cast<unsigned char>(c);
      if (byte < 0x80) {
        latin1 += c;
      } else {
        latin1 += static_cast<char>(0xc0 | byte >> 6);
        latin1 += static_cast<char>(0x80 | (byte & 0x3f));
      }
    }
    global("_codecs", "encode");
    string(latin1);
    string("latin1");
    output_ += "\x86R";
  }

  void numbers(const std::vector<std::int64_t>& values) {
    output_ += '(';
    for (const auto value : values) integer(value);
    output_ += 't';
  }

  void tensor(const at::Tensor& tensor) {
    const StoredTensor& stored = layout_.stored(num_tensors_++);
    const TorchDtype& dtype = *find_torch_dtype(tensor.scalar_type());
    const bool is_untyped = dtype.storage.empty();
    global("torch._utils", is_untyped ? "_rebuild_tensor_v3" : "_rebuild_tensor_v2");
    output_ += "((";
    string("storage");
    is_untyped ? global("torch.storage", "UntypedStorage") : global("torch", dtype.storage);
    string(stored.storage);
    string("cpu");
    integer(static_cast<std::int64_t>(stored.num_elements * (is_untyped ? dtype.num_bytes : 1)));
    output_ += "tQ";
    integer(stored.offset);
    numbers(stored.sizes);
    numbers(stored.strides);
    output_ += tensor.requires_grad() ? "\x88" : "\x89";
    ordered_dict();
    if (is_untyped) global("torch", dtype.name);
    output_ += "tR";
  }

  void sequence(const Sequence& value, std::size_t depth) {
    if (value.kind == Sequence::Kind::kTuple) {
      output_ += '(';
      for (const Value& item : value.items) write(item, depth + 1);
      output_ += 't';
      return;
    }
    if (value.kind == Sequence::Kind::kSet) global("__builtin__", "set");
    output_ += "](";
    for (const Value& item : value.items) write(item, depth + 1);
    output_ += 'e';
    if (value.kind == Sequence::Kind::kSet) output_ += "\x85R";
  }

  void dict(const Dict& value, std::size_t depth) {
    std::set<std::string> names;
    std::set<std::int64_t> numbers;
    if (value.ordered)
      ordered_dict();
    else
      output_ += '}';
    output_ += '(';
    for (const auto& item : value.items) {
      const auto* const name = item.key.as<std::string>();
      const auto* const integer = item.key.as<std::int64_t>();
      if (item.key.as<Sequence>() || item.key.as<Dict>() || item.key.as<at::Tensor>())
        throw_usage_error("a dictionary whose key is " + std::string(kind_of(item.key)) +
                          "; expected a string, a number, a bool, bytes or None");
      if ((name && !names.insert(*name).second) || (integer && !numbers.insert(*integer).second))
        throw_usage_error("a dictionary that has the key " +
                          (name ? base::quoted(*name, 80) : std::to_string(*integer)) + " twice");
      write(item.key, depth + 1);
      write(item.value, depth + 1);
    }
    output_ += 'u';
  }

  void write(const Value& value, std::size_t depth) {
    if (depth > files::kMaxTreeDepth) throw_usage_error("values that are nested deeper than the limit of 64 levels");
    if (const auto* const it = value.as<bool>()) output_ += *it ? "\x88" : "\x89";
    if (const auto* const it = value.as<std::int64_t>()) integer(*it);
    if (const auto* const it = value.as<double>()) floating(*it);
    if (const auto* const it = value.as<std::string>()) string(*it);
    if (const auto* const it = value.as<ByteString>()) bytes(it->bytes);
    if (const auto* const it = value.as<Sequence>()) sequence(*it, depth);
    if (const auto* const it = value.as<Dict>()) dict(*it, depth);
    if (const auto* const it = value.as<at::Tensor>()) tensor(*it);
    if (value.as<None>()) output_ += 'N';
  }

  const StorageLayout& layout_;
  std::size_t num_tensors_ = 0;  // written so far
  std::string output_;
};

void collect_tensors(const Value& value, std::vector<at::Tensor>& tensors, std::size_t depth) {
  if (depth > files::kMaxTreeDepth)
    throw base::UsageError("cannot save values that are nested deeper than the limit of 64 levels");
  if (const auto* const tensor = value.as<at::Tensor>()) tensors.push_back(*tensor);
  if (const auto* const sequence = value.as<Sequence>())
    for (const Value& item : sequence->items) collect_tensors(item, tensors, depth + 1);
  if (const auto* const dict = value.as<Dict>())
    for (const auto& item : dict->items) collect_tensors(item.value, tensors, depth + 1);
}

// The output of torch's writer. Stores an error until rethrow(), because an exception must not pass through the
// writer's C code.
class ArchiveOutput {
 public:
  explicit ArchiveOutput(files::AtomicFile& file) : file_(file) {}

  std::size_t write(const void* data, std::size_t num_bytes) {
    try {
      if (!error_) file_.write(data, num_bytes);
    } catch (...) {
      error_ = std::current_exception();
    }
    return num_bytes;
  }
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  files::AtomicFile& file_;
  std::exception_ptr error_;
};

}  // namespace

void save_torch_file(const Value& value, const std::string& path) {
  std::vector<at::Tensor> tensors;
  collect_tensors(value, tensors, 1);
  const StorageLayout layout(tensors);
  const std::string pickle = Pickler(layout).dump(value);
  if (pickle.size() > files::kMaxPickleBytes)
    throw base::UsageError("cannot save " + path + ": the pickle of the values has " + std::to_string(pickle.size()) +
                           " bytes; expected at most 32 MiB");
  files::AtomicFile file(path);
  ArchiveOutput output(file);
  {
    caffe2::serialize::PyTorchStreamWriter writer(
        [&](const void* data, std::size_t num_bytes) { return output.write(data, num_bytes); });
    const auto record = [&](const std::string& name, const void* data, std::size_t num_bytes) {
      writer.writeRecord(name, data, num_bytes);
      output.rethrow();
    };
    record("data.pkl", pickle.data(), pickle.size());
    record("byteorder", "little", 6);
    for (std::size_t i = 0; i < layout.num_storages(); ++i) {
      const at::Tensor bytes = layout.storage(i);
      record("data/" + std::to_string(i), bytes.const_data_ptr(), bytes.nbytes());
    }
    writer.writeEndOfFile();
  }
  output.rethrow();
  file.commit();
}

}  // namespace lockstep::checkpoint::inline torch_file

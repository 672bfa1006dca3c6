// Writes files that torch.load(weights_only=True) reads.
#include <caffe2/serialize/inline_container.h>
#include <torch/types.h>

#include <exception>

#include "lockstep/base/error.h"
#include "lockstep/checkpoint/files/atomic_file.h"
#include "lockstep/checkpoint/files/limits.h"
#include "lockstep/checkpoint/torch_file/storage_layout.h"
#include "lockstep/checkpoint/torch_file/torch_file.h"

namespace lockstep::checkpoint::inline torch_file {
namespace {

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
  std::size_t number = 0;
  const std::string pickle = to_pickle(value, [&](const at::Tensor&) { return layout.stored(number++); });
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

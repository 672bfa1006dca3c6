// The order and position of a loader. The batches themselves are made by torch's DataLoader.
#include <pybind11/stl.h>

#include "lockstep/comm/group.h"
#include "lockstep/data/loader_core.h"
#include "lockstep/data/sampler.h"
#include "python/src/bindings.h"
#include "python/src/state.h"

namespace lockstep::python {
namespace {

using comm::Group;

data::ShardMode mode_from_name(const std::string& name) {
  if (name == "pad") return data::ShardMode::kPad;
  if (name == "drop") return data::ShardMode::kDrop;
  if (name == "exact") return data::ShardMode::kExact;
  throw base::UsageError("mode is \"" + name + "\"; expected \"pad\", \"drop\" or \"exact\"");
}

/// One pass over an epoch: the indices of its batches, which torch's workers read ahead, and the count of those that
/// the program has received.
struct Pass {
  std::shared_ptr<data::BatchIterator> batches;
};

/// A LoaderCore whose batches are empty.
struct LoaderPositions {
  LoaderPositions(std::uint64_t num_samples, const Group* world, const data::LoaderOptions& options)
      : core(std::make_shared<data::LoaderCore>(
            num_samples, world ? data::DataShard{world->rank(), world->size()} : data::DataShard{}, options,
            [](std::uint64_t) -> data::BatchMaker {
              return [](const auto&, const auto&) { return std::make_shared<bool>(); };
            },
            [](void*, const auto&) {}, world ? data::detail::make_batch_counter(*world, options) : nullptr)) {}

  const std::shared_ptr<data::LoaderCore> core;
};

}  // namespace

void bind_data(py::module_& module) {
  py::class_<Pass, Holder<Pass>>(module, "Pass")
      .def("num_batches", [](const Pass& self) { return self.batches->plan().num_batches(); })
      .def("indices", [](const Pass& self, std::uint64_t batch) { return self.batches->plan().indices(batch); })
      .def(
          "receive", [](const Pass& self) { return self.batches->next() != nullptr; },
          "Counts the next batch as drawn; after the last one, the epoch as finished.");
  py::class_<LoaderPositions, Holder<LoaderPositions>>(module, "LoaderPositions")
      .def(py::init([](std::uint64_t num_samples, const std::optional<Group>& world, std::int64_t batch_size,
                       std::uint64_t seed, bool shuffle, const std::string& mode, bool drop_last) {
        return Holder<LoaderPositions>(new LoaderPositions(num_samples, world ? &*world : nullptr,
                                                           data::LoaderOptions{.batch_size = batch_size,
                                                                               .seed = seed,
                                                                               .shuffle = shuffle,
                                                                               .mode = mode_from_name(mode),
                                                                               .drop_last = drop_last}));
      }))
      .def("start", [](const LoaderPositions& self, std::uint64_t epoch) { return Pass{self.core->start(epoch)}; })
      .def("resume", [](const LoaderPositions& self) { return Pass{self.core->resume()}; })
      .def("next_epoch", [](const LoaderPositions& self) { return self.core->next_epoch(); })
      .def("batches_per_epoch", [](const LoaderPositions& self) { return self.core->batches_per_epoch(); })
      .def("is_exact", [](const LoaderPositions& self) { return self.core->is_exact(); })
      .def("epoch", [](const LoaderPositions& self) { return self.core->position().epoch; })
      .def("samples_drawn", [](const LoaderPositions& self) { return self.core->position().samples_drawn; })
      .def("state_dict", [](const LoaderPositions& self) { return data::to_state_dict(self.core->position()); })
      .def("load_state_dict", [](const LoaderPositions& self, const py::dict& state) {
        self.core->restore(data::position_from_state_dict(python::state_dict(state)));
      });
  module.def("epoch_indices", [](std::uint64_t num_samples, int rank, int size, std::uint64_t seed, bool shuffle,
                                 const std::string& mode, std::uint64_t epoch) {
    const data::EpochOrder order =
        data::Sampler(num_samples, {rank, size}, {.seed = seed, .shuffle = shuffle, .mode = mode_from_name(mode)})
            .epoch(epoch);
    std::vector<std::uint64_t> indices(order.size());
    for (std::uint64_t k = 0; k < indices.size(); ++k) indices[k] = order[k];
    return indices;
  });
}

}  // namespace lockstep::python

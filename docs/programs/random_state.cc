// The program of docs/how-to/random-state.md: seeds, and random numbers in a dataset.
//   lockstep run -n 2 docs_random_state
#include <lockstep/data/sample_rng.h>
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include "docs/programs/small_training.h"

namespace {

// docs: begin dataset
class Flipped {
 public:
  explicit Flipped(std::uint64_t seed) : seed_(seed) {}
  std::uint64_t size() const { return 40; }
  void set_epoch(std::uint64_t epoch) { epoch_ = epoch; }  // called by the loader
  torch::Tensor get(std::size_t index) {
    lockstep::data::SampleRng random(seed_, epoch_, index);
    const torch::Tensor image = torch::arange(8) + static_cast<std::int64_t>(index);
    return random.uniform_int(2) == 1 ? image.flip(0) : image;
  }

 private:
  std::uint64_t seed_;
  std::uint64_t epoch_ = 0;
};
// docs: end dataset

torch::Tensor first_epoch(const lockstep::Group& world, int num_workers) {
  auto loader =
      lockstep::data::make_loader(Flipped(7), world, {.batch_size = 4, .seed = 1, .num_workers = num_workers});
  std::vector<torch::Tensor> batches;
  for (auto& batch : loader) batches.push_back(batch);
  return torch::cat(batches);
}

}  // namespace

int main() {
  // docs: begin seeds
  lockstep::Group world = lockstep::init();  // before the first seed: it selects the GPU
  lockstep::seed_everything(1);              // the same weights on all ranks
  auto net = make_net();                     // (rank 0's would be copied anyway)
  lockstep::DistributedDataParallel ddp(net, world);
  const auto rank = static_cast<std::uint64_t>(world.rank());
  lockstep::seed_everything(1 + rank);  // different dropout on each rank
  auto loader = lockstep::data::make_loader(Flipped(7), world, {.batch_size = 4, .seed = 1});  // the same on all ranks
  // docs: end seeds
  expect(loader.batches_per_epoch() > 0, "batches");
  torch::Tensor all = torch::empty({world.size()});
  world.all_gather(all, torch::rand({1}));
  expect(world.size() == 1 || !all[0].equal(all[1]), "different numbers on different ranks");
  expect(first_epoch(world, 0).equal(first_epoch(world, 3)), "the same samples with any number of workers");
}

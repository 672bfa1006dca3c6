// The program of docs/how-to/from-libtorch.md: files of plain libtorch, and its DataLoader.
//   lockstep run -n 2 docs_from_libtorch FOLDER
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include "docs/programs/small_training.h"

namespace {

// A dataset of libtorch: sample i is a vector of eight values i.
struct Numbers : torch::data::datasets::Dataset<Numbers> {
  torch::data::Example<> get(std::size_t i) override {
    return {torch::full({8}, static_cast<float>(i)), torch::tensor(static_cast<std::int64_t>(i))};
  }
  std::optional<std::size_t> size() const override { return 40; }
};

void load_old_files(const lockstep::Group& world, const std::string& folder) {
  auto net = make_net();
  const std::string path = folder + "/old" + std::to_string(world.rank()) + ".pt";
  torch::save(net, path);  // as a program that used plain libtorch did
  // docs: begin old
  auto restored = make_net();
  lockstep::load(restored, path);  // what torch::save() wrote in C++, or torch.save() in Python, or safetensors
  // docs: end old
  expect(restored->parameters()[0].equal(net->parameters()[0]), "the saved values");
}

void use_data_loader_of_libtorch(lockstep::Group& world) {
  auto net = make_net();
  lockstep::DistributedDataParallel ddp(net, world);
  torch::optim::SGD optimizer(net->parameters(), 1e-3);
  std::size_t num_samples = 0;
  // docs: begin loader
  auto dataset = Numbers().map(torch::data::transforms::Stack<>());
  torch::data::samplers::DistributedRandomSampler sampler(*dataset.size(), static_cast<std::size_t>(world.size()),
                                                          static_cast<std::size_t>(world.rank()));
  auto loader = torch::data::make_data_loader(dataset, sampler, torch::data::DataLoaderOptions(4));
  for (auto& example : *loader) {
    optimizer.zero_grad();
    net->forward(example.data).pow(2).mean().backward();
    optimizer.step();
    num_samples += static_cast<std::size_t>(example.data.size(0));
    world.step();  // ranks whose numbers of steps differ throw a DesyncError
  }
  // docs: end loader
  expect(num_samples == 40 / static_cast<std::size_t>(world.size()), "each rank has its own samples");
}

}  // namespace

int main(int argc, char** argv) {
  lockstep::Group world = lockstep::init();
  expect(argc == 2, "a folder");
  load_old_files(world, argv[1]);
  use_data_loader_of_libtorch(world);
}

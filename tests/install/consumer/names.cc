// A program with `using namespace lockstep` whose own functions and aliases have names that Lockstep uses as well.
// BOTH_DIRECTIVES adds `using namespace torch`, which does not compile.
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <iostream>
#include <string>

using namespace lockstep;
#ifdef BOTH_DIRECTIVES
using namespace torch;
#endif

struct NetImpl : torch::nn::Module {
  NetImpl() : layer(register_module("layer", torch::nn::Linear(2, 1))) {}
  torch::Tensor forward(const torch::Tensor& x) { return layer(x); }
  torch::nn::Linear layer;
};
TORCH_MODULE(Net);

#ifdef BOTH_DIRECTIVES
nn::SyncBatchNorm make_norm(const Group& world) { return nn::SyncBatchNorm(world, torch::nn::BatchNormOptions(2)); }
#endif

std::string saved;

void save(const Net& net, const std::string& path) { saved = path + " " + std::to_string(net->parameters().size()); }
void load(Net& net) { net->layer->bias.data().fill_(2); }
void train(Net& net, Group& world) {
  DistributedDataParallel ddp(net, world);
  optim::SGD optimizer(ddp, {.lr = 0.1});
  net->forward(torch::ones({3, 2})).sum().backward();
  clip_grad_norm(optimizer, 1.0);
  optimizer.step();
}
double evaluate(Net& net) { return net->forward(torch::zeros({1, 2})).item<double>(); }
void test(Net& net) {
  if (evaluate(net) != 2) throw std::runtime_error("load() of this file was not called");
}
void launch(int) {}
int run() {
  Group world = init();
  Net net;
  train(net, world);
  load(net);
  save(net, "file");
  test(net);
  launch(0);
  return saved == "file 2" ? 0 : 1;
}

// In a namespace, aliases hide Lockstep's namespaces of the same names.
namespace app {
namespace nn = torch::nn;
namespace optim = torch::optim;
namespace data = torch::data;

bool has_torchs_classes() {
  nn::Linear linear(2, 1);
  optim::SGD optimizer(linear->parameters(), 0.1);
  return data::DataLoaderOptions(4).batch_size() == 4 && optimizer.size() == 2;
}
}  // namespace app

int main() {
  const int code = run();
  std::cout << "names: " << (code == 0 && app::has_torchs_classes() ? "as expected" : "wrong functions") << std::endl;
  return code;
}

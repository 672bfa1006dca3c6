// Exchanges models, optimizer states and every kind of value with Python's torch, and names what is rejected. Dtypes
// and memory layouts: python_dtype_matrix_test.cc.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <filesystem>

#include "lockstep/checkpoint/module_io.h"
#include "lockstep/checkpoint/torch_file/torch_file.h"
#include "tests/support/temp_dir.h"

namespace lockstep::checkpoint {
namespace {

constexpr const char* kWriter = R"(
import sys, collections
import torch
folder = sys.argv[1]
torch.manual_seed(1)
net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for _ in range(3):
    optimizer.zero_grad(); net(torch.randn(4, 2)).sum().backward(); optimizer.step()
torch.save(net.state_dict(), folder + '/model.pt')
torch.save({'module.' + k: v for k, v in net.state_dict().items()}, folder + '/wrapped.pt')
schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
training = {'optimizer': optimizer.state_dict(), 'schedule': dict(schedule.state_dict().items()), 'epoch': 3}
torch.save(training, folder + '/optimizer.pt')
torch.save({'set': {1, 2}, 'bytes': b'\x00\xff', 'none': None, 'list': [True, False, 1.5, -2**40, 2**63 - 1],
            'tuple': (1, 'ä'), 'size': torch.Size([1, 2]), 3: 'three',
            'counter': collections.Counter({2: 1}), 'nested': collections.OrderedDict(a={'b': []}),
            'parameter': torch.nn.Parameter(torch.ones(2)),
            'wants': torch.ones(2, requires_grad=True)}, folder + '/values.pt')
torch.save({'x': torch.ones(2).to_sparse()}, folder + '/sparse.pt')
torch.save({'x': torch.ones(2, 2).to_sparse_csr()}, folder + '/csr.pt')
torch.save({'x': torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8)}, folder + '/quantized.pt')
class Mine: pass
torch.save({'x': Mine()}, folder + '/object.pt')
torch.save(net, folder + '/module.pt')
torch.save(torch.ones(3), folder + '/old.pt', _use_new_zipfile_serialization=False)
)";

constexpr const char* kReader = R"(
import sys
import torch
folder = sys.argv[1]
load = lambda name: torch.load(folder + '/' + name, weights_only=True)
net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
want = load('model.pt')
net.load_state_dict(load('our_model.pt'))
assert all(torch.equal(v, want[k]) for k, v in net.state_dict().items())
optimizer = torch.optim.AdamW(net.parameters())
optimizer.load_state_dict(load('our_optimizer.pt')['optimizer'])
was, now = load('optimizer.pt')['optimizer'], optimizer.state_dict()
assert was['param_groups'] == now['param_groups'], now['param_groups']
assert was['state'].keys() == now['state'].keys()
for i, state in was['state'].items():
    assert all(torch.equal(v, now['state'][i][k]) for k, v in state.items())
was, now = load('values.pt'), load('our_values.pt')
for name in ('parameter', 'wants'):
    a, b = was.pop(name), now.pop(name)
    assert b.requires_grad and torch.equal(a, b), name
assert now == {**was, 'size': (1, 2)}, now
assert type(now['nested']).__name__ == 'OrderedDict'
)";

std::string python() { return LOCKSTEP_TEST_PYTHON; }

int run(const tests::TempDir& folder, const char* script) {
  const auto path = folder.write("script.py", script);
  return std::system(("timeout 100 \"" + python() + "\" " + path + " " + folder.path()).c_str());
}

TEST(PythonTorchFile, RoundTripsThroughPython) {
  if (std::system(("\"" + python() + "\" -c 'import torch' >/dev/null 2>&1").c_str()) != 0)
    GTEST_SKIP() << "SKIPPED: the Python package torch is not in .deps/python";
  const tests::TempDir folder;
  ASSERT_EQ(run(folder, kWriter), 0);

  torch::nn::Sequential net(torch::nn::Linear(2, 3), torch::nn::BatchNorm1d(3)),
      other(torch::nn::Linear(2, 3), torch::nn::BatchNorm1d(3));
  EXPECT_TRUE(load(net, folder / "model.pt").unexpected.empty());
  load(other, folder / "wrapped.pt");
  EXPECT_TRUE(net->parameters()[0].equal(other->parameters()[0]));
  save(net, folder / "our_model.pt");
  for (const char* const name : {"optimizer", "values"})
    save_torch_file(load_torch_file(folder / (std::string(name) + ".pt")),
                    folder / ("our_" + std::string(name) + ".pt"));
  EXPECT_EQ(run(folder, kReader), 0);

  const Value trained = load_torch_file(folder / "optimizer.pt");
  const Dict& groups = *trained.as<Dict>()->find("optimizer")->as<Dict>();
  EXPECT_EQ(*groups.find("param_groups")->as<Sequence>()->items.at(0).as<Dict>()->find("lr")->as<double>(), 1e-3);
  EXPECT_EQ(groups.find("state")->as<Dict>()->find(0)->as<Dict>()->find("step")->as<at::Tensor>()->item<float>(), 3);

  const auto reason = [&](const char* name) {
    return tests::message_of<base::Error>([&] { load_torch_file(folder / name); });
  };
  for (const auto& [name, expected] :
       {std::pair("sparse.pt", "unsupported global \"torch._utils._rebuild_sparse_tensor\""),
        std::pair("csr.pt", "unsupported global \"torch._utils._rebuild_sparse_tensor\""),
        std::pair("quantized.pt", "unsupported global \"torch._utils._rebuild_qtensor\""),
        std::pair("object.pt", "unsupported global \"__main__.Mine\""),
        std::pair("module.pt", "unsupported global \"torch.nn.modules."), std::pair("old.pt", "before PyTorch 1.6")})
    EXPECT_NE(reason(name).find(expected), std::string::npos) << name << ": " << reason(name);
}

}  // namespace
}  // namespace lockstep::checkpoint

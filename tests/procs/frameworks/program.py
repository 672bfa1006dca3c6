"""A training as users of a framework write it. Usage: program.py FRAMEWORK RANKS_PER_NODE NODES [STRATEGY]

FRAMEWORK is lightning, accelerate or transformers. Rank 0 prints the losses of its last steps."""

import sys
import tempfile

import torch
from torch.utils.data import DataLoader, TensorDataset

FRAMEWORK, DEVICES, NODES = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
STRATEGY = sys.argv[4] if len(sys.argv) > 4 else "ddp"


def dataset():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(128, 8, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True))


def show(rank, size, losses):
    if rank == 0:
        print(f"{FRAMEWORK}: {size} ranks,", *(f"{loss:.7f}" for loss in losses[-4:]), flush=True)


def lightning():
    if STRATEGY != "ddp":
        import lockstep.lightning
    import pytorch_lightning

    class Model(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.losses = torch.nn.Linear(8, 1), []

        def training_step(self, batch, _):
            loss = (self.net(batch[0]) - batch[1]).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            if STRATEGY == "lockstep-fused":
                return lockstep.optim.SGD(self.trainer.strategy.ddp, lr=0.01)
            return torch.optim.SGD(self.parameters(), lr=0.01)

    pytorch_lightning.seed_everything(1, verbose=False)
    model = Model()
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu",
        devices=DEVICES,
        num_nodes=NODES,
        strategy=STRATEGY.removesuffix("-fused"),
        max_epochs=2,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(dataset(), batch_size=4))
    assert trainer.model is model or STRATEGY == "ddp"
    show(trainer.global_rank, trainer.world_size, model.losses)


def accelerate():
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    accelerator = Accelerator(cpu=True)
    set_seed(1)
    net = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    net, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(dataset(), batch_size=4))
    losses = []
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = (net(x) - y).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
    show(accelerator.process_index, accelerator.num_processes, losses)


def transformers():
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    torch.manual_seed(1)
    config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=50)
    data = [{"input_ids": torch.randint(50, (8,)), "labels": torch.tensor(i % 2)} for i in range(64)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=4,
            num_train_epochs=1,
            learning_rate=0.01,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            seed=1,
        )
        trainer = Trainer(model=BertForSequenceClassification(config), args=arguments, train_dataset=data)
        result = trainer.train()
    show(arguments.process_index, arguments.world_size, [result.training_loss])


globals()[FRAMEWORK]()

"""A training as users of a framework write it: epochs with validation, logs of an epoch, checkpoints of the best model,
gradients that are accumulated and clipped, workers that load the data.

Usage: program.py FRAMEWORK RANKS_PER_NODE NODES [STRATEGY]
FRAMEWORK is lightning, fabric, accelerate or transformers. STRATEGY is one of Lightning, or backend: its own over the
backend "lockstep". Rank 0 prints losses."""

import importlib.util
import os
import sys
import tempfile

import torch
from torch.utils.data import DataLoader, TensorDataset

FRAMEWORK, DEVICES, NODES = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
STRATEGY = sys.argv[4] if len(sys.argv) > 4 else "ddp"
EPOCHS = int(os.environ.get("EPOCHS", "2"))
WORKERS = int(os.environ.get("WORKERS", "1"))
if importlib.util.find_spec("_lockstep_backend"):  # which an installed package registers by itself
    import _lockstep_backend

    _lockstep_backend.register()


def dataset(seed=1, count=96):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 8, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True))


def loaders(**options):
    options = {"batch_size": 4, "num_workers": WORKERS, **options}
    return DataLoader(dataset(), shuffle=True, **options), DataLoader(dataset(2, 32), **options)


def network():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def loss_of(net, batch):
    return (net(batch[0]) - batch[1]).square().mean()


def join_backend():
    """Accelerate and transformers know only torch's own backends, and use the process group that a program has made."""
    if STRATEGY == "backend":
        torch.distributed.init_process_group("lockstep")


def show(rank, size, losses):
    if rank == 0:
        print(f"{FRAMEWORK}: {size} ranks,", *(f"{loss:.7f}" for loss in losses[-4:]), flush=True)


def lightning():
    if STRATEGY != "ddp":
        import lockstep.lightning
    import pytorch_lightning
    from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
    from pytorch_lightning.strategies import DDPStrategy

    class Model(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.losses = network(), []

        def training_step(self, batch, _):
            loss = loss_of(self.net, batch)
            self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch, _):
            self.log("val_loss", loss_of(self.net, batch), sync_dist=True)
            self.log("val_count", len(batch[0]), sync_dist=True, reduce_fx="sum")

        def configure_optimizers(self):
            if STRATEGY == "lockstep-fused":
                return lockstep.optim.AdamW(self.trainer.strategy.ddp, lr=0.01)
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    pytorch_lightning.seed_everything(1, verbose=False)
    model = Model()
    strategy = STRATEGY.removesuffix("-fused")
    with tempfile.TemporaryDirectory() as folder:
        best = ModelCheckpoint(dirpath=folder, monitor="val_loss", save_last=True)
        trainer = pytorch_lightning.Trainer(
            accelerator="cpu",
            devices=DEVICES,
            num_nodes=NODES,
            strategy=DDPStrategy(process_group_backend="lockstep") if strategy == "backend" else strategy,
            max_epochs=EPOCHS,
            accumulate_grad_batches=2,
            gradient_clip_val=0.5,
            logger=False,
            callbacks=[best, EarlyStopping("val_loss")],
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, *loaders())
        found = trainer.validate(model, loaders()[1], ckpt_path="best", verbose=False)[0]
    assert trainer.model is model or strategy in ("ddp", "backend")
    logged = trainer.callback_metrics
    assert found["val_count"] == 32, found
    show(
        trainer.global_rank,
        trainer.world_size,
        [*model.losses[-2:], found["val_loss"], logged["val_loss"].item()],
    )


def fabric():
    if STRATEGY != "ddp":
        import lockstep.lightning  # noqa: F401
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy

    strategy = DDPStrategy(process_group_backend="lockstep") if STRATEGY == "backend" else STRATEGY
    one = Fabric(accelerator="cpu", devices=DEVICES, num_nodes=NODES, strategy=strategy)
    one.launch()
    one.seed_everything(1, verbose=False)
    net = network()
    net, optimizer = one.setup(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    train, validation = one.setup_dataloaders(*loaders())
    losses = []
    for _ in range(EPOCHS):
        for number, batch in enumerate(train):
            is_accumulating = number % 2 == 0
            with one.no_backward_sync(net, enabled=is_accumulating):
                loss = loss_of(net, batch)
                one.backward(loss / 2)
            if not is_accumulating:
                one.clip_gradients(net, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        with torch.no_grad():
            found = torch.stack([loss_of(net, batch) for batch in validation]).mean()
        losses.append(one.all_reduce(found, reduce_op="mean").item())
        assert one.all_reduce(torch.tensor(5), reduce_op="sum") == 5 * one.world_size
    with tempfile.TemporaryDirectory() as folder:
        file = one.broadcast(folder) + "/state.ckpt"
        one.save(file, {"net": net, "optimizer": optimizer})
        one.barrier()
        assert set(one.load(file)["net"]) == set(net.state_dict())
        one.barrier()
    show(one.global_rank, one.world_size, losses)


def accelerate():
    from accelerate import Accelerator
    from accelerate.utils import broadcast_object_list, set_seed

    join_backend()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(1)
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    net, optimizer, train, validation, schedule = accelerator.prepare(net, optimizer, *loaders(), schedule)
    losses = []
    for _ in range(EPOCHS):
        for batch in train:
            with accelerator.accumulate(net):
                loss = loss_of(net, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        with torch.no_grad():
            found = [accelerator.gather_for_metrics((net(x) - y).square()) for x, y in validation]
        assert sum(map(len, found)) == 32
        losses.append(torch.cat(found).mean().item())
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(broadcast_object_list([folder])[0])
        accelerator.wait_for_everyone()
    show(accelerator.process_index, accelerator.num_processes, losses)


def transformers():
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        EarlyStoppingCallback,
        Trainer,
        TrainingArguments,
    )

    join_backend()
    torch.manual_seed(1)
    config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=50)
    data = [{"input_ids": torch.randint(50, (8,)), "labels": torch.tensor(i % 2)} for i in range(64)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_grad_norm=0.5,
            num_train_epochs=EPOCHS,
            learning_rate=0.01,
            eval_strategy="epoch",
            save_strategy="epoch",
            load_best_model_at_end=True,
            save_only_model=True,
            dataloader_num_workers=WORKERS,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=1,
        )
        trainer = Trainer(
            model=BertForSequenceClassification(config),
            args=arguments,
            train_dataset=data[:48],
            eval_dataset=data[48:],
            compute_metrics=lambda found: {"accuracy": float((found[0].argmax(-1) == found[1]).mean())},
            callbacks=[EarlyStoppingCallback(2)],
        )
        result = trainer.train()
        found = trainer.evaluate()
    show(
        arguments.process_index,
        arguments.world_size,
        [result.training_loss, found["eval_loss"], found["eval_accuracy"]],
    )


globals()[FRAMEWORK]()

"""The program of docs/how-to/lightning-slurm.md. It checks that two epochs drew each sample once, across a restart."""

import functools
import logging
import pathlib
import time

import lockstep.lightning
import pytorch_lightning as pl
import torch

logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
pl.Trainer = functools.partial(pl.Trainer, logger=False, enable_progress_bar=False, enable_model_summary=False)
numbers = torch.arange(160)
dataset = torch.utils.data.TensorDataset(torch.randn(160, 4, generator=torch.Generator().manual_seed(1)), numbers)


class Base(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        x, drawn = batch
        with open(f"drawn.{self.global_rank}", "a") as file:
            print(*drawn.tolist(), file=file)
        if self.global_step == 5:
            pathlib.Path(f"ready.{self.global_rank}").touch()
        time.sleep(0.05)
        return self.net(x).square().mean()


# docs: begin trainer
class Model(Base):
    def train_dataloader(self):
        return lockstep.data.DataLoader(dataset, self.trainer.strategy.ddp.group, batch_size=4)

    def configure_optimizers(self):
        return lockstep.optim.AdamW(self.trainer.strategy.ddp, lr=1e-2)


saver = lockstep.lightning.SaveOnStopRequest("stopped.ckpt")
trainer = pl.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="lockstep",
    max_epochs=2,
    callbacks=[saver],
)
trainer.fit(Model(), ckpt_path=saver.ckpt_path)
# docs: end trainer

drawn = [int(word) for rank in range(2) for word in pathlib.Path(f"drawn.{rank}").read_text().split()]
assert sorted(drawn) == sorted([*range(160), *range(160)]), "each sample once per epoch, also in the interrupted one"
assert saver.ckpt_path, "the training was not interrupted"

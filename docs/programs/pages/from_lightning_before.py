"""The old program of docs/how-to/from-lightning.md. from_lightning.py imports this file and compares the losses."""

import functools
import os
import tempfile

import pytorch_lightning as pl
import torch


def make_dataset(count, seed):
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


def make_net():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def DataLoader(dataset, shuffle=False, **options):
    """A loader that draws the samples in the order of the dataset, so that the losses can be compared."""
    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    sampler = torch.utils.data.DistributedSampler(dataset, size, rank, shuffle=False)
    return torch.utils.data.DataLoader(dataset, sampler=sampler, **options)


train_set, val_set = make_dataset(80, 1), make_dataset(32, 2)
loss_function = torch.nn.functional.mse_loss
_folder = tempfile.TemporaryDirectory()
folder = _folder.name
os.chdir(folder)


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = make_net()

    def training_step(self, batch, batch_idx):
        x, y = batch
        return loss_function(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        loss = loss_function(self.net(x), y)
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


best = pl.callbacks.ModelCheckpoint(folder, monitor="val_loss")
quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)
pl.Trainer = functools.partial(pl.Trainer, use_distributed_sampler=False, **quiet)
# docs: begin trainer
trainer = pl.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_epochs=2,
    accumulate_grad_batches=2,
    gradient_clip_val=0.5,
    callbacks=[best],
)
# docs: end trainer
trainer.fit(
    Model(),
    DataLoader(train_set, batch_size=4, shuffle=True),
    DataLoader(val_set, batch_size=4),
)

val_loss = trainer.callback_metrics["val_loss"].item()
assert best.best_model_score.item() <= val_loss
checkpoint = trainer.strategy.broadcast(best.best_model_path)

"""The program of docs/how-to/accelerate-transformers.md for transformers: unchanged, and then over Lockstep."""

import tempfile

import torch

# docs: begin backend
import torch.distributed as dist

# docs: end backend
from accelerate.state import AcceleratorState
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import lockstep  # noqa: F401  in a build folder; an installed package registers the backend by itself

torch.manual_seed(1)
config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=50)
dataset = [{"input_ids": torch.randint(50, (8,)), "labels": torch.tensor(i % 2)} for i in range(64)]
folder = tempfile.TemporaryDirectory()


def train():
    torch.manual_seed(1)
    arguments = TrainingArguments(
        output_dir=folder.name,
        per_device_train_batch_size=4,
        num_train_epochs=2,
        learning_rate=0.01,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=1,
    )
    trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=dataset)
    loss = trainer.train().training_loss
    assert arguments.world_size > 1
    return loss, torch.distributed.get_backend()


unchanged, backend = train()
assert backend == "gloo"
torch.distributed.destroy_process_group()
AcceleratorState._reset_state(reset_partial_state=True)

# docs: begin backend
dist.init_process_group("lockstep")  # before TrainingArguments(...)
# docs: end backend

loss, backend = train()
assert backend == "lockstep"
assert abs(loss - unchanged) < 1e-5 * unchanged, (unchanged, loss)

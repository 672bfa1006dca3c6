"""Fine-tunes a model of gpt.py on another text, on hosts that a slow network connects. The hosts train apart, and every
--every steps they exchange what they have learned, as int8 (DiLoCo) or as the largest of 4096 numbers (SparseLoCo).

  lockstep run -H alpha:2,beta:2 python slow_network.py --corpus FILE --weights old.safetensors --save new.safetensors
"""

import argparse
import sys

import torch
from gpt import Windows, evaluate, rate_at, read_text
from gpt_model import SIZES, Gpt
from safetensors.torch import load_file, save_file

import lockstep

OUTER = {
    "int8": lockstep.DiLoCo(payload="int8"),
    "int4": lockstep.DiLoCo(payload="int4"),
    "sparse": lockstep.SparseLoCo(),
}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--corpus", help="text file whose characters are those of the first training")
    source.add_argument("--tokens", help="file of make_tokens.py, with the vocabulary of the first training")
    parser.add_argument("--weights", required=True, help="file of the model (safetensors), as gpt.py --save writes it")
    parser.add_argument("--save", required=True, help="write the tuned model to this file")
    parser.add_argument("--size", choices=SIZES, default="demo")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=4, help="windows per rank and step")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--every", type=int, default=30, help="steps between two exchanges of the hosts")
    parser.add_argument("--outer", choices=OUTER, default="int8", help="what the hosts send")
    parser.add_argument("--folder", help="keep checkpoints here; the same command resumes from the newest")
    return parser.parse_args()


def main():
    args = parse_arguments()
    world = lockstep.init()
    ids, symbols = read_text(args)
    size = SIZES[args.size]
    split = int(len(ids) * 0.95)
    windows, validation = Windows(ids[:split], size["block"]), Windows(ids[split:], size["block"])
    torch.manual_seed(1)
    model = Gpt(len(symbols), **size)
    model.load_state_dict(load_file(args.weights))
    model.to(world.device)
    before = evaluate(model, validation, world)

    ddp = lockstep.DistributedDataParallel(model, world, average_hosts_every=args.every, outer=OUTER[args.outer])
    optimizer = lockstep.optim.AdamW(ddp, lr=args.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, args.steps, 0.1))
    loader = lockstep.data.DataLoader(windows, world, batch_size=args.batch_size, seed=1)
    state = None
    step = 0
    if args.folder:
        # Each host saves its own model, optimizer and outer state, because "ddp" says that hosts differ.
        state = lockstep.checkpoint.TrainingState(world, f"{args.folder}/checkpoints")
        state.add("model", model).add("ddp", ddp).add("optimizer", optimizer).add("schedule", schedule)
        state.add("loader", loader).add("step", 0).add_random_state().resume(train_on=True)
        step = state["step"]
    while step < args.steps:
        for tokens, following in loader:
            model.loss(tokens.to(world.device), following.to(world.device)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            step += 1
            stop = world.stop_requested()
            if state:
                state["step"] = step
                if stop or step % 100 == 0:
                    state.save_async(step)
            if stop:
                sys.exit(lockstep.PREEMPTED)
            if step % 100 == 0:
                # With the parameters that all hosts had in common after the last exchange.
                loss = ddp.with_global_copy(lambda: evaluate(model, validation, world))
                if world.rank == 0:
                    print(f"step {step}: validation loss {loss:.4f}", flush=True)
            if step == args.steps:
                break
    ddp.average_hosts()  # the last exchange: now all hosts have the same model
    after = evaluate(model, validation, world)
    if world.rank == 0:
        print(f"validation loss after: {after:.4f} (before: {before:.4f})")
        save_file(model.state_dict(), args.save, metadata={"format": "pt"})


if __name__ == "__main__":
    main()

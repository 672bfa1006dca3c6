"""The old program of docs/how-to/from-torch-ddp.md with one word changed, over the backend "lockstep"."""

import pathlib

import lockstep  # noqa: F401  in a build folder; an installed package registers the backend by itself

source = pathlib.Path(__file__).with_name("from_torch_ddp_before.py").read_text(encoding="utf-8")
changed = source.replace('init_process_group("gloo")', 'init_process_group("lockstep")')
assert changed != source
names = {}
exec(compile(changed, "train.py", "exec"), names)
assert names["backend"] == "lockstep"

"""examples/cluster/ray_train.py: with Ray if it is installed, else with a TorchTrainer that does what Ray's does."""

import importlib.util
import os
import pathlib
import socket
import subprocess
import sys

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples/cluster/ray_train.py"
# ray/train/torch/config.py of Ray 2.60: the variables, then the process group, then the function.
TRAINER = """
import dataclasses, os, torch.distributed as dist, torch.multiprocessing as mp

@dataclasses.dataclass
class ScalingConfig:
    num_workers: int
    use_gpu: bool = False

def worker(rank, size, function, config):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["TEST_PORT"])
    dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=size)
    function(config)
    dist.destroy_process_group()

@dataclasses.dataclass
class TorchTrainer:
    function: object
    train_loop_config: dict
    scaling_config: ScalingConfig

    def fit(self):
        size = self.scaling_config.num_workers
        mp.spawn(worker, (size, self.function, self.train_loop_config), size)
"""


def test_ray_train(tmp_path):
    path = [str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    if importlib.util.find_spec("ray") is None:
        package = tmp_path / "ray/train/torch"
        package.mkdir(parents=True)
        (tmp_path / "ray/__init__.py").touch()
        (tmp_path / "ray/train/__init__.py").write_text(TRAINER)
        (package / "__init__.py").write_text("from ray.train import TorchTrainer\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--workers", "2", "--steps", "151"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "TEST_PORT": port, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    first, last = (float(said.split(f"step {step} of 2 workers: loss ")[1].split()[0]) for step in (0, 150))
    assert last < first / 2, said

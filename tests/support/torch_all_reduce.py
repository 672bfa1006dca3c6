# A script for torch.distributed, as users of torchrun write it, without any use of Lockstep.
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
value = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(value)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: sum {value.item():.0f}")
dist.destroy_process_group()

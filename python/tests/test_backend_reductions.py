"""Which reductions of which dtypes the backend "lockstep" has, beside Gloo and NCCL."""

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from test_backend import process_group, same

import lockstep


def reductions(tensor, op, group):
    """The results of all_reduce, reduce to rank 0 and reduce_scatter: None for what the backend refuses."""
    summed, rooted, part = tensor.clone(), tensor.clone(), tensor.new_empty(tensor.numel() // dist.get_world_size())
    results = []
    for result, call in (
        (summed, lambda: dist.all_reduce(summed, op, group=group)),
        (part, lambda: dist.reduce_scatter_tensor(part, tensor.clone(), op, group=group)),
        (rooted if dist.get_rank() == 0 else tensor, lambda: dist.reduce(rooted, 0, op, group=group)),
    ):
        try:
            call()
            results.append(result)
        except (RuntimeError, ValueError):
            results.append(None)
    return results


@on_ranks(1, 2, 3)
def test_whatever_gloo_reduces(world):
    with process_group() as (rank, size):
        gloo = dist.new_group(backend="gloo")
        floats = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2"
        integers = "int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool"
        taken = []
        for dtype in (getattr(torch, name) for name in f"{floats} {integers} complex64 complex128".split()):
            tensor = ((torch.arange(6) * 5 + rank) % 7).to(dtype)
            for op in (getattr(dist.ReduceOp, name) for name in "SUM AVG PRODUCT MIN MAX BAND BOR BXOR".split()):
                for found, wanted in zip(reductions(tensor, op, None), reductions(tensor, op, gloo), strict=True):
                    if wanted is not None:
                        taken.append((dtype, op))
                        assert found is not None, (dtype, op)
                        torch.testing.assert_close(found, wanted)
        assert len(taken) >= 120, taken


@on_ranks(1, 2, 3)
def test_what_nccl_reduces_besides(world):
    """The mean of integers is rounded toward zero; PREMUL_SUM multiplies first."""
    with process_group() as (rank, size):
        for dtype in (torch.int64, torch.int32, torch.int8, torch.uint8):
            sign = 1 if dtype == torch.uint8 else -1
            tensor = torch.tensor([5, 1, 4, 3, 2, 6]).mul(sign).add(sign * rank).to(dtype)
            total = sum(torch.tensor([5, 1, 4, 3, 2, 6]).mul(sign).add(sign * one) for one in range(size))
            mean = total.div(size, rounding_mode="trunc").to(dtype)
            summed, part, rooted = reductions(tensor, dist.ReduceOp.AVG, None)
            same(summed, mean)
            same(part, mean.chunk(size)[rank])
            same(rooted, mean if rank == 0 else tensor)
        tensors = [torch.full((4,), 3), torch.full((2,), 2)]
        dist.all_reduce_coalesced(tensors, dist.ReduceOp.AVG)
        same(tensors[0], torch.full((4,), 3))
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            for factor in (0.5, torch.tensor([0.5], dtype=dtype)):
                given = torch.arange(6, dtype=dtype) + rank
                expected = sum((torch.arange(6, dtype=dtype) + one) * 0.5 for one in range(size))
                summed, part, rooted = reductions(given, dist._make_nccl_premul_sum(factor), None)
                same(summed, expected)
                same(part, expected.chunk(size)[rank])
                same(rooted, expected if rank == 0 else given)
                same(given, torch.arange(6, dtype=dtype) + rank)
        with pytest.raises(lockstep.UsageError, match="floating-point numbers for PREMUL_SUM"):
            dist.all_reduce(torch.ones(3, dtype=torch.int64), dist._make_nccl_premul_sum(2.0))
        with pytest.raises(lockstep.UsageError, match="numbers for AVG"):
            dist.all_reduce(torch.ones(3, dtype=torch.bool), dist.ReduceOp.AVG)

"""Hand-written PyTorch: each function makes the model parallel one way and returns its training step, the global batch in, the loss out.

The ranks of a host follow each other; the mesh is (host, local). A step returns the mean loss of what this rank saw, None if it saw none.
Optimizers are made after sharding, data parallelism averages the gradients of equal parts of the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from gpt import (
    BATCH,
    HIDDEN,
    LAYERS,
    LEARNING_RATE,
    SEQUENCE,
    VOCABULARY,
    next_token_loss,
    plain_model,
    transformers_model,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

Step = Callable[[torch.Tensor], "float | None"]


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), LEARNING_RATE)


def _share(tokens: torch.Tensor, index: int, count: int) -> torch.Tensor:
    return tokens.chunk(count)[index]


def _data_parallel_step(model: nn.Module) -> Step:
    """Of a model of transformers that reduces its own gradients over all ranks."""
    optimizer = _adamw(model)

    def step(tokens: torch.Tensor) -> float:
        own = _share(tokens, dist.get_rank(), dist.get_world_size())
        loss = model(input_ids=own, labels=own).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def ddp(mesh: DeviceMesh) -> Step:
    return _data_parallel_step(DistributedDataParallel(transformers_model()))


def fsdp2(mesh: DeviceMesh) -> Step:
    return _sharded(init_device_mesh("cpu", (mesh.size(),)))


def hsdp(mesh: DeviceMesh) -> Step:
    """Replicated across hosts, sharded inside of one."""
    return _sharded(mesh)


def _sharded(mesh: DeviceMesh) -> Step:
    model = transformers_model()
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _data_parallel_step(model)


def _blocks(model: nn.Sequential) -> list[nn.Module]:
    return list(model)[1 : 1 + LAYERS]


def _tensor_parallel(model: nn.Sequential, mesh: DeviceMesh) -> None:
    """Blocks as Megatron splits them, logits split on the vocabulary."""
    columns = ColwiseParallel()
    for block in _blocks(model):
        names = {f"attention.{name}": columns for name in "qkv"}
        parallelize_module(
            block, mesh, {**names, "attention.proj": RowwiseParallel(), "up": columns, "down": RowwiseParallel()}
        )
    head = ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model[-1], mesh, head)


def _plain_step(model: nn.Module, share: Callable[[torch.Tensor], torch.Tensor]) -> Step:
    optimizer = _adamw(model)

    def step(tokens: torch.Tensor) -> float:
        own = share(tokens)
        with loss_parallel():
            loss = next_token_loss(model(own), own)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def tp(mesh: DeviceMesh) -> Step:
    """Over all ranks."""
    model = plain_model(transformers_model())
    _tensor_parallel(model, init_device_mesh("cpu", (mesh.size(),)))
    return _plain_step(model, lambda tokens: tokens)


def tp_fsdp2(mesh: DeviceMesh) -> Step:
    """Tensor-parallel inside of a host, ZeRO-2 by FSDP2 across hosts."""
    model = plain_model(transformers_model())
    _tensor_parallel(model, mesh["local"])
    for block in _blocks(model):
        fully_shard(block, mesh=mesh["host"], reshard_after_forward=False)
    fully_shard(model, mesh=mesh["host"], reshard_after_forward=False)
    return _plain_step(model, lambda tokens: _share(tokens, mesh.get_local_rank("host"), mesh["host"].size()))


def pipeline(microbatches: int) -> Callable[[DeviceMesh], Step]:
    """1F1B over all ranks, a stage each."""
    return lambda mesh: _pipeline_step(init_device_mesh("cpu", (mesh.size(),)), None, microbatches)


def pipeline_ddp(microbatches: int) -> Callable[[DeviceMesh], Step]:
    """1F1B with a stage on each host, DDP inside of it."""
    return lambda mesh: _pipeline_step(mesh["host"], mesh["local"], microbatches)


def _pipeline_step(stages: DeviceMesh, copies: DeviceMesh | None, microbatches: int) -> Step:
    count, index = stages.size(), stages.get_local_rank()
    copy, num_copies = (copies.get_local_rank(), copies.size()) if copies is not None else (0, 1)
    layers = list(plain_model(transformers_model()))
    ends = [1 + round(LAYERS * stage / count) for stage in range(count + 1)]
    ends[0], ends[-1] = 0, len(layers)
    own: nn.Module = nn.Sequential(*layers[ends[index] : ends[index + 1]])
    is_first, is_last = index == 0, index == count - 1
    if copies is not None:
        own = DistributedDataParallel(own, process_group=copies.get_group())
    size = BATCH // num_copies // microbatches
    hidden = torch.empty(size, SEQUENCE, HIDDEN, requires_grad=True)
    stage = PipelineStage(
        own,
        index,
        count,
        torch.device("cpu"),
        input_args=torch.zeros(size, SEQUENCE, dtype=torch.long) if is_first else hidden,
        output_args=torch.empty(size, SEQUENCE, VOCABULARY, requires_grad=True) if is_last else hidden,
        group=stages.get_group(),
    )
    schedule = Schedule1F1B(stage, microbatches, loss_fn=next_token_loss)
    optimizer = _adamw(own)

    def step(tokens: torch.Tensor) -> float | None:
        part = _share(tokens, copy, num_copies)
        losses: list[torch.Tensor] = []
        schedule.step(
            *([part] if is_first else []), target=part if is_last else None, losses=losses, return_outputs=False
        )
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).mean()) if is_last else None

    return step


def rows(num_ranks: int, microbatches: tuple[int, ...]) -> dict[str, Callable[[DeviceMesh], Step]]:
    """All of them, by name."""
    found: dict[str, Callable[[DeviceMesh], Step]] = {
        "torch-ddp": ddp,
        "torch-fsdp2": fsdp2,
        "torch-hsdp": hsdp,
        f"torch-tp{num_ranks}": tp,
        "torch-tp-fsdp2": tp_fsdp2,
    }
    for count in microbatches:
        found[f"torch-pp{num_ranks}-m{count}"] = pipeline(count)
        found[f"torch-pp-ddp-m{count}"] = pipeline_ddp(count)
    return found

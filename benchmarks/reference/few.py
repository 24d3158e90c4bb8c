"""A few layers of a record's model, planned: a stage for the first with the embedding, one for those in the middle, one for the last with
the head."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from clusters import PRECISIONS, machine_of
from decoder import Decoder
from records import Dims, Record
from stacks import Stack

import autopar
from autopar.capture.trace import Captured
from autopar.cost.machine import MachineProfile
from autopar.planner.session import Session, open_session
from autopar.runtime.module import make_skeleton
from autopar.solve.manual import UnusedSettingWarning
from autopar.solve.search import Search
from autopar.solve.staged import Staged

LAYERS = 4
"""Of the model that is planned: a first, two that stand for all between, a last."""


@dataclass(frozen=True, slots=True)
class Key:
    """What a plan of the few layers depends on."""

    dims: Dims
    stack: Stack
    machine: MachineProfile
    data: int
    tensor: int
    zero: int
    sequence_parallel: bool
    micro_batch: int
    microbatches: int
    recompute: str
    dtype: torch.dtype

    @staticmethod
    def of(record: Record, stack: Stack, recompute: str) -> Key:
        return Key(
            dims=_active(record.dims),
            stack=stack,
            machine=machine_of(record, stack),
            data=data_ranks(record),
            tensor=record.tp,
            zero=zero_level(record),
            sequence_parallel=bool(record.sequence_parallel),
            micro_batch=record.micro_batch,
            microbatches=2 if zero_level(record) < 2 else min(2, record.microbatches),  # of one, autopar reduces after the backward
            recompute=recompute,
            dtype=PRECISIONS[record.precision][0],
        )


def data_ranks(record: Record) -> int:
    """Ranks that the shards are planned for: a power of two, which divides the dims of all models. The stacks flatten what they shard."""
    return 1 << (record.dp * record.cp).bit_length() - 1


def zero_level(record: Record) -> int:
    """The level as autopar has it, whose ZeRO-2 reduces for every micro-batch, and whose ZeRO-3 gathers too: what is known of these stacks
    reduces once a step, and keeps under a pipeline what it has gathered (``reshard_after_forward``, by default in torchtitan and in recipes
    of Automodel)."""
    level = 1 if record.zero is None else record.zero
    return 1 if (level == 2 and record.microbatches > 1) or (level == 3 and record.pp > 1) else level


def _active(dims: Dims) -> Dims:
    """The few layers, with the experts that take a token as one MLP."""
    ffn = (dims.topk + dims.shared) * dims.expert_ffn if dims.experts else dims.ffn_hidden
    return replace(dims, layers=LAYERS, ffn_hidden=ffn, experts=0, topk=0, expert_ffn=0, shared=0, biased=False, window=0)


@lru_cache(maxsize=4)
def _captures(dims: Dims, dtype: torch.dtype, unfused: bool, op_by_op: bool) -> tuple[torch.nn.Module, dict[object, Captured]]:
    with torch.device("meta"):
        model = Decoder(dims, unfused=unfused, op_by_op=op_by_op).to(dtype)
    return make_skeleton(model), {}


@lru_cache(maxsize=8)
def _session(dims: Dims, dtype: torch.dtype, unfused: bool, op_by_op: bool, batch: int) -> Session:
    model, known = _captures(dims, dtype, unfused, op_by_op)
    tokens = torch.empty(batch, dims.seq, dtype=torch.long, device="meta")
    return open_session(model, (tokens, tokens.clone()), {}, outputs="loss", known=known)


@lru_cache(maxsize=4096)
def staged(key: Key) -> Staged:
    stack, batch = key.stack, key.data * key.micro_batch * key.microbatches
    session = _session(key.dims, key.dtype, stack.attention == "unfused", stack.op_by_op, batch)
    stages = ("layers.1", f"layers.{LAYERS - 1}")
    manual = autopar.Manual(
        dp=key.data,
        tp=key.tensor,
        pp=3,
        zero=key.zero if key.data > 1 else 0,
        sequence_parallel=key.sequence_parallel and key.tensor > 1,
        microbatches=key.microbatches,
        stages=stages,
        recompute=key.recompute,
    )
    search = Search(session.normal_for, lambda grid: key.machine, float("inf"), [manual], stack.optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnusedSettingWarning)
        return search.decide(manual.shape(session.batch_size))

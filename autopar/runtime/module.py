"""The parallel model: the user's module with its class, names and methods, whose forward runs the plan on all ranks.

Parameters are DTensors under their original names. A new kind of call (other shapes, evaluation, no gradients, other modules in
evaluation or other parameters frozen) is compiled when it first comes, with the parameters as they are stored.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from itertools import count
from random import Random
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.capture.outputs import Constant, closed
from autopar.capture.reads import Read
from autopar.capture.trace import Signature, flatten_call
from autopar.copying import copied_module
from autopar.errors import CaptureError, InputError, PlanError
from autopar.layout import Layout, replicated
from autopar.offload import Offload
from autopar.ops.codec import States
from autopar.ops.host import settle
from autopar.passes.rows import RowSplit
from autopar.plan import Plan
from autopar.precision import autocast_state
from autopar.runtime.batches import compare_batches
from autopar.runtime.chunks import Chunks
from autopar.runtime.clip import clip, watch_clipping, watch_stages
from autopar.runtime.disk import keep_on_disk
from autopar.runtime.execute import Program, guard, run_program
from autopar.runtime.groups import check_host_groups, job_timeout, local_device, number_on
from autopar.runtime.local_batch import Deal, plain
from autopar.runtime.materialize import Start, materialize
from autopar.runtime.meeting import meet
from autopar.runtime.mirror import Mirror, refuse_backward_hooks
from autopar.runtime.optimizers import refuse_steps_of, watch_optimizers
from autopar.runtime.parameters import agree, hand_over, hold_whole, is_on_meta, like, store, whole_of
from autopar.runtime.pipeline import PipelineProgram, run_pipeline
from autopar.runtime.place import Place, take_place
from autopar.runtime.recorder import Recorder
from autopar.runtime.scaling import LossScale, watch_scalers
from autopar.runtime.variants import Variant, fitting, warn_of_many


@dataclass(frozen=True, slots=True)
class Built:
    """What a builder makes for one kind of call.

    Args:
        plan: the plan of this kind of call.
        program: its graphs; with stages or micro-batches those of this rank's stages.
        parameters: layout of every parameter by name, with its other names.
        out_spec: structure of what the model returns.
        constants: the leaves of it; None: a tensor.
        with_grad: positions among the tensors of those that have a gradient in plain torch.
        updates: buffers that the call changes; the last outputs of the program are what they become.
        scales_losses: whether gradients go through float16, where small ones are lost unless the loss is scaled.
        split: how the rows of a batch may be dealt out to ranks.
        split_inputs: for each tensor of the batch whether it comes as this rank's rows of it.
        reads: attributes of modules that the capture depends on.
    """

    plan: Plan
    program: Program | PipelineProgram
    parameters: Mapping[tuple[str, ...], Layout]
    out_spec: pytree.TreeSpec
    constants: tuple[Constant | None, ...]
    with_grad: frozenset[int]
    updates: tuple[str, ...]
    scales_losses: bool
    split: RowSplit
    split_inputs: tuple[bool, ...]
    reads: tuple[Read, ...]


class Builder(Protocol):
    """Makes the program of one kind of call."""

    def __call__(
        self,
        skeleton: nn.Module,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        *,
        gradients: bool,
        is_exact: bool,
        in_force: Plan | None,
        split: RowSplit | None,
        dealt: Sequence[int],
    ) -> Built:
        """
        Args:
            skeleton: the model on meta, in the mode wanted.
            args, kwargs: of the call; tensors on meta do.
            gradients: whether they are wanted.
            is_exact: whether they stay exact for now.
            in_force: the plan by which parameters are stored.
            split: how batches are dealt out under it.
            dealt: positions of the tensors of the batch that come so.
        """


@dataclass(slots=True)
class Engine:
    """State of a parallel model on this rank.

    Args:
        skeleton: the model with meta tensors, for capture; ``mirror`` keeps it like the model.
        build: makes programs.
        make_mesh: the DeviceMesh of a plan.
        device_type: ``cpu`` or ``cuda``.
        compared_calls: how many calls, from the first, compare their batches over all ranks.
        exact_calls: before compression begins; ``differentiated`` counts those calls and all that follow, which have gradients.
        states: what compression keeps of gradients.
        scale: of the loss, for calls where small gradients would be lost without one.
        start: values that the model lacks, until they are given.
        open_record: what `ParallelModule.record` gives.
        recorder: of the steps that run; None if they are not recorded.
        number: of this model among those of the process; ``logs`` and ``copies`` were made of it.
        plan: in force, by which parameters are stored; ``called`` is that of the last call, which differs for another kind of call.
        deal: of the rows of batches to ranks, once there is a plan.
    """

    skeleton: nn.Module
    build: Builder
    make_mesh: Callable[[Plan], DeviceMesh]
    device_type: str
    open_record: Callable[[nn.Module, Engine, bool], Any]
    compared_calls: int = 0
    exact_calls: int = 0
    mirror: Mirror | None = None
    scale: LossScale = field(default_factory=LossScale)
    start: Start = field(default_factory=Start)
    recorder: Recorder | None = None
    plan: Plan | None = None
    called: Plan | None = None
    place: Place | None = None
    deal: Deal | None = None
    programs: dict[tuple[object, ...], list[Variant[Built]]] = field(default_factory=dict)
    states: States = field(default_factory=States)
    seed: int = 0
    calls: int = 0
    differentiated: int = 0
    logs: int = 0
    copies: int = 0
    number: int = field(default_factory=count().__next__)

    def prepare(self, model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], dealt: Sequence[int] = ()) -> Built:
        """The program of a call; the first one also plans and shards the parameters. ``dealt``: positions of those tensors of the batch of
        which a rank has its own rows."""
        with_grad = torch.is_grad_enabled()
        gradients = with_grad and model.training
        is_exact = gradients and self.differentiated < self.exact_calls
        assert self.mirror is not None
        switched = self.mirror.follow(has_stages=self.place is not None and self.place.line is not None)
        key = (Signature.of(args, kwargs), switched, gradients, is_exact, autocast_state(), tuple(dealt))
        variants = self.programs.setdefault(key, [])
        known = fitting(variants)
        if known is not None:
            return known
        self._announce()
        self.mirror.refresh()
        with torch.inference_mode(False), torch.set_grad_enabled(with_grad):  # what is made now serves other calls too
            args, kwargs = pytree.tree_map_only(DTensor, lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"), (args, kwargs))
            built = self.build(
                self.skeleton,
                args,
                kwargs,
                gradients=gradients,
                is_exact=is_exact,
                in_force=self.plan,
                split=None if self.deal is None else self.deal.split,
                dealt=dealt,
            )
            if self.plan is None:
                self._install(model, built)
        variants.append(Variant(self.mirror.held(built.reads), built))
        warn_of_many(variants)
        return built

    def _announce(self) -> None:
        """Come together where this call is of another kind than those before: ranks whose call is not would wait for this one, and it for
        them, until their collectives end.

        Raises:
            RankError: other ranks did not come.
        """
        if self.plan is not None and dist.get_world_size() > 1:
            what = f"call {self.calls + 1} of model {self.number}, which is of a new kind on this rank"
            remedy = "give all ranks batches of the same shapes (a last short one too, or drop_last=True), and switch modules alike on all"
            meet(what, remedy, 0.8 * job_timeout())  # before the others' collectives end, which say less

    def _install(self, model: nn.Module, built: Built) -> None:
        self.plan = built.plan
        grid = self.make_mesh(built.plan)
        self.place, self.deal = take_place(built.plan, grid, model.parameters()), Deal.of(built.split, built.plan.grid, grid)
        offload = Offload.of(built.plan.offload)
        if offload.optimizer:
            check_host_groups(self.device_type)
        known = {name: layout for names, layout in built.parameters.items() for name in names}
        layouts = {name: known.get(name) or replicated(built.plan.mesh, p.shape) for name, p in model.named_parameters()}
        hosted = known.keys() if offload.optimizer else ()
        away = {name for p in built.plan.parameters if not self.place.is_home(p.stages) for name in (p.name, *p.aliases)}
        for name, parameter in model.named_parameters():
            if name in away:
                hand_over(parameter, local_device(self.device_type))
            elif not is_on_meta(parameter):
                store(parameter, layouts[name], self.place.mesh, to_host=name in hosted)
        for name in away:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, None)
        materialize(model, self.start, layouts, self.place.mesh, hosted)
        for buffer in model.buffers():
            agree(buffer)
        self.watch(model)
        device = local_device(self.device_type)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):  # the loop goes on to draw the batches of one device
            seed = torch.randint(2**31, (1,), device=device)
        if dist.get_world_size() > 1:
            dist.broadcast(seed, 0)
        self.seed = int(seed)
        if self.start.load is not None:
            self.start.load(model)
        self.start = Start()  # lets go of recordings

    def watch(self, model: nn.Module) -> None:
        """Let clipping and optimizers know the parameters that this rank has of a model under this plan."""
        assert self.plan is not None
        assert self.place is not None
        if self.place.line is not None:
            homes = {name: p.stages for p in self.plan.parameters for name in (p.name, *p.aliases)}
            held = model.named_parameters()
            watch_stages(model, self.place, ((p, self.place.is_home(homes[n][:1]) if n in homes else True) for n, p in held))
        watch_optimizers(model)
        watch_clipping()
        watch_scalers()
        if folder := Offload.of(self.plan.offload).folder:
            keep_on_disk(model.parameters(), folder)

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        """Of a copy of the model: what is kept from step to step is its own, as are its random numbers; what is made once is shared, and
        nobody records it."""
        if self.plan is None:
            raise PlanError("there is no plan yet, and a copy would be stored otherwise than the model; give parallelize an example_batch")
        shared = {own.name: getattr(self, own.name) for own in fields(self) if own.name != "number"}
        scale, states = copy.deepcopy(self.scale, memo), copy.deepcopy(self.states, memo)
        self.copies += 1
        own = {"scale": scale, "states": states, "programs": dict(self.programs), "recorder": None, "logs": 0, "copies": 0}
        return Engine(**shared | own | {"seed": Random(f"{self.seed} {self.copies}").getrandbits(31)})

    def run(self, model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        """One call of the model."""
        batch = self._batch(model, args, kwargs)
        if self.compared_calls > 0 and dist.get_world_size() > 1:
            compare_batches(batch, self.calls + 1, self.deal)
            self.compared_calls -= 1
        built = self.prepare(model, args, kwargs, [i for i, x in enumerate(batch) if isinstance(x, DTensor)])
        assert self.place is not None
        assert self.mirror is not None
        self.differentiated += torch.is_grad_enabled() and model.training
        batch = [_taken(x, is_split=is_split) for x, is_split in zip(batch, built.split_inputs, strict=True)]
        state = self.mirror.state()
        self.calls, self.called = self.calls + 1, built.plan
        seed = number_on(local_device(self.device_type), self.seed + self.calls)
        recorder = self.recorder
        if recorder is not None:
            recorder.learn(built.program.graphs(), built.plan)
            recorder.begin_call(built.plan)
        if isinstance(built.program, PipelineProgram):
            scale = self.scale if built.scales_losses else None
            outputs = run_pipeline(built.program, self.place, state, batch, seed, scale, self.states, recorder)
        else:
            coming = iter(batch)
            tensors = [state[name] if name is not None else next(coming) for name in built.program.parameters]
            rank_inputs = [*self.place.rank_inputs, seed]
            outputs = run_program(
                built.program,
                self.place.mesh,
                tensors,
                rank_inputs,
                shares_overflow=built.scales_losses,
                states=self.states,
                recorder=recorder,
            )
        if not torch.is_grad_enabled():
            settle()
        if recorder is not None:
            recorder.end_part(is_over=not torch.is_grad_enabled())
        num_returned = len(outputs) - len(built.updates)
        with torch.no_grad():
            for name, value in zip(built.updates, outputs[num_returned:], strict=True):
                model.get_buffer(name).copy_(value)
        return self._returned(built, outputs[:num_returned])

    def _batch(self, model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> list[torch.Tensor]:
        device, is_step = local_device(self.device_type), model.training and torch.is_grad_enabled()
        given = (x for x in flatten_call(args, kwargs)[0] if isinstance(x, torch.Tensor))
        tensors = [plain(tensor, self.deal, i) for i, tensor in enumerate(given)]
        for i, tensor in enumerate(tensors):
            if is_step and tensor.requires_grad:
                raise InputError(
                    f"input {i} of shape {tuple(tensor.shape)} wants a gradient, and plans give none to inputs; put what made it into the "
                    "model, or .detach() it"
                )
            if tensor.device.type != device.type:
                where = f"input {i} of shape {tuple(tensor.shape)} is on {tensor.device}, the model on {device}"
                raise InputError(f"{where}; move it with .to({device.type!r})")
        return tensors

    def _returned(self, built: Built, outputs: list[torch.Tensor]) -> Any:
        losses = built.program.losses
        if losses and outputs[losses[0]].requires_grad:
            for i in built.with_grad.difference(losses):
                outputs[i] = guard(outputs[i], outputs[losses[0]], built.program.output_names[i])
        tensors = iter(outputs)
        leaves = [next(tensors) if constant is None else constant.value for constant in built.constants]
        return closed(pytree.tree_unflatten(leaves, built.out_spec))


def _taken(tensor: torch.Tensor, *, is_split: bool) -> torch.Tensor:
    """What a program takes of a tensor of the batch: whole, if not this rank's rows of it."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local() if is_split else whole_of(tensor)


class ParallelModule(nn.Module):
    """Mixed into the user's class by `make_parallel`."""

    _autopar: Engine

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The global batch in, on every rank, or its own rows of it (`autopar.local_batch`); what the model returns out, whole, on every
        rank."""
        return self._autopar.run(self, args, kwargs)

    @property
    def plan(self) -> Plan:
        """The plan in force; PlanError before the first call if no example batch was given."""
        if self._autopar.plan is None:
            raise PlanError("there is no plan yet: it is made at the first call, or by parallelize(..., example_batch=...)")
        return self._autopar.plan

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        """Clip the norm of all gradients together, as ``torch.nn.utils.clip_grad_norm_``; the global norm as a plain tensor.

        With pipeline stages the norm is over all of them; a parameter that several stages hold counts once.
        """
        recorder = self._autopar.recorder
        with nullcontext() if recorder is None else recorder.span("norm of gradients", "clip"):
            return clip(self, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite, foreach=foreach)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A model under the same plan with values of its own, as averages of weights are kept in; optimizers and clipping know it."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        for parameter in self.parameters():
            if isinstance(parameter.grad, DTensor):  # of memory of its own, where it is a part of what was reduced together
                memo[id(parameter.grad)] = like(parameter.grad.to_local().clone(), parameter.grad)
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        engine = made._autopar
        mirror = engine.mirror = Mirror.of(made, engine.skeleton)
        for key, variants in engine.programs.items():
            engine.programs[key] = [Variant(mirror.of_copy(held, built.reads), built) for held, built in variants]
        engine.watch(made)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PlanError(
            f"a {type(self).__name__} cannot be pickled: it is bound to the processes that run it; autopar.save keeps what it has, and "
            "copy.deepcopy copies it"
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """What moves and casts modules: to where they are already, or not at all, since graphs are made for dtypes and devices."""
        with torch.no_grad():
            for name, tensor in (*self.named_parameters(), *self.named_buffers()):
                made = fn(tensor)
                if made is not tensor:
                    raise PlanError(
                        f"{name} is {tensor.dtype} on {tensor.device}, and would be {made.dtype} on {made.device}: plans hold for tensors "
                        "as they are; cast or move the model before parallelize, whose precision= computes in less"
                    )
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As of any module; with ``assign`` too values are copied, since a plan holds for the tensors that are stored."""
        return super().load_state_dict(state_dict, strict)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Plain tensors, as one device has saved them, are whole ones, of which each rank takes its shard, and other stages theirs."""
        own = dict(self.named_parameters(remove_duplicate=False))
        for name, parameter in own.items():
            whole = state_dict.get(prefix + name)
            if not isinstance(whole, torch.Tensor) or isinstance(whole, DTensor) or not isinstance(parameter, DTensor):
                continue
            if whole.shape == parameter.shape:
                shard = like(torch.empty_like(parameter.to_local(), dtype=whole.dtype, requires_grad=False), parameter)
                Chunks.of(shard).fill(whole)
                state_dict[prefix + name] = shard
        for planned in self._autopar.plan.parameters if self._autopar.plan is not None else ():
            for name in {planned.name, *planned.aliases} - own.keys():
                state_dict.pop(prefix + name, None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def record(self, *, profiler: bool = False) -> Any:
        """Record what the steps inside of a ``with`` do on this rank: an `autopar.record.Record`.

        Nothing is recorded, and nothing is slower, outside of it.

        Args:
            profiler: run ``torch.profiler`` beside it: its ops, and kernels on CUDA, stand in the trace below what autopar tells, on the
                same clock. It takes some microseconds of each op.
        """
        return self._autopar.open_record(self, self._autopar, profiler)


def make_parallel(model: nn.Module, engine: Engine, world: DeviceMesh) -> nn.Module:
    """Give ``model`` the parallel forward in place; its class stays a subclass of what it was. ``world`` is any mesh over all ranks."""
    cls = type(model)
    refuse_steps_of(model.parameters())
    hold_whole(model, world)
    for hooks in (engine.skeleton._forward_hooks, engine.skeleton._forward_pre_hooks):
        hooks.clear()  # the model itself calls its own
    engine.mirror = Mirror.of(model, engine.skeleton)
    object.__setattr__(model, "_autopar", engine)
    model.__class__ = type(f"Parallel{cls.__name__}", (ParallelModule, cls), {})
    return model


def refuse_parallel(model: nn.Module) -> None:
    """PlanError if a model or a part of it is parallel already."""
    for name, module in model.named_modules():
        if isinstance(module, ParallelModule):
            what = f"module {name}, a {type(module).__name__}," if name else f"this {type(model).__name__}"
            raise PlanError(f"{what} is parallel already; build the model anew to plan again, and a part of it with the whole")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise PlanError(
                f"parameter {name} is a DTensor of {parameter.placements} already, as another parallel model, FSDP or tensor parallelism "
                "has made it; build the model anew of plain parameters, and share none with a parallel model"
            )


def make_skeleton(model: nn.Module) -> nn.Module:
    """A copy of the model whose parameters and buffers are on meta: it costs no memory and is captured in the model's stead.

    Raises:
        CaptureError: it is no module, or has hooks that autograd would call.
    """
    check_module(model)
    _refuse_hooks(model)
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty: torch.Tensor = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copied_module(model, memo)


def check_module(model: object) -> None:
    """Raise `CaptureError` if it is no module."""
    if not isinstance(model, nn.Module):
        what = "make one of it" if isinstance(model, type) else "build it first"
        raise CaptureError(f"the model is a torch.nn.Module, got {model!r}; {what}")


def _refuse_hooks(model: nn.Module) -> None:
    for name, module in model.named_modules():
        refuse_backward_hooks(name or type(module).__name__, module)
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise CaptureError(
                f"parameter {name} has hooks on its gradient, and plans call none; remove them, and read or change parameter.grad after "
                "backward()"
            )

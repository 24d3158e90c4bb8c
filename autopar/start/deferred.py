"""`deferred`: construct a model without memory, and record how.

Under it tensors are made on meta and say that they are on the device that was asked for, so that a constructor does all that it would
do. A mode of torch's dispatcher sees every op that has work to do, below autograd, and notes it as `recording.Op`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from autopar.errors import StartError
from autopar.start.recording import Draw, Op, Recording, Store, View
from autopar.start.replay import default_generator, evaluate, replay

META = torch.device("meta")
EMPTY = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
"""Ops that give memory and no values."""
OVERWRITING = {
    *("bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_", "normal_", "random_", "uniform_", "zero_"),
}
"""Ops that fill their first argument whatever was in it."""
_made: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Of storages on meta that were recorded, as long as they are there: the recording, and their number in it."""


@contextmanager
def deferred() -> Iterator[None]:
    """Construct models without memory, to be given to `parallelize`:

        torch.manual_seed(0)
        with autopar.deferred():
            model = Model(config).to(torch.bfloat16)
        model = autopar.parallelize(model, mesh)

    Tensors made inside are on meta. `parallelize` gives every rank its shards of the values that they would have been constructed with, bit
    for bit, on the device on which they would have been (the CPU, or that of a ``with torch.device(...)`` around it). What changes
    weights must stand inside. Where the constructor depends on values (``.item()``, ``.tolist()``), as rejection sampling does, what was
    drawn until there is drawn for it, a tensor at a time, and once more by `parallelize`.

    Afterwards generators do not stand where a construction would leave them, for which all would have to be drawn: they are in new
    states, which follow from those before, so that neither later numbers nor another model repeat those of the weights.

    Raises:
        StartError: an op cannot be recorded, or changes a tensor that has values already.
    """
    recorder = Recorder(_States().start, torch.device("cpu"))
    with recorder, Faces(recorder):
        yield


def recorded(tensor: torch.Tensor) -> tuple[Recording, View] | None:
    """Where the value of a tensor on meta was recorded, if it was.

    Raises:
        StartError: it has been changed since.
    """
    recording, number = _made.get(tensor.untyped_storage(), (None, 0)) if tensor.is_meta else (None, 0)
    if recording is None:
        return None
    if tensor._version > recording.versions.get(number, 0):
        raise StartError(
            f"a tensor of shape {tuple(tensor.shape)} was changed in place after autopar.deferred(), where nothing is recorded; change it "
            "inside"
        )
    return recording, View.of(tensor, number)


Begin = Callable[[Recording, int, torch.Generator], torch.Tensor | int | None]
"""(what is recorded until now, number of a generator in it, the generator) -> what the generator is given before a draw (`Draw.start`)."""


class Recorder(TorchDispatchMode):
    """Records ops on storages of its own, and runs them on meta.

    Args:
        start: of the draws.
        home: where tensors would be for which no device is asked.
    """

    def __init__(self, start: Begin, home: torch.device) -> None:
        super().__init__()
        self.recording = Recording()
        self._start, self._home = start, home
        self._generators: list[torch.Generator] = []
        self._ends: dict[int, torch.Tensor] = {}

    def adopt(self, tensor: torch.Tensor) -> None:
        """Count a tensor on meta as one of this recording, without a value yet."""
        self.expect_version(self._number(tensor, self._home), tensor._version)

    def known(self, tensor: object) -> View | None:
        """A tensor as it stands in this recording."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or not tensor.is_meta:  # type: ignore[attr-defined]
            return None
        assert isinstance(tensor, torch.Tensor)
        recording, number = _made.get(tensor.untyped_storage(), (None, 0))
        return View.of(tensor, number) if recording is self.recording else None

    def expect_version(self, view: View, version: int) -> None:
        """A tensor in a storage has this version without having been changed outside of the recording."""
        self.recording.versions[view.storage] = max(self.recording.versions.get(view.storage, 0), version)

    def device_of(self, view: View) -> torch.device:
        """Where a tensor would be."""
        return self.recording.stores[view.storage].device

    def values(self, views: Sequence[View]) -> list[torch.Tensor]:
        """The values of tensors that something depends on; all that was drawn until now is drawn for it once."""
        values, ends = evaluate(self.recording, views)
        self._ends |= enumerate(ends or ())
        return values

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():  # `Faces` is not for us
            return self._call(func, args, dict(kwargs or {}))

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        asked = kwargs.get("device")
        leaves, spec = pytree.tree_flatten((args, kwargs))
        written = _written(func, args, kwargs)
        leaves = [self._stand_in(func, x, written) if isinstance(x, torch.Tensor) else x for x in leaves]
        views = {i: self._view(x) for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)}
        device = self.device_of(next(iter(views.values()))) if views else self._home
        if asked is not None and torch.device(asked) != META:  # which torch asks for where it makes something beside a tensor
            device = torch.device(asked)
        if torch.Tag.data_dependent_output in func.tags:
            return self._evaluated(func, leaves, spec, views)
        on_meta, kwargs = pytree.tree_unflatten(leaves, spec)
        if asked is not None or (not views and any(a.name == "device" for a in func._schema.arguments)):
            kwargs |= {"device": META} | ({"pin_memory": False} if "pin_memory" in kwargs else {})
        try:
            out = func(*on_meta, **kwargs)
        except NotImplementedError as error:  # its shape depends on values, or torch does not know it
            if written or torch.Tag.nondeterministic_seeded in func.tags:
                raise StartError(f"under autopar.deferred() {func} cannot be recorded: torch cannot run it on meta") from error
            return self._evaluated(func, leaves, spec, views)
        for tensor in written:
            view = self._view(tensor)
            if tensor.untyped_storage().nbytes() != self.recording.stores[view.storage].num_bytes:
                raise StartError(f"under autopar.deferred() {func} changes the size of a tensor that is there; make another")
            self.expect_version(view, tensor._version + 1)  # torch counts the change when it is made
        noted = [views[i] if i in views else device if isinstance(x, torch.device) else x for i, x in enumerate(leaves)]
        self._record(func, noted, spec, out, device)
        return out

    def _record(self, func: Any, leaves: list[Any], spec: pytree.TreeSpec, out: Any, device: torch.device) -> None:
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        results = tuple(self._new(x, device) if isinstance(x, torch.Tensor) else None for x in pytree.tree_leaves(out))
        name = func.overloadpacket.__name__
        writes = frozenset(view.storage for view in _written(func, args, kwargs))
        if (not writes and not any(results)) or name in EMPTY:
            return
        used = [x for x in leaves if isinstance(x, View)]
        overwrites = frozenset[int]()
        if name in OVERWRITING and self._is_whole(used[0]) and used[0].storage not in {x.storage for x in used[1:]}:
            overwrites = writes
        reads = frozenset(x.storage for x in used) - overwrites
        self.recording.ops.append(Op(func, args, kwargs, reads, writes, overwrites, results, self._draw(func, kwargs, device)))

    def _is_whole(self, view: View) -> bool:
        """Whether a tensor that can be written to is all of its storage."""
        count = 1
        for size in view.size:
            count *= size
        return count * view.dtype.itemsize == self.recording.stores[view.storage].num_bytes

    def _draw(self, func: Any, kwargs: Mapping[str, Any], device: torch.device) -> Draw | None:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return None
        given = kwargs.get("generator")
        generator = default_generator(device) if given is None else given
        number = next((i for i, known in enumerate(self._generators) if known is generator), len(self._generators))
        if number == len(self._generators):
            self._generators.append(generator)
            self.recording.generators.append(generator.device)
            if given is not None:
                self.recording.own.add(number)
        start, end = self._start(self.recording, number, generator), self._ends.pop(number, None)
        return Draw(number, end if start is None else start)

    def _stand_in(self, func: Any, tensor: torch.Tensor, written: Sequence[Any]) -> torch.Tensor:
        """An input on meta: a tensor with values stands in the recording with a copy of them."""
        is_lazy = tensor.layout == torch.strided and (tensor.is_conj() or tensor.is_neg())
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or tensor.layout != torch.strided or is_lazy:
            kind = f"{'conjugate or negative ' if is_lazy else ''}{type(tensor).__name__} of layout {tensor.layout}"
            raise StartError(f"under autopar.deferred() {func} has a {kind}; only plain tensors are recorded")
        if tensor.is_meta:
            return tensor
        if any(x is tensor for x in written):
            raise StartError(
                f"under autopar.deferred() {func} changes a tensor of shape {tuple(tensor.shape)} that has values already, which would "
                "come before what is recorded; make it inside, or change it outside"
            )
        return self._constant(tensor)

    def _constant(self, value: torch.Tensor) -> torch.Tensor:
        standing = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
        kept = value.detach().clone()
        view = self._number(standing, value.device)
        self.recording.ops.append(Op(torch.ops.aten.clone.default, (kept,), {}, results=(view,)))
        return standing

    def _evaluated(self, func: Any, leaves: list[Any], spec: pytree.TreeSpec, views: Mapping[int, View]) -> Any:
        """The result of an op that needs values."""
        values = dict(zip(views, self.values([*views.values()]), strict=True))
        args, kwargs = pytree.tree_unflatten([values.get(i, x) for i, x in enumerate(leaves)], spec)
        return pytree.tree_map_only(torch.Tensor, self._constant, func(*args, **kwargs))

    def _view(self, tensor: torch.Tensor) -> View:
        known = self.known(tensor)
        if known is None and tensor.untyped_storage() in _made:
            raise StartError(
                f"a tensor of shape {tuple(tensor.shape)} was made in another autopar.deferred(); what belongs together must stand in one"
            )
        return known or self._number(tensor, self._home)

    def _new(self, tensor: torch.Tensor, device: torch.device) -> View | None:
        """A result, if its storage is new."""
        return None if self.known(tensor) is not None else self._number(tensor, device)

    def _number(self, tensor: torch.Tensor, device: torch.device) -> View:
        storage = tensor.untyped_storage()
        self.recording.stores.append(Store(storage.nbytes(), device))
        _made[storage] = (self.recording, len(self.recording.stores) - 1)
        return View.of(tensor, len(self.recording.stores) - 1)


class Faces(TorchFunctionMode):
    """Tensors say that they are where they would be, and tell Python their values as far as these are known."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func == _of.data.__set__ and (view := self._recorder.known(args[1])) is not None:
            self._recorder.expect_version(view, args[0]._version)  # which stays that of the tensor, whatever its storage
        view = self._recorder.known(args[0]) if args and (func in FACES or func in TELLING) else None
        if view is None:
            return func(*args, **(kwargs or {}))
        if func in FACES:
            return FACES[func](self._recorder.device_of(view))
        with _disable_current_modes():  # the recorder too
            return func(*self._recorder.values([view]), *args[1:], **(kwargs or {}))


_of: Any = torch.Tensor
FACES: dict[object, Callable[[torch.device], object]] = {
    _of.device.__get__: lambda device: device,
    _of.is_meta.__get__: lambda device: False,
    _of.is_cuda.__get__: lambda device: device.type == "cuda",
    _of.is_cpu.__get__: lambda device: device.type == "cpu",
    _of.get_device: lambda device: -1 if device.type == "cpu" else device.index or 0,
}
"""What tensors say of the device that they would be on."""
TELLING = {_of.tolist, _of.numpy, _of.__array__}
"""What tells values without an op."""


class _States:
    """What draws begin from, where the constructor may seed generators, keep their states and put them back.

    Nothing is drawn, but after each draw its generator is put into a state of its own, the mark of that draw. Where a draw finds the mark
    of the last one, it goes on; where it finds an earlier one, which somebody has kept, the draws until then are run to know the state that
    it stands for; and where it finds any other, somebody has seeded it.
    """

    def __init__(self) -> None:
        self._marks: dict[bytes, int] = {}
        self._last: dict[int, bytes] = {}

    def start(self, recording: Recording, number: int, generator: torch.Generator) -> torch.Tensor | None:
        state = generator.get_state()
        found, last = _digest(state), self._last.get(number)
        generator.manual_seed(int.from_bytes(hashlib.sha256(found + bytes(str(len(self._marks)), "ascii")).digest()[:8]) >> 1)
        self._last[number] = _digest(generator.get_state())
        self._marks[self._last[number]] = len(recording.ops) + 1
        if found == last:
            return None
        if found not in self._marks:
            return state
        before = replace(recording, ops=recording.ops[: self._marks[found]])
        return replay(before, [], to_the_end=True)[number]


def _digest(state: torch.Tensor) -> bytes:
    return hashlib.sha256(state.numpy().tobytes()).digest()


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an op changes."""
    found = list[Any]()
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += [x for x in pytree.tree_leaves(value) if x is not None]
    return found

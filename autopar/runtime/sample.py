"""One step of many, recorded in short: for how long this rank waited. A step that is not sampled runs as without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import fx, nn

from autopar.runtime.groups import local_device
from autopar.runtime.marks import Track
from autopar.runtime.module import Engine
from autopar.runtime.recorder import Recorder


@dataclass(slots=True)
class Sampler:
    """Records steps of a parallel model while nobody else does; graphs get their marks once.

    Args:
        model: whose steps.
        engine: of the model.
    """

    model: nn.Module
    engine: Engine
    _tracks: dict[fx.GraphModule, Track] = field(default_factory=dict)
    _recorder: Recorder | None = None

    def begin(self) -> None:
        """Sample what comes, unless a `model.record()` is open."""
        if self.engine.recorder is None:
            device = local_device(self.engine.device_type)
            self._recorder = self.engine.recorder = Recorder(device, self.model.parameters(), tracks=self._tracks, yields=True)

    def end(self) -> Recorder | None:
        """What was sampled, for `resolve.waits_s`; None if there is nothing, or if a `model.record()` has taken over."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return None
        recorder.close()
        if self.engine.recorder is not recorder:
            return None
        self.engine.recorder = None
        return recorder

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Sample nothing of what is done inside."""
        recorder = self._recorder
        if recorder is None or self.engine.recorder is not recorder:
            yield
            return
        self.engine.recorder = None
        try:
            yield
        finally:
            if self.engine.recorder is None:
                self.engine.recorder = recorder

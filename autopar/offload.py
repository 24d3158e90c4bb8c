"""What of a training step lies in the memory of the host instead of the device's.

- ``optimizer``: stored shards, their gradients and optimizer state; the host updates them, the device has copies to compute with for a
  step (ZeRO-Offload: Ren et al., USENIX ATC 2021).
- ``parameters``: the same, and those copies are there about their use alone (ZeRO-Infinity: Rajbhandari et al., SC 2021).
- ``activations``: what is saved from the forward to the backward, where it is large.

The stored shard is the optimizer's parameter, always, so that where parameters are, there its state is: ``parameters`` has ``optimizer``
in it. With a folder (``optimizer:/fast/disk``) the state of the optimizer is on the disk between steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from autopar.errors import PlanError

KINDS = ("optimizer", "parameters", "activations")
AUTO = "auto"
"""The planner chooses, and only where nothing fits without."""
NONE = "none"


@dataclass(frozen=True, slots=True)
class Offload:
    """What lies in the memory of the host; empty: nothing. It prints as ``optimizer+activations``, and parses back.

    Args:
        kinds: of `KINDS`; ``parameters`` adds ``optimizer``.
        folder: where the state of the optimizer is between steps, on a disk; empty for the memory of the host.

    Raises:
        PlanError: there is no such kind, or a folder for what is not offloaded.
    """

    kinds: frozenset[str] = field(default=frozenset())
    folder: str = ""

    def __post_init__(self) -> None:
        kinds = frozenset(self.kinds)
        if unknown := kinds - {*KINDS}:
            raise PlanError(f"offload has {_listed(KINDS)}, joined by '+', or is 'auto' or 'none'; got {_listed(sorted(unknown))}")
        if "parameters" in kinds:
            kinds |= {"optimizer"}
        if self.folder and ("optimizer" not in kinds or "+" in self.folder or "," in self.folder):
            raise PlanError(f"a folder reads like 'optimizer:/fast/disk', without '+' and ',' in it; got {self.folder!r} for {str(self)!r}")
        object.__setattr__(self, "kinds", kinds)

    @staticmethod
    def of(given: str | Offload | None) -> Offload:
        """What a user may give: names joined by ``+``, ``"none"``, or None for nothing.

        Raises:
            PlanError: another text; ``"auto"`` is one where it is not the planner that is asked.
        """
        if isinstance(given, Offload):
            return given
        if not isinstance(given, str | None):
            raise PlanError(f"offload is text such as 'optimizer+activations', an Offload or None, got {given!r}")
        if not given or given == NONE:
            return Offload()
        kinds, folders = [], []
        for part in given.split("+"):
            name, colon, folder = part.strip().partition(":")
            if (colon and not folder) or (folder and name != "optimizer"):
                raise PlanError(f"a folder is for the optimizer, as in 'optimizer:/fast/disk'; got {part!r} in {given!r}")
            kinds.append(name)
            folders += [folder] if folder else []
        return Offload(frozenset(kinds), "".join(folders[:1]))

    def __str__(self) -> str:
        implied = {"optimizer"} if "parameters" in self.kinds and not self.folder else set[str]()
        shown = [kind for kind in KINDS if kind in self.kinds - implied]
        return "+".join(f"{kind}:{self.folder}" if kind == "optimizer" and self.folder else kind for kind in shown)

    def __bool__(self) -> bool:
        return bool(self.kinds)

    @property
    def optimizer(self) -> bool:
        """Whether stored shards, their gradients and optimizer state are on the host."""
        return "optimizer" in self.kinds

    @property
    def parameters(self) -> bool:
        """Whether the device has copies of parameters about their use alone."""
        return "parameters" in self.kinds

    @property
    def activations(self) -> bool:
        """Whether large saved activations are on the host."""
        return "activations" in self.kinds


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


NOTHING = Offload()
CHOICES = tuple(
    tuple(Offload.of(text) for text in tier)
    for tier in (("optimizer", "parameters", "activations"), ("optimizer+activations", "parameters+activations"))
)
"""What ``auto`` tries, a tier at a time; of a tier it takes what is predicted to be fastest."""

"""Errors a user can cause. Each is a ``ValueError`` whose text names the thing, its value, the rule broken, and the remedy."""


class AutoparError(ValueError):
    """Base of every error that autopar raises on purpose."""


class CaptureError(AutoparError):
    """The model cannot be captured as one graph."""


class RuleError(AutoparError):
    """A rule is malformed, registered twice, or does not fit the call it is asked about."""


class MeshError(AutoparError):
    """The mesh does not fit the processes, the plan or the configuration."""


class PlanError(AutoparError):
    """A plan, a pin or a configuration does not fit the model."""


class ConfigError(PlanError):
    """A configuration of another system is malformed, contradicts itself, or cannot be expressed."""


class ConflictError(PlanError):
    """Pins and a configuration that cannot hold together.

    Args:
        text: what is said.
        members: a set of them of which none can be spared, as the user wrote them.
    """

    def __init__(self, text: str, *, members: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.members = members


class InfeasibleError(PlanError):
    """No plan fits the memory limit; the text says what is short.

    Args:
        text: what is said.
        limit_bytes: the limit, per rank; None if not known, as are the others.
        least_bytes: what a rank needs in the plan that is closest to fitting, if one was worked out.
        state_bytes: what a rank needs for parameters, gradients and optimizer state alone, evenly over all.
        members: pins and a configuration that cannot hold together with the limit, of which none can be spared; empty if none is to blame.
    """

    def __init__(
        self,
        text: str,
        *,
        limit_bytes: float | None = None,
        least_bytes: float | None = None,
        state_bytes: float | None = None,
        members: tuple[str, ...] = (),
    ) -> None:
        super().__init__(text)
        self.limit_bytes, self.least_bytes, self.state_bytes, self.members = limit_bytes, least_bytes, state_bytes, members


class SolverError(AutoparError):
    """A solver failed, or its process was ended: nothing is known of the model."""


class MicrobatchError(PlanError):
    """The batch of a model cannot be split into micro-batches; the text names the op that needs it whole."""


class InputError(AutoparError):
    """A call of the parallel model with inputs that its plan cannot take."""


class LoaderError(AutoparError):
    """A data loader cannot be shared out, its shares do not fit together, or a rank could not load its own."""


class CheckpointError(AutoparError):
    """A checkpoint cannot be written, is not there, or does not fit the model or the optimizer."""


class RankError(AutoparError):
    """Another rank did not answer; the text names it, and the action at which it was missed."""


class StartError(AutoparError):
    """A model on meta cannot be given values; the text names the tensors, or the op of its construction."""


class LogError(AutoparError):
    """A log is asked for what it cannot write, or is given what is no number."""

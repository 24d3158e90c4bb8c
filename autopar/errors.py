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


class InfeasibleError(PlanError):
    """No plan fits the memory limit; the text says what is short."""


class MicrobatchError(PlanError):
    """The batch of a model cannot be split into micro-batches; the text names the op that needs it whole."""


class InputError(AutoparError):
    """A call of the parallel model with inputs that its plan cannot take."""


class RankError(AutoparError):
    """Another rank did not answer; the text names it, and the action at which it was missed."""

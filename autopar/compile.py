"""The one visible list of passes, in the order in which they run."""

from __future__ import annotations

from collections.abc import Mapping

import sympy
from torch import fx

from autopar.passes import constants, normalize
from autopar.trace import Captured

NORMALIZE = (
    normalize.drop_noops,
    constants.mark_constants,
    constants.recognise_masks,
    constants.fold_identity_indexing,
    normalize.split_biases,
    normalize.expand_means,
    normalize.expand_losses,
    normalize.expand_attention_dropout,
    normalize.drop_dead_code,
    constants.mark_constants,
)


def normal_graph(captured: Captured, sizes: Mapping[sympy.Symbol, int]) -> fx.GraphModule:
    """The captured graph for concrete sizes, in normal form."""
    module = normalize.mark_sources(normalize.concretize(captured, sizes), captured)
    for step in NORMALIZE:
        module = step(module)
    module.graph.lint()
    module.recompile()
    return module

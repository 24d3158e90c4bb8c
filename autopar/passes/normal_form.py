"""Captured graph -> normal graph: the passes, in their order."""

from __future__ import annotations

from collections.abc import Mapping

import sympy
from torch import fx

from autopar.capture.trace import Captured
from autopar.passes import constants, normalize, randomness
from autopar.passes.complex_parts import write_pairs
from autopar.passes.composites import expand_composites
from autopar.passes.concrete import concretize
from autopar.passes.marked import join_parts, take_marked_rows
from autopar.passes.sorted_rows import sort_own_rows
from autopar.passes.unwritten import refuse_unwritten

NORMALIZE = (
    normalize.drop_noops,
    normalize.free_creations,
    normalize.use_dense_gradients,
    expand_composites,
    normalize.drop_noops,
    normalize.lie_in_order,
    normalize.expand_copies,
    write_pairs,
    normalize.expand_masked_writes,
    join_parts,
    take_marked_rows,
    normalize.drop_empty_parts,
    normalize.name_only_parts,
    normalize.widen_masks,
    constants.mark_constants,
    constants.recognise_masks,
    constants.fold_identity_indexing,
    constants.batch_indexing,
    normalize.split_biases,
    normalize.split_equations,
    normalize.add_tensors,
    normalize.expand_bags,
    normalize.expand_means,
    normalize.expand_nansums,
    normalize.expand_histograms,
    normalize.use_own_products,
    sort_own_rows,
    normalize.expand_losses,
    randomness.expand_attention_dropout,
    randomness.unify_randomness,
    normalize.drop_dead_code,
    refuse_unwritten,
    normalize.number_names,
    constants.mark_constants,
)


def normal_form(captured: Captured, sizes: Mapping[sympy.Symbol, int]) -> fx.GraphModule:
    """The captured graph for concrete sizes, in normal form."""
    module = normalize.mark_sources(concretize(captured, sizes), captured)
    for step in NORMALIZE:
        module = step(module)
    module.graph.lint()
    module.recompile()
    return module

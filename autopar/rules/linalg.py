"""Linear algebra: matrices are whole, and one is independent of the next."""

from __future__ import annotations

import torch

from autopar.rules.lines import full, line, whole
from autopar.rules.registry import Call, register

aten = torch.ops.aten


def _of_matrices(call: Call) -> str:
    """The dims before the last two of the first operand are free in all operands and results that have them."""
    batch = call.operands[0].shape[:-2]

    def term(shape: tuple[int, ...], name: str) -> list[str]:
        is_batched = shape[: len(batch)] == batch
        names = full(shape, name)
        return [f"b{i}" if is_batched and i < len(batch) and x != "1" else x if x == "1" else f"{x}!" for i, x in enumerate(names)]

    operands = [term(spec.shape, f"o{i}x") for i, spec in enumerate(call.operands)]
    return line(operands, [term(spec.shape, f"r{i}x") for i, spec in enumerate(call.results)])


def _solve(call: Call) -> str:
    """The same where the right sides, vectors or matrices, have the batch of the matrices, and are not broadcast."""
    matrices, right = (spec.shape for spec in call.operands)
    is_vector = len(right) == 1 or right == matrices[:-1]
    return _of_matrices(call) if right[: -1 if is_vector else -2] == matrices[:-2] else whole(call)


register(aten._linalg_solve_ex.default, _solve)
register(
    [
        aten.linalg_inv_ex.default, aten._linalg_det.default, aten._linalg_slogdet.default, aten.linalg_matrix_exp.default,
        aten.linalg_cholesky_ex.default, aten._linalg_eigh.default,
    ],
    _of_matrices,
)  # fmt: skip

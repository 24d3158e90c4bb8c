"""Every rule of the table is right and complete on its samples, and the checker would find it if it were not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from autopar.errors import RuleError
from autopar.rules import Rule, check, register, registered, rule_of
from autopar.rules.check import KNOWN_MISSING, _fenced, check_all, check_call, check_op
from autopar.rules.samples import Draw, Sample, below, real, samples

aten = torch.ops.aten


def found(sample: Sample, line: str, **sizes: int) -> dict[str, list[str]]:
    """What the checker says of a rule: choices by kind."""
    kinds: dict[str, list[str]] = {"wrong": [], "missing": []}
    for finding in check_call(sample, Rule.parse(line, **sizes)):
        kinds[finding.kind].append(finding.choice)
    return kinds


def test_every_op_has_samples() -> None:
    """Of torch; those of autopar order rows as each rank does, and are tested with what is around them (`test_sorted_rows`)."""
    have = {sample.op for sample in samples()}
    assert not [str(op) for op in registered() if op not in have and not str(op).startswith("autopar.")]
    assert not [str(op) for op in have if op not in registered()]


@pytest.mark.slow
def test_the_whole_table() -> None:
    findings = check_all()
    assert not findings, "\n".join(map(str, findings))


def test_what_an_op_reads_beyond_its_operands_is_no_choice() -> None:
    """On CPUs attention takes fewer keys than values without a word, and goes on behind the last."""
    whole, k = torch.randn(2, 4, 2, 2), torch.randn(2, 2, 2, 2)
    held = [[whole, _fenced(k[:, :, half : half + 1]), k] for half in range(2)]
    results = [F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True) for q, k, v in held]
    assert all(result.isnan().any() for result in results), "if it is refused now, the fence is not needed"
    assert torch.equal(held[0][1], k[:, :, :1])
    around = held[0][1].untyped_storage()
    assert torch.tensor([], dtype=k.dtype).set_(around).isnan().tolist() == [True] * 8 + [False] * 8 + [True] * 8
    assert _fenced(torch.arange(3)).tolist() == [0, 1, 2]


def test_missing_choices_are_tried_on_fenced_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms, real_run = list[int](), check._run

    def run(target: Any, args: Any, kwargs: Any, inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            rooms.extend(x.untyped_storage().nbytes() // x.nbytes for x in inputs)
        return real_run(target, args, kwargs, inputs)

    monkeypatch.setattr(check, "_run", run)
    assert found(Sample(aten.mm.default, (real(4, 4), real(4, 4))), "m k, k n -> m n ; 0 | 1") == {"wrong": [], "missing": []}
    assert rooms
    assert set(rooms) == {3}


@pytest.mark.parametrize("op", [aten.linear.default, aten.reshape.default, aten.embedding.default, aten.add.Tensor])
def test_four_ranks(op: torch._ops.OpOverload) -> None:
    wrong = [finding for finding in check_op(op, num_ranks=4) if finding.kind == "wrong"]
    assert not wrong, "\n".join(map(str, wrong))


def test_every_excuse_has_a_reason_and_a_rule() -> None:
    for op, (_, reason) in KNOWN_MISSING.items():
        assert reason
        assert op in registered()


def test_products_of_groups_of_rows() -> None:
    sample = Sample(torch.ops.autopar.grouped_mm.default, (real(8, 4), real(4, 4, 6), Draw((4,), "ends", 8)))
    rule = rule_of(sample.call)
    assert rule is not None
    assert str(rule) == "s! k, e! k n, e! -> s! n ; 0 | 1"
    assert check_call(sample, rule) == []
    assert "wrong" in {finding.kind for finding in check_call(sample, Rule.parse("s k, e! k n, e! -> s n ; 0 | 1"))}


def test_products_of_rows_in_order() -> None:
    given = real(8, 4), real(4, 4, 6), Draw((8,), "sorted", 4), "autopar::grouped_mm"
    sample = Sample(torch.ops.autopar.sorted_mm.default, given)
    rule = rule_of(sample.call)
    assert rule is not None
    assert check_call(sample, rule) == []
    assert "wrong" in {finding.kind for finding in check_call(sample, Rule.parse("s k, e k n, s -> s n ; 0 | 1"))}


def test_what_is_empty_may_be_repeated() -> None:
    rule = rule_of(Sample(aten.repeat.default, (real(0, 6), [2, 2])).call)
    assert rule is not None
    assert len(rule.whole) == 4


PRODUCT = Sample(aten.mm.default, (real(4, 6), real(6, 8)))
CONCATENATION = Sample(aten.cat.default, ([real(4, 6), real(4, 6)], 1))


def test_a_right_rule_has_no_findings() -> None:
    assert found(PRODUCT, "m k, k n -> m n ; 0 | 1") == {"wrong": [], "missing": []}


def test_a_wrong_factor_is_found() -> None:
    assert found(Sample(aten.softmax.int, (real(2, 6), -1)), "b n -> b n")["wrong"] == ["n: S1 -> S1"]


def test_wrong_linearity_is_found() -> None:
    sample = Sample(aten.mul.Tensor, (real(4, 6), real(4, 6)))
    assert found(sample, "a b, a b -> a b ; 0 1")["wrong"] == ["+0: P P -> P"]


def test_a_wrong_order_of_factors_is_found() -> None:
    """A concatenation's blocks are major."""
    assert any(choice.startswith("u") for choice in found(CONCATENATION, "a u, a u -> a (u n!)", n=2)["wrong"])


def test_a_wrong_gradient_is_found() -> None:
    """Every row is looked up alone, but its gradient is scaled by how often all ids name it."""
    sample = Sample(aten.embedding.default, (real(8, 6), torch.tensor([1, 1, 1, 2]), -1, True))
    assert found(sample, "v! d, b -> b d ; 0")["wrong"] == ["b: R* S0 -> S0", "b.1: R* S0.1 -> S0.1"]


def test_a_missing_factor_is_found() -> None:
    missing = found(PRODUCT, "m k!, k! n -> m n ; 0 | 1")["missing"]
    assert missing == ["S1 S0 -> P"]


def test_a_missing_range_is_not_asked_for() -> None:
    sample = Sample(aten.embedding.default, (real(8, 6), below(8, 4)))
    assert found(sample, "v! d, b -> b d ; 0")["missing"] == []


def test_missing_linearity_is_found() -> None:
    assert found(PRODUCT, "m k, k n -> m n ; 1")["missing"] == ["P R -> P"]
    assert "P P -> P" in found(CONCATENATION, "a u, a u -> a (n! u)", n=2)["missing"]


def test_a_finding_prints_on_one_line() -> None:
    (finding,) = check_call(PRODUCT, Rule.parse("m k!, k! n -> m n ; 0 | 1"))
    assert str(finding) == "aten.mm.default(real[4, 6], real[6, 8]): missing [S1 S0 -> P]"


def test_an_op_is_registered_once() -> None:
    with pytest.raises(RuleError, match=r"aten\.mm\.default has a rule already"):
        register(aten.mm.default, "m k, k n -> m n")

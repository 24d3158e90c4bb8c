from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import compare_golden


def test_a_missing_file_says_how_to_create_it(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"(?s)--update-golden.*R -> S0"):
        compare_golden(tmp_path / "plan.txt", "R -> S0", update=False)


def test_a_difference_is_shown_and_can_be_accepted(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "plan.txt"
    compare_golden(path, "a\nb", update=True)
    compare_golden(path, "a\nb\n", update=False)
    with pytest.raises(pytest.fail.Exception, match=r"-b\n\+c"):
        compare_golden(path, "a\nc", update=False)
    compare_golden(path, "a\nc", update=True)
    assert path.read_text() == "a\nc\n"

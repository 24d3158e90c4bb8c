from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from autopar.show.fold import fold, ranges_text, split_numbers


def test_ranges() -> None:
    assert ranges_text([3]) == "3"
    assert ranges_text([0, 1]) == "{0,1}"
    assert ranges_text([0, 1, 2, 3, 7]) == "{0..3,7}"


def test_experts_fold_twice() -> None:
    names = [f"layers.{i}.experts.{j}.w1" for i in range(4) for j in range(8)]
    (row,) = fold([(name, "same", name) for name in names])
    assert row.name == "layers.{0..3}.experts.{0..7}.w1"
    assert row.items == tuple(names)


def test_an_incomplete_grid_is_not_folded_to_a_whole_one() -> None:
    names = ["l.0.e.0", "l.0.e.1", "l.1.e.0"]
    assert [row.name for row in fold([(name, 0, name) for name in names])] == ["l.{0,1}.e.0", "l.0.e.1"]


def test_order_of_first_appearance() -> None:
    rows = [("a.0.x", 0, "1"), ("b", 0, "2"), ("a.1.x", 0, "3")]
    assert [row.name for row in fold(rows)] == ["a.{0,1}.x", "b"]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 1)), max_size=12))
def test_every_item_stays_and_names_cover_it(rows: list[tuple[int, int, int]]) -> None:
    given_rows = [(f"a.{i}.b.{j}", key, (i, j, key)) for i, j, key in rows]
    folded = fold(given_rows)
    assert Counter(item for row in folded for item in row.items) == Counter(rows)
    for row in folded:
        assert len({key for _, _, key in row.items}) == 1
        columns = zip(*((i, j) for i, j, _ in row.items), strict=True)
        assert row.name == "a.{}.b.{}".format(*map(ranges_text, columns))


def test_numbers_inside_words_stay() -> None:
    assert split_numbers("h2.3.conv1d") == ("h2.*.conv1d", (3,))

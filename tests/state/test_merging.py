"""The policy of merging, by itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from exactlyonce.state.merging import CYCLE_MAX, RATIO, Merging


class Sizes(dict[int, range]):
    """Tables of which only the lengths matter."""


def _run(sizes: Sizes, changes_per_checkpoint: list[dict[int, int]]) -> tuple[int, list[int], Merging]:
    merging, imaged, per_checkpoint = Merging(), 0, []
    for checkpoint, changes in enumerate(changes_per_checkpoint, 1):
        chosen = merging.choose(checkpoint, sum(changes.values()), sizes)
        for group in chosen:
            merging.imaged(group)
        for group in changes.keys() - chosen:
            merging.incremented(group, checkpoint, changes[group])
        per_checkpoint.append(sum(len(sizes[group]) for group in chosen))
        imaged += per_checkpoint[-1]
    return imaged, per_checkpoint, merging


@given(
    st.lists(st.integers(0, 500), min_size=4, max_size=4), st.lists(st.integers(0, 3), max_size=200), st.integers(1, 50)
)
def test_images_cost_a_share_of_the_increments(counts: list[int], groups: list[int], changed: int) -> None:
    sizes = Sizes({group: range(count) for group, count in enumerate(counts)})
    imaged, _, _ = _run(sizes, [{group: min(changed, len(sizes[group]))} for group in groups])
    allowance = sum(max(min(changed, len(sizes[group])) / RATIO, sum(counts) / 16) for group in groups)
    assert imaged <= allowance


def test_steady_changes_are_merged_without_spikes() -> None:
    sizes = Sizes({group: range(8_000) for group in range(128)})
    _, per_checkpoint, merging = _run(sizes, [dict.fromkeys(range(128), 160)] * 600)
    steady = per_checkpoint[300:]
    assert sum(steady) / len(steady) <= 128 * 160 / RATIO * 1.01
    assert max(steady) <= 2 * 8_000
    assert min(merging.oldest.values()) > 600 - CYCLE_MAX


def test_rare_changes_are_merged_by_age() -> None:
    sizes = Sizes({group: range(8_000) for group in range(128)})
    _, _, merging = _run(sizes, [{checkpoint * 37 % 128: 1} for checkpoint in range(2_000)])
    assert min(merging.oldest.values()) > 2_000 - 1.1 * CYCLE_MAX


def test_one_hot_key_costs_next_to_nothing() -> None:
    sizes = Sizes({group: range(8_000) for group in range(128)})
    imaged, _, _ = _run(sizes, [{5: 1}] * 2_000)
    assert imaged <= 8_000 * (2 * 2_000 / CYCLE_MAX + 1)

"""Chains: which blocks they keep, and what each is needed for."""

from __future__ import annotations

from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.state.blocks import IMAGE, INCREMENT, BlockHeader, Section
from exactlyonce.state.chain import Chain
from exactlyonce.state.key_groups import mask_of


def _ref(offset: int) -> BlockRef:
    return BlockRef(1, offset, f"block/1/1/totals/0/{offset}/1-0", 100, bytes(32))


def _header(checkpoint: int, kinds: dict[int, int]) -> BlockHeader:
    return BlockHeader("totals", checkpoint, tuple(Section(group, kind, 1, 1, 1) for group, kind in kinds.items()))


def _offsets(chain: Chain) -> list[int]:
    return [ref.offset for ref in chain.refs]


def _needed(chain: Chain, *groups: int) -> list[tuple[int, int]]:
    return [(block.ref.offset, some) for block, some in chain.needed(mask_of(groups))]


def test_a_block_goes_when_all_its_groups_have_newer_images() -> None:
    first = Chain().extended([(_ref(0), _header(1, {0: IMAGE, 1: IMAGE})), (_ref(1), _header(1, {2: IMAGE}))])
    second = first.extended([(_ref(2), _header(2, {0: INCREMENT, 2: IMAGE}))])
    third = second.extended([(_ref(3), _header(3, {0: IMAGE})), (_ref(4), _header(3, {0: IMAGE, 1: INCREMENT}))])
    fourth = third.extended([(_ref(5), _header(5, {1: IMAGE, 2: IMAGE}))])
    assert [_offsets(chain) for chain in (first, second, third, fourth)] == [[0, 1], [0, 2], [0, 2, 3, 4], [3, 4, 5]]
    assert fourth.size == 300


def test_a_group_needs_its_newest_image_and_what_came_later() -> None:
    chain = Chain().extended([(_ref(0), _header(1, {0: IMAGE, 1: IMAGE, 2: IMAGE}))])
    chain = chain.extended([(_ref(1), _header(2, {0: INCREMENT, 1: INCREMENT}))])
    chain = chain.extended([(_ref(2), _header(3, {1: IMAGE})), (_ref(3), _header(3, {1: IMAGE, 2: INCREMENT}))])
    assert _needed(chain, 0) == [(0, 1), (1, 1)]
    assert _needed(chain, 1) == [(2, 2), (3, 2)]
    assert _needed(chain, 2, 0) == [(0, 5), (1, 1), (3, 4)]
    assert _needed(chain) == []

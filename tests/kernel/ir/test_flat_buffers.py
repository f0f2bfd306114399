"""Buffers are filled in order, and none more than it holds."""

from hypothesis import given
from hypothesis import strategies as st

from autodist_py.kernel.ir.flat_buffers import filled


@given(sizes=st.lists(st.integers(0, 9)), most=st.integers(0, 20))
def test_what_follows_one_another_is_together_as_far_as_a_buffer_holds_it(sizes: list[int], most: int) -> None:
    packs = list(filled(range(len(sizes)), sizes.__getitem__, most))

    assert [item for pack in packs for item in pack] == list(range(len(sizes)))
    totals = [sum(sizes[item] for item in pack) for pack in packs]
    for pack, total in zip(packs, totals, strict=True):
        assert pack
        assert total <= most or len(pack) == 1
    for total, following in zip(totals, packs[1:], strict=False):
        assert total + sizes[following[0]] > most, "it would have held the next one, too"

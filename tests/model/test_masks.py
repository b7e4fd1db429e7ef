"""Who may see whom: every mask of a pass against one sentence per pair of query and key."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.model.masks import causal_mask, mask_of_pass, shorter, spelled_out


def test_causal_masks_are_aligned_at_the_bottom_right() -> None:
    """With S keys and T new queries, query t sees keys 0 .. S - T + t."""
    mask = causal_mask(torch.arange(5, 8), torch.arange(8))
    assert mask.tolist() == [[s <= 5 + t for s in range(8)] for t in range(3)]


def test_token_5_of_10_uses_5_scores() -> None:
    mask = causal_mask(torch.arange(10), torch.arange(10))
    assert mask[4].sum() == 5 and not mask.triu(1).any()


def test_a_window_of_w_holds_w_keys_itself_included() -> None:
    mask = causal_mask(torch.arange(6), torch.arange(6), window=3)
    assert mask.int().tolist() == [[int(0 <= i - j < 3) for j in range(6)] for i in range(6)]


@pytest.mark.parametrize("n_queries", [1, 4, 6])
@pytest.mark.parametrize("n_keys", [1, 4, 7])
def test_causal_spelled_out(n_queries: int, n_keys: int) -> None:
    """The mask by places, the last of the keys being the queries' own; any other mask stays what it is."""
    q, k = torch.zeros(2, 3, n_queries, 5), torch.zeros(2, 1, n_keys, 5)
    places = torch.arange(n_keys)
    expected = causal_mask(torch.arange(n_queries) + n_keys - n_queries, places)
    found = spelled_out("causal", q, k)
    assert found is not None and found.dtype == torch.bool and torch.equal(found, expected)
    assert spelled_out(expected, q, k) is expected and spelled_out(None, q, k) is None


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_the_mask_of_a_pass_says_who_may_see_whom(data: st.DataObject) -> None:
    """Each pair on its own: behind the query? outside the window, in real tokens? padding? another text?"""
    length, causal = data.draw(st.integers(1, 8)), data.draw(st.booleans())
    window = data.draw(st.none() | st.integers(1, 10))
    documents = real = None
    if data.draw(st.booleans()):
        documents = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=length, max_size=length)))
        documents = documents.sort().values[None]
    if data.draw(st.booleans()):
        real = torch.tensor([data.draw(st.lists(st.booleans(), min_size=length, max_size=length))])
    places = torch.arange(length)
    mask = mask_of_pass(causal, places, places, real, documents, window)
    counts = places if real is None else real[0].cumsum(0)

    def seen(t: int, s: int) -> bool:
        if (causal and s > t) or (real is not None and not real[0, s]):
            return False
        if documents is not None and documents[0, s] != documents[0, t]:
            return False
        distance = int(counts[t] - counts[s])
        return window is None or (distance < window if causal else abs(distance) <= window)

    expected = torch.tensor([[seen(t, s) for s in range(length)] for t in range(length)])
    everything = torch.zeros(1, 1, length, 3)
    spelled = spelled_out(mask, everything, everything)
    spelled = torch.ones(()).bool() if spelled is None else spelled
    assert torch.equal(spelled.expand(1, 1, length, length)[0, 0], expected)
    only_causal = causal and real is None and documents is None and (window is None or window >= length)
    assert (mask == "causal") if only_causal else not isinstance(mask, str)


def test_keys_of_their_own_need_a_mask() -> None:
    """As many keys as queries are not enough: they may stand elsewhere."""
    mask = mask_of_pass(True, torch.arange(3, 6), torch.arange(1, 4))
    assert isinstance(mask, torch.Tensor)
    assert mask.tolist() == [[True, True, True]] * 3


def test_a_window_is_shorter_only_if_it_hides_something() -> None:
    assert [shorter(window, 5) for window in (None, 1, 4, 5, 6)] == [False, True, True, False, False]

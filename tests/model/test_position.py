"""Where a token stands: tables and rotations against their formulas."""

import cmath
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.model.position import Rotary, rotate, sinusoidal


def turned_by_hand(x: list[float], position: int, theta: float, layout: str) -> list[float]:
    """Each pair as a complex number times exp(i * position * theta^(-2i/K))."""
    width, out = len(x), [0.0] * len(x)
    for i in range(width // 2):
        a, b = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, i + width // 2)
        pair = complex(x[a], x[b]) * cmath.exp(1j * position * theta ** (-2 * i / width))
        out[a], out[b] = pair.real, pair.imag
    return out


@settings(deadline=None, max_examples=30)
@given(
    lead=st.lists(st.integers(1, 3), max_size=3),
    places=st.lists(st.integers(0, 5000), min_size=1, max_size=4),
    pairs=st.integers(1, 4),
    layout=st.sampled_from(["half", "interleaved"]),
)
def test_rope(lead: list[int], places: list[int], pairs: int, layout) -> None:
    """Every pair of features turns by position * theta^(-2i/K), for any leading dimensions."""
    x = torch.randn(*lead, len(places), 2 * pairs)
    turned = Rotary(2 * pairs, theta=100.0, layout=layout)(x, torch.tensor(places))
    rows = x.reshape(-1, len(places), 2 * pairs)
    expected = [
        [turned_by_hand(token.tolist(), p, 100.0, layout) for token, p in zip(row, places, strict=True)]
        for row in rows
    ]
    torch.testing.assert_close(turned, torch.tensor(expected).view_as(x), atol=2e-3, rtol=0)


@settings(deadline=None, max_examples=30)
@given(
    m=st.integers(0, 300), n=st.integers(0, 300), shift=st.integers(0, 300),
    layout=st.sampled_from(["half", "interleaved"]),
)  # fmt: skip
def test_rotated_products_depend_only_on_the_distance(m: int, n: int, shift: int, layout) -> None:
    q, k = torch.randn(2, 1, 8)
    rotary = Rotary(8, layout=layout)

    def product(i: int, j: int) -> torch.Tensor:
        return rotary(q, torch.tensor([i])) @ rotary(k, torch.tensor([j])).T

    torch.testing.assert_close(product(m, n), product(m + shift, n + shift), atol=1e-3, rtol=0)


def test_a_rotation_keeps_lengths_and_position_0_keeps_everything() -> None:
    x = torch.randn(5, 16)
    turned = Rotary(16)(x, torch.arange(5))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(turned[0], x[0])


def test_the_two_layouts_are_one_rotation_of_permuted_features() -> None:
    """half pairs i with i + K/2, interleaved 2i with 2i + 1: moving the features turns one into the other."""
    x, places = torch.randn(2, 7, 12), torch.arange(7)
    order = torch.arange(12).view(2, 6).T.flatten()  # 0 6 1 7 2 8 ...
    half = Rotary(12, layout="half")(x, places)
    torch.testing.assert_close(Rotary(12, layout="interleaved")(x[..., order], places), half[..., order])


def test_heads_share_the_angles_of_their_token() -> None:
    """Positions (B, T) of rows that stand elsewhere turn x (B, H, T, K) with a dimension inserted."""
    x, positions = torch.randn(2, 3, 4, 6), torch.tensor([[0, 1, 2, 3], [7, 8, 9, 10]])
    turned = Rotary(6)(x, positions[:, None])
    for row in range(2):
        for head in range(3):
            torch.testing.assert_close(turned[row, head], Rotary(6)(x[row, head], positions[row]))


@pytest.mark.usefixtures("unchecked")
def test_positions_that_would_pair_rows_with_heads_are_refused() -> None:
    """(B, T) against (B, H, T, K) with B = H would broadcast without an error and be wrong."""
    x = torch.randn(3, 3, 4, 6)
    with pytest.raises(ValueError, match=r"positions \(3, 4\).*x \(3, 3, 4, 6\)"):
        Rotary(6)(x, torch.arange(12).view(3, 4))
    assert Rotary(6)(x, torch.arange(4)[None]).shape == x.shape  # one row for all is no pairing


@pytest.mark.usefixtures("unchecked")
def test_rotary_names_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="d_head=5 must be even"):
        Rotary(5)
    with pytest.raises(ValueError, match="'spiral' is unknown; choose half or interleaved"):
        Rotary(4, layout="spiral")
    with pytest.raises(ValueError, match=r"x \(3, 8\) must end in a length of 3 and d_head=2"):
        Rotary(2)(torch.randn(3, 8), torch.arange(3))
    with pytest.raises(ValueError, match=r"x \(3, 2\) must end in a length of 4 and d_head=2"):
        Rotary(2)(torch.randn(3, 2), torch.arange(4))


def test_angles_stay_float32_in_a_bfloat16_model() -> None:
    """Position 257 does not exist in bfloat16; the angles must not pass through it."""
    rotary = Rotary(2).bfloat16()
    x = torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16)
    rotation = rotary.angles(torch.tensor([257]))
    assert rotation.cos.dtype == torch.float32
    assert rotation.cos.item() == pytest.approx(math.cos(257), abs=1e-4)
    turned = rotate(x, rotation)
    assert turned.dtype == torch.bfloat16
    assert turned[0, 0].item() == pytest.approx(math.cos(257), abs=4e-3)


def test_rotary_holds_no_weights() -> None:
    """No tables in the state dict: files of other models have none either."""
    assert not Rotary(8).state_dict()


@pytest.mark.parametrize("concatenated", [False, True])
def test_sinusoidal_is_its_formula(concatenated: bool) -> None:
    """sin and cos of position / 10000^(2i/D), in neighbouring features or in two halves; exact when far."""
    positions = torch.tensor([[0, 1, 17], [1000, 99_999, 10_000_000]])
    table = sinusoidal(positions, 6, concatenated)
    assert table.shape == (2, 3, 6)
    for row in range(2):
        for t in range(3):
            for i in range(3):
                angle = positions[row, t].item() / 10_000 ** (2 * i / 6)
                sine, cosine = (i, i + 3) if concatenated else (2 * i, 2 * i + 1)
                assert table[row, t, sine].item() == pytest.approx(math.sin(angle), abs=1e-6)
                assert table[row, t, cosine].item() == pytest.approx(math.cos(angle), abs=1e-6)


def test_sinusoidal_needs_an_even_width() -> None:
    with pytest.raises(ValueError, match="even d_model, got 5"):
        sinusoidal(torch.arange(2), 5)

"""The worked numbers of the course notes and papers: each can be checked with a pencil."""

import itertools
import math
from collections import Counter

import pytest
import torch
from torch import nn

from clearhead.model.attention import Attention, attend
from clearhead.model.config import ModelConfig, default_d_ff
from clearhead.model.layers import BatchNorm, Embedding, FeedForward, LayerNorm, Linear, RMSNorm, softmax
from clearhead.model.position import Rotary, sinusoidal
from clearhead.model.transformer import Transformer
from clearhead.text.bpe import train_bpe
from clearhead.text.tokenizer import Tokenizer

ROWS = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])


def close(actual: torch.Tensor, expected: list, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected), atol=tolerance, rtol=0)


def test_layernorm_of_one_two_three() -> None:
    """Each row on its own: mean 2, population std sqrt(2/3), so both rows become -1.2247, 0, 1.2247."""
    close(LayerNorm(3)(ROWS), [[-1.2247, 0.0, 1.2247]] * 2)


def test_batchnorm_of_one_two_three() -> None:
    """Each column over the batch: means 2.5, 3.5, 4.5, std 1.5, so the rows become -1 and +1."""
    close(BatchNorm(3)(ROWS), [[-1.0] * 3, [1.0] * 3])


def test_rmsnorm_of_one_two_three() -> None:
    """Divided by sqrt(14/3) and sqrt(77/3)."""
    close(RMSNorm(3)(ROWS), [[0.4629, 0.9258, 1.3887], [0.7895, 0.9870, 1.1843]])


def test_rmsnorm_looks_at_the_features_of_one_token_only() -> None:
    """A norm that averaged over time would leak the future."""
    x = torch.randn(2, 3, 4)
    changed = x.clone()
    changed[:, 2] = 100.0
    assert torch.equal(RMSNorm(4)(x)[:, :2], RMSNorm(4)(changed)[:, :2])


def test_sinusoid_of_width_four() -> None:
    """p_i = sin i, cos i, sin i/100, cos i/100."""
    expected = [[math.sin(i), math.cos(i), math.sin(i / 100), math.cos(i / 100)] for i in range(5)]
    close(sinusoidal(torch.arange(5), 4), expected, 1e-6)


def test_adding_positions_of_width_two() -> None:
    """x0 + (0, 1), x1 + (.84, .54), x2 + (.91, -.42)."""
    x = torch.tensor([[0.20, 0.60], [0.80, 0.10], [0.40, 0.70]])
    close(x + sinusoidal(torch.arange(3), 2), [[0.20, 1.60], [1.64, 0.64], [1.31, 0.28]], 0.005)


def test_the_same_token_in_two_places_differs_by_the_positions() -> None:
    """h1 - h2 = p1 - p2."""
    model = Transformer(ModelConfig(vocab_size=9, d_model=8, n_layers=1, n_heads=2, positions="sinusoidal"))
    h = model.embed(torch.tensor([[7, 7, 7]])) + sinusoidal(torch.arange(3), 8)
    p = sinusoidal(torch.arange(3), 8)
    torch.testing.assert_close(h[0, 1] - h[0, 2], p[1] - p[2], atol=1e-6, rtol=0)


@pytest.mark.parametrize("places", [(0, 2), (5, 7), (100, 102)])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotated_products_depend_on_the_distance(places: tuple[int, int], layout) -> None:
    """(1, 0) . (1, 0) two places apart is cos 2, wherever they stand."""
    turned = Rotary(2, theta=1.0, layout=layout)(torch.tensor([[1.0, 0.0]] * 2), torch.tensor(places))
    assert (turned[0] @ turned[1]).item() == pytest.approx(-0.416147, abs=1e-5)


def test_rotating_one_pair() -> None:
    """(1, 2) at position 3 with frequency 1/2: (cos 1.5 - 2 sin 1.5, sin 1.5 + 2 cos 1.5) = (-1.92, 1.14)."""
    rotary = Rotary(4, theta=4.0, layout="interleaved")  # frequencies 1 and 4^(-1/2)
    turned = rotary(torch.tensor([[0.0, 0.0, 1.0, 2.0]]), torch.tensor([3]))
    close(turned, [[0.0, 0.0, -1.92, 1.14]], 0.005)


def test_softmax_of_very_different_numbers() -> None:
    """[1, 5, 100, 10000] shifts to [-9999, -9995, -9900, 0] and gives [0, 0, 0, 1], no overflow."""
    assert softmax(torch.tensor([1.0, 5.0, 100.0, 10000.0]), dim=0).tolist() == [0, 0, 0, 1]


def test_softmax_shifts_along_the_dimension_it_sums() -> None:
    x = torch.tensor([[0.0, 0.0], [100.0, -100.0]])
    close(softmax(x, dim=0), [[0.0, 1.0], [1.0, 0.0]], 1e-6)
    assert x[1].tolist() == [100, -100]  # the caller's tensor is as it was


def test_a_masked_key_among_equal_scores_weighs_exactly_nothing() -> None:
    """Three equal scores and the mask T T F: weights 1/2, 1/2, 0."""
    q, k, v = torch.zeros(1, 4), torch.zeros(3, 4), torch.randn(3, 4)
    _, weights = attend(q, k, v, torch.tensor([[True, True, False]]), return_weights=True)
    assert weights.tolist() == [[0.5, 0.5, 0.0]]


def test_feed_forward_shapes() -> None:
    """[3, 4, 8] . [8, 32] = [3, 4, 32]; . [32, 8] = [3, 4, 8]."""
    ff, x = FeedForward(8, activation="relu", gated=False, bias=True), torch.randn(3, 4, 8)
    assert ff.up(x).shape == (3, 4, 32)
    assert ff(x).shape == (3, 4, 8)


def test_feed_forward_is_max_zero_between_two_linear_layers() -> None:
    """max(0, x W1 + b1) W2 + b2, with d_ff = 4 d: 512 -> 2048."""
    ff = FeedForward(8, activation="relu", gated=False, bias=True)
    nn.init.normal_(ff.up.bias)
    nn.init.normal_(ff.down.bias)
    x = torch.randn(3, 4, 8)
    by_hand = (x @ ff.up.weight.T + ff.up.bias).clamp(min=0) @ ff.down.weight.T + ff.down.bias
    torch.testing.assert_close(ff(x), by_hand)
    assert default_d_ff(512, gated=False) == 2048


def test_three_matrices_of_eight_thirds_weigh_as_much_as_two_of_four() -> None:
    """8 d^2 = 3 d d_ff gives d_ff = 8/3 d: exactly 512 for d = 192."""
    plain, gated = FeedForward(192, gated=False), FeedForward(192)
    assert default_d_ff(192) == 512 == 8 * 192 / 3
    assert sum(p.numel() for p in plain.parameters()) == sum(p.numel() for p in gated.parameters())


@pytest.mark.parametrize(("d_model", "d_ff"), [(128, 320), (512, 1344), (768, 2048), (16, 64)])
def test_default_width_is_a_multiple_of_64_and_never_0(d_model: int, d_ff: int) -> None:
    assert ModelConfig(d_model=d_model, n_heads=4).d_ff == d_ff


def test_heads_of_512() -> None:
    """512 / 8 = 64 features a head, and the scores are divided by sqrt(64) = 8."""
    attention = Attention(512, 8)
    assert attention.d_head == ModelConfig(d_model=512, n_heads=8).d_head == 64
    q, k, v = torch.randn(1, 64), torch.randn(2, 64), torch.eye(2)
    torch.testing.assert_close(attend(q, k, v), softmax(q @ k.T / 8, dim=-1))


@pytest.mark.parametrize(("d_model", "n_heads"), [(768, 12), (1024, 16), (4096, 32), (12288, 96)])
def test_typical_head_counts(d_model: int, n_heads: int) -> None:
    """12, 16 and 32 heads are typical; GPT-3 has 96 of 128 features."""
    assert ModelConfig(d_model=d_model, n_heads=n_heads).d_head in (64, 128)


def test_embedding_of_two_rows_of_three_ids() -> None:
    """A table (10000, 4) and ids [[2, 5, 1], [0, 2, 8]] give (2, 3, 4); the same id gives the same vector."""
    vectors = Embedding(10000, 4)(torch.tensor([[2, 5, 1], [0, 2, 8]]))
    assert vectors.shape == (2, 3, 4)
    assert torch.equal(vectors[0, 0], vectors[1, 1])


@pytest.mark.parametrize(("d_ff", "n_parameters"), [(512, 3_609_728), (320, 3_314_816)])
def test_language_model_of_the_course(d_ff: int, n_parameters: int) -> None:
    """Vocabulary 10000, d 128, 8 heads, 4 layers: logits (2, 16, 10000) and 3,609,728 parameters."""
    config = ModelConfig(
        vocab_size=10000, max_len=128, d_model=128, n_layers=4, n_heads=8, d_ff=d_ff,
        rotary_theta=1e4, rotary_layout="interleaved", tied=False,
    )  # fmt: skip
    model = Transformer(config, seed=0)
    assert model(torch.randint(10000, (2, 16))).shape == (2, 16, 10000)
    assert sum(p.numel() for p in model.parameters()) == n_parameters


def test_cutting_at_three_deviations_leaves_0_988_of_the_deviation() -> None:
    torch.manual_seed(0)
    layer = Linear(1000, 1000)
    nominal = math.sqrt(2 / 2000)
    assert layer.weight.std().item() / nominal == pytest.approx(0.988, abs=0.003)
    assert layer.weight.abs().max().item() <= 3 * nominal


@pytest.mark.parametrize("vocab_size", [128_000, 129_280, 10_000])
def test_vocabulary_sizes_named_in_the_notes(vocab_size: int) -> None:
    with torch.device("meta"):
        model = Transformer(ModelConfig(vocab_size=vocab_size, d_model=64, n_layers=1, n_heads=4))
    assert model.embed.weight.shape == (vocab_size, 64)


def test_two_linear_layers_without_a_bend_are_one() -> None:
    """y = (x W0^T) W1^T = x (W1 W0)^T."""
    first, second, x = Linear(5, 7), Linear(7, 3), torch.randn(2, 4, 5)
    torch.testing.assert_close(second(first(x)), x @ (second.weight @ first.weight).T, atol=1e-5, rtol=0)


ORDERS = ["订单成交", "订单取消", "查询订单", "订单过期"]


def test_the_first_merge_of_four_orders() -> None:
    """订 + 单 stands in all four lines, every other pair in one; over bytes 订单 is the fifth merge."""
    pairs = Counter(pair for line in ORDERS for pair in itertools.pairwise(line))
    assert pairs.pop(("订", "单")) == 4 and set(pairs.values()) == {1}
    _, merges = train_bpe(ORDERS, vocab_size=10 + 1, alphabet="characters")
    assert merges[0] == ("订".encode(), "单".encode())
    _, merges = train_bpe(ORDERS, vocab_size=256 + 5)
    assert [b"".join(pair) for pair in merges].index("订单".encode()) == 4


def test_bytes_per_token() -> None:
    """The 20 UTF-8 bytes of "Hello, 🌍! 你好!" as 8 tokens 2.5 bytes each, as single bytes 1."""
    text = "Hello, 🌍! 你好!"
    assert len(text.encode()) == 20
    bytes_alone = Tokenizer({i: bytes([i]) for i in range(256)}, [])
    assert bytes_alone.encode(text) == list(text.encode())
    assert bytes_alone.compression(text) == 1
    merged = Tokenizer(*train_bpe([text], vocab_size=256 + 12))  # each merge saves one of the 20
    assert len(merged.encode(text)) == 8
    assert merged.compression(text) == 2.5
    assert merged.decode(merged.encode(text)) == text

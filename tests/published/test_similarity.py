"""Sentence vectors, measures, search, neighbours: worked numbers."""

import doctest
import math
from typing import Any

import pytest
import torch

from clearhead import ModelConfig, Tokenizer, Transformer
from clearhead.published import similarity as module
from clearhead.published.similarity import embed, nearest, neighbours, read_expression, similarity
from clearhead.text.usage import Usage

WORDS = ["king", "queen", "man", "woman", "apple", "the"]


@pytest.fixture
def tokenizer() -> Tokenizer:
    """Every word is a token, alone and after a space."""
    vocab = {i: bytes([i]) for i in range(256)}
    merges: list[tuple[bytes, bytes]] = []
    for word in [f" {word}" for word in WORDS]:
        made = word[:1].encode()
        for letter in word[1:].encode():
            pair = (made, bytes([letter]))
            made += bytes([letter])
            if pair not in merges:
                merges.append(pair)
                vocab[len(vocab)] = made
    return Tokenizer(vocab, merges)


def small_model(tokenizer: Tokenizer, shape: Any = "encoder", **changes: Any) -> Transformer:
    sizes: dict[str, Any] = {"max_len": 20, "d_model": 16, "n_layers": 2, "n_heads": 2}
    config = ModelConfig(shape=shape, vocab_size=tokenizer.vocab_size, **(sizes | changes))
    return Transformer(config, seed=0).eval()


def test_the_five_measures() -> None:
    """Worked by hand for (1, 2) and (4, 6), whose difference is (3, 4)."""
    one, other = torch.tensor([[1.0, 2.0]]), torch.tensor([[4.0, 6.0]])
    expected = {
        "cosine": 16 / math.sqrt(5 * 52),
        "dot": 16.0,
        "euclidean": 5.0,
        "manhattan": 7.0,
        "chebyshev": 4.0,
    }
    assert {kind: similarity(one, other, kind).item() for kind in expected} == pytest.approx(expected)
    assert similarity(one, torch.randn(3, 2)).shape == (1, 3)
    with pytest.raises(ValueError, match="unknown measure 'angle'; known: cosine, dot, euclidean"):
        similarity(one, other, "angle")


def test_nearest_means_larger_or_smaller() -> None:
    vectors = torch.tensor([[9.0, 0.0], [1.0, 0.5], [0.0, 1.0]])
    query = torch.tensor([1.0, 0.0])
    assert [row for row, _ in nearest(query, vectors, kind="cosine")] == [0, 1, 2]
    assert [row for row, _ in nearest(query, vectors, kind="euclidean", top_k=2)] == [1, 2]
    assert [row for row, _ in nearest(query, vectors, without={0})] == [1, 2]
    with pytest.raises(ValueError, match="top_k=0 must be at least 1"):
        nearest(query, vectors, top_k=0)


@pytest.mark.parametrize("shape", ["encoder", "decoder", "encoder-decoder"])
@pytest.mark.parametrize("pool", ["mean", "first", "last"])
def test_a_vector_does_not_depend_on_its_neighbours(shape: str, pool: Any, tokenizer: Tokenizer) -> None:
    model = small_model(tokenizer, shape, positions="learned")
    texts = [" the king", " apple", " the woman the man the queen", " man"]
    together = embed(model, tokenizer, texts, pool=pool, batch_size=3)
    for text, vector in zip(texts, together, strict=True):
        alone = embed(model, tokenizer, [text], pool=pool)[0]
        assert torch.allclose(alone, vector, atol=1e-5)
    unit = embed(model, tokenizer, texts, pool=pool, normalise=True)
    assert torch.allclose(unit.norm(dim=-1), torch.ones(4))
    assert torch.allclose(unit, torch.nn.functional.normalize(together, dim=-1), atol=1e-6)


def test_the_folder_says_how(tokenizer: Tokenizer) -> None:
    """Pooling, length and the longest sentence come from what lies beside the vocabulary."""
    modules = [{"path": "p", "type": "x.Pooling"}, {"path": "n", "type": "x.Normalize"}]
    files = {
        "modules.json": modules,
        "p/config.json": {"pooling_mode_cls_token": True},
        "sentence_bert_config.json": {"max_seq_length": 2},
    }
    model, named = small_model(tokenizer), tokenizer.with_usage(Usage(files))
    text = " the king the queen"
    expected = embed(model, tokenizer, [text], pool="first", normalise=True, max_len=2)
    assert torch.equal(embed(model, named, [text]), expected)
    assert not torch.allclose(embed(model, named, [text], max_len=4), expected)


def test_mistakes_of_embed(tokenizer: Tokenizer) -> None:
    model = small_model(tokenizer)
    with pytest.raises(ValueError, match="text 2 is empty"):
        embed(model, tokenizer, ["a", ""])
    assert embed(model, tokenizer, ["x" * 500]).shape == (1, 16)  # cut at max_len


def test_analogies(tokenizer: Tokenizer) -> None:
    """king - man + woman is queen where the table was made so; the words asked for are no answer."""
    model = small_model(tokenizer)
    rows = {word: tokenizer.encode(f" {word}")[0] for word in WORDS}
    royal, male, female = torch.randn(3, 16)
    with torch.no_grad():
        model.embed.weight[rows["king"]] = royal + male
        model.embed.weight[rows["queen"]] = royal + female
        model.embed.weight[rows["man"]], model.embed.weight[rows["woman"]] = male, female
    found = neighbours(model, tokenizer, "king - man + woman", top_k=3)
    assert found[0] == (" queen", pytest.approx(1.0)) and len(found) == 3
    assert neighbours(model, tokenizer, "king - man + woman", kind="euclidean")[0][0] == " queen"
    assert not {word for word, _ in found} & {" king", " man", " woman"}


def test_mistakes_of_neighbours(tokenizer: Tokenizer) -> None:
    model = small_model(tokenizer)
    with pytest.raises(ValueError, match="'kingly' is no single token here, but"):
        neighbours(model, tokenizer, "kingly")
    for empty in ("", "  ", "king - "):
        with pytest.raises(ValueError, match=r"no single token|is no word and no sum"):
            neighbours(model, tokenizer, empty)
    assert read_expression("well-known + x") == [(1, "well-known"), (1, "x")]


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(module).failed == 0

"""What a page is told of a model: lens, heads, slices, passes that grow, edits. Over every architecture."""

import functools
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from clearhead.generation.decode import generate
from clearhead.inspector.manifest import manifest
from clearhead.inspector.passes import Pass, Passes, Question
from clearhead.inspector.record import Edit
from clearhead.inspector.spelling import Speller, spell
from clearhead.inspector.trace import source_text, trace
from clearhead.inspector.views import (
    cut,
    halved,
    head_scores,
    parse_place,
    pool,
    pool_factor,
    pushes,
    thumbnails,
)
from clearhead.model.transformer import Transformer
from clearhead.text.tokenizer import Tokenizer
from reference.zoo import ZOO, animal
from serving import CORPUS, TEXT, tiny_decoder

ANIMALS = [*ZOO, "foreign"]
WITH_LENS = [name for name in ZOO if ZOO[name].get("head", "lm") in ("lm", "masked", "token")]
DECODERS = [name for name in ZOO if ZOO[name].get("shape") != "encoder"]
TOKENS = (0, 5, 7, 11, 13, 7, 11, 2, 9)


def question(model: Any, ids: tuple[int, ...] = TOKENS, **more: Any) -> Question:
    """These tokens, with a source where one is read."""
    two_sided = isinstance(model, Transformer) and model.config.shape == "encoder-decoder"
    return Question(ids, (4, 5, 6, 7) if two_sided else None, **more)


@functools.cache
def animals(name: str) -> Any:
    return animal(name)


@functools.cache
def passes_of(name: str) -> Passes:
    """The passes of an animal, shared by the tests: what one asked may be kept when the next asks."""
    return Passes(animals(name), question(animals(name)))


def at_once(passes: Passes, asked: Question) -> Pass:
    """The pass of all tokens at once, whatever is kept."""
    with torch.no_grad():
        return passes._new("new", asked)


def shown(found: Pass) -> list[Tensor]:
    """All that the map shows of a pass."""
    heads = [tensor for each in found.heads.values() for tensor in (each.picture, each.scores, each.last)]
    lens = [] if found.lens is None else [found.lens.ids, found.lens.p]
    return [found.output, *lens, *found.norms.values(), *heads]


# ---------------------------------------------------------------------------------------------- manifest


@pytest.mark.parametrize("name", ANIMALS)
def test_manifest_names_what_a_pass_makes(name: str) -> None:
    """Every value and parameter stands in it, its source line holds its name, its rows are values."""
    passes = passes_of(name)
    told = manifest(passes.model, None, passes.outline)
    named = [value["name"] for value in told["values"]]
    assert named == list(passes.outline.values)
    assert [p["name"] for p in told["parameters"]] == [n for n, _ in passes.model.named_parameters()]
    for stack in told["stacks"]:
        rows = [stack["start"], *(row["name"] for layer in stack["layers"] for row in layer["rows"])]
        assert set(rows) <= set(named)
        for layer, part in itertools.product(stack["layers"], ("scores", "weights")):
            assert all(f"{attention['path']}.{part}" in named for attention in layer["attention"])


@pytest.mark.parametrize("name", ["mha rotary", "experts", "encoder-decoder"])
def test_source_lines_name_their_taps(name: str) -> None:
    """Invariant 22: the line shown for a tap holds the tap's name, in the file that was imported."""
    passes = passes_of(name)
    for node in passes.outline.nodes.values():
        if node.tapped:
            line = source_text(node.key, passes.model).splitlines()[node.line - 1]
            assert f'"{node.name.split(".")[-1]}"' in line or "tap(name" in line


# -------------------------------------------------------------------------------------------------- lens


@pytest.mark.parametrize("name", WITH_LENS)
def test_lens_of_the_last_row_is_the_models_answer(name: str) -> None:
    """Invariant 19, bitwise; and every other row is the head of the norm of a recorded value."""
    passes = passes_of(name)
    found = passes.run(question(passes.model))
    assert found.lens is not None and found.trace is not None and passes.main is not None
    logits = found.trace.values["logits"][0].float()
    probabilities = torch.exp(logits.max(-1).values - logits.logsumexp(-1))
    assert torch.equal(found.lens.p[-1], probabilities)
    assert torch.equal(found.lens.ids[-1].long(), logits.argmax(-1))
    model: Any = passes.model
    rows = passes.map[passes.main["name"]]
    with torch.no_grad():
        for number, row in enumerate(rows[:-1]):
            said = model.head(model.stack.norm(found.trace.values[row]))[0].softmax(-1)
            torch.testing.assert_close(found.lens.p[number], said.max(-1).values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ANIMALS)
def test_recorded_logits_are_near_those_of_the_fused_path(name: str) -> None:
    """Invariant 6: the difference to what `generate` computes is measured, kept, and small."""
    passes = passes_of(name)
    found = passes.run(question(passes.model))
    if name == "foreign":
        assert found.delta is None
    else:
        assert found.delta is not None
        assert found.delta <= 1e-4 * max(1.0, float(found.output.std()))


@pytest.mark.parametrize("name", WITH_LENS)
def test_what_the_depths_add_is_the_logit(name: str) -> None:
    """Invariant 15: start, layers and biases sum to every logit before its softcap, the norm's scale held."""
    passes = passes_of(name)
    found, model = passes.run(question(passes.model)), passes.model
    assert found.trace is not None and passes.main is not None
    values = [found.trace.values[row][0, 2] for row in passes.map[passes.main["name"]]]
    told = [pushes(model, torch.stack(values), word) for word in range(found.output.shape[-1])]
    if None in told:
        assert model.config.head != "lm"
        return
    sums = torch.tensor([float(each[0].sum()) + each[1] for each in told if each is not None])
    cap = model.config.logit_softcap
    logits = sums if cap is None else cap * torch.tanh(sums / cap)
    torch.testing.assert_close(logits, found.output[2], rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------------- heads


@given(st.integers(1, 80), st.integers(1, 80), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_a_pixel_is_the_largest_of_its_cells(n_queries: int, n_keys: int, seed: int) -> None:
    """Invariant 25, thumbnails: each pixel stands for exactly its cells; unused ones are 0."""
    weights = torch.rand(2, n_queries, n_keys, generator=torch.Generator().manual_seed(seed))
    factor = pool_factor(n_queries, n_keys)
    picture = thumbnails(weights, factor)
    assert factor * 32 >= max(n_queries, n_keys) and (factor == 1 or factor * 16 < max(n_queries, n_keys))
    for row, column in itertools.product(range(0, 32, 5), range(0, 32, 5)):
        cells = weights[:, row * factor : (row + 1) * factor, column * factor : (column + 1) * factor]
        wanted = (cells.amax((1, 2)) * 255).round().byte() if cells.numel() else torch.zeros(2).byte()
        assert torch.equal(picture[:, row, column], wanted)


@given(st.integers(2, 70), st.data())
@settings(max_examples=30, deadline=None)
def test_a_picture_that_grows_is_the_picture_of_the_whole(length: int, data: st.DataObject) -> None:
    """Rows that are added later give the same pixels."""
    start = data.draw(st.integers(1, length - 1))
    weights = torch.rand(2, length, length).tril()
    factor = pool_factor(length, length)
    grown = torch.maximum(
        thumbnails(weights[:, :start], factor), thumbnails(weights[:, start:], factor, start)
    )
    assert torch.equal(grown, thumbnails(weights, factor))
    assert torch.equal(halved(grown, 1), thumbnails(weights, 2 * factor))


def test_scores_of_heads_are_what_they_say() -> None:
    """Against a plain loop over the cells."""
    tokens = torch.tensor([3, 1, 3, 1, 3])
    weights = torch.rand(2, 5, 5).tril().softmax(-1).tril()
    found = head_scores(weights, tokens, tokens)
    for h, t in itertools.product(range(2), range(5)):
        row = [float(w) for w in weights[h, t, : t + 1]]
        same = sum(w for s, w in enumerate(row) if tokens[s] == tokens[t] and s != t)
        induction = sum(w for s, w in enumerate(row) if s > 0 and tokens[s - 1] == tokens[t] and s - 1 != t)
        wanted = [
            -sum(w * torch.tensor(w).log().item() for w in row if w),
            sum(w * (t - s) for s, w in enumerate(row)),
            row[t - 1] if t else 0.0,
            same,
            induction,
            row[0],
        ]
        assert found[h, t].tolist() == pytest.approx(wanted, abs=1e-5)


# ------------------------------------------------------------------------------------------------ slices


@given(st.integers(1, 17), st.integers(1, 17), st.integers(0, 5), st.sampled_from(["max", "sum"]))
@settings(max_examples=60, deadline=None)
def test_a_pooled_cell_is_made_of_exactly_its_cells(rows: int, columns: int, level: int, how: Any) -> None:
    """Invariant 25: the max or the sum of 2^level x 2^level cells, fewer at the edge."""
    value = torch.randint(-50, 50, (3, rows, columns)).float()
    pooled = pool(value, level, how)
    n = 1 << level
    assert pooled.shape == (3, -(-rows // n), -(-columns // n))
    for i, j in itertools.product(range(pooled.shape[1]), range(pooled.shape[2])):
        cells = value[:, i * n : (i + 1) * n, j * n : (j + 1) * n]
        wanted = cells.amax((1, 2)) if how == "max" else cells.sum((1, 2))
        assert torch.equal(pooled[:, i, j], wanted)


def test_a_slice_is_the_recorded_numbers() -> None:
    """At level 0 bitwise; as bytes within half a step of the legend."""
    value = torch.randn(1, 3, 8, 8)
    assert torch.equal(cut(value, "0,1,:,2:5").x, value[0, 1, :, 2:5])
    small = cut(value, "0,1", dtype="u8")
    back = small.low + small.x.float() * (small.high - small.low) / 255
    assert (back - value[0, 1]).abs().max() <= (small.high - small.low) / 255 / 2 + 1e-6


@pytest.mark.parametrize("at", ["9", "0,0,0,0,0", "-1", "a", "0:", ":,5:2", "0,1e3", "٣", "0;1", "::2"])
def test_a_place_that_is_not_there_is_named(at: str) -> None:
    """Every mistake is a ValueError that quotes the place."""
    if at == "0:":
        assert parse_place(at, (3, 4)) == (slice(0, 3), slice(0, 4))
        return
    with pytest.raises(ValueError, match="at="):
        parse_place(at, (3, 4, 5))


# ------------------------------------------------------------------------------------------------ passes


@pytest.mark.parametrize("name", ANIMALS)
def test_the_same_question_has_the_same_number(name: str) -> None:
    """And it is kept: the second answer is the first."""
    passes = passes_of(name)
    first = passes.run(question(passes.model))
    assert passes.run(question(passes.model)) is first
    assert passes.identify(first.question) == first.id
    assert passes.identify(question(passes.model, (1, 2, 3))) != first.id


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
def test_every_architecture_grows_by_a_token(name: str) -> None:
    """One more token on the keys and values of those before shows what reading all at once shows."""
    model = animals(name)
    passes = Passes(model, question(model))
    passes.run(question(model))
    grown = passes.run(question(model, (*TOKENS, 3)))
    assert grown.joined
    whole = at_once(passes, grown.question)
    for one, other in zip(shown(grown), shown(whole), strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["mha rotary", "encoder-decoder"])
def test_the_difference_of_what_was_typed_is_measured_when_asked(name: str) -> None:
    """Invariant 6: a longer pass knows no difference until somebody asks; then the fused path reads all that
    was typed since, and what is typed after that goes on as before.
    """
    model = animals(name)
    passes = Passes(model, question(model))
    passes.run(question(model))
    for ids in [(*TOKENS, 3), (*TOKENS, 3, 8), (*TOKENS, 4)]:
        grown = passes.run(question(model, ids))
        assert grown.joined and grown.delta is None
    apart = passes.measure(grown)
    assert apart is not None and apart == grown.delta
    assert 0 < apart <= 1e-4 * max(1.0, float(grown.output.std()))
    later = passes.run(question(model, (*TOKENS, 4, 9)))
    assert later.joined
    torch.testing.assert_close(later.output, at_once(passes, later.question).output, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gqa interleaved", "encoder-decoder shared"])
def test_a_pass_made_longer_shows_what_a_whole_one_shows(name: str) -> None:
    """Typing at the end, taking back, typing something else: as if all had been read at once."""
    model = animals(name)
    passes = Passes(model, question(model))
    passes.run(question(model))
    for ids in [(*TOKENS, 3), (*TOKENS, 3, 8, 1), (*TOKENS, 3), (*TOKENS[:-2], 4, 4), TOKENS[:5]]:
        grown = passes.run(question(model, ids))
        assert grown.joined
        whole = at_once(passes_of(name), question(model, ids))
        assert grown.length == len(ids)
        for one, other in zip(shown(grown), shown(whole), strict=True):
            torch.testing.assert_close(one.float(), other.float(), rtol=1e-4, atol=1e-5)
        for look in passes.looks:
            there = passes.line(grown, look, 1)
            assert whole.trace is not None
            row = whole.trace.values[f"{look.path}.weights"][0, :, 1, : there.shape[-1]]
            torch.testing.assert_close(there, row)


def test_growing_past_a_pixel_and_the_cache() -> None:
    """One token after another over the sizes where pictures and cache change."""
    model = tiny_decoder(61, max_len=300)
    passes = Passes(model, question(model))
    ids = tuple(torch.arange(126).remainder(61).tolist())
    passes.run(Question(ids))
    for _ in range(5):
        ids = (*ids, 7)
        grown = passes.run(Question(ids))
        assert grown.joined
    whole = Passes(model, question(model)).run(Question(ids))
    for one, other in zip(shown(grown), shown(whole), strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=1e-4, atol=1e-5)


def test_a_pass_that_was_called_off_leaves_nothing_behind() -> None:
    """A newer question stops a pass between two layers; the next one is right."""
    model = tiny_decoder(61)
    passes = Passes(model, question(model))
    passes.run(Question(TOKENS))
    calls: list[int] = []

    def stop() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        passes.run(Question((*TOKENS, 1)), stop)
    grown = passes.run(Question((*TOKENS, 2)))
    whole = Passes(model, question(model)).run(Question((*TOKENS, 2)))
    assert len(calls) == 2
    torch.testing.assert_close(grown.output, whole.output)


@pytest.fixture(scope="module")
def long() -> tuple[Passes, Pass, Pass]:
    """A text that counts as long: its pass, and the same made longer by a token."""
    monkey = pytest.MonkeyPatch()
    monkey.setattr("clearhead.inspector.passes.SHORT", 1000)
    monkey.setattr("clearhead.inspector.passes.KEPT_WEIGHTS", 1000)
    model = tiny_decoder(61)
    passes = Passes(model, question(model))
    found = passes.run(Question(TOKENS * 5))
    grown = passes.run(Question((*TOKENS * 5, 3)))
    monkey.undo()
    return passes, found, grown


def test_a_block_run_again_gives_the_kept_row_bitwise(long: tuple[Passes, Pass, Pass]) -> None:
    """Invariant 26: of a long pass only rows are kept, and an opened block ends where the next began."""
    passes, found, _ = long
    assert found.trace is None
    for block in ("decoder.blocks.0", "decoder.blocks.2"):
        again = passes.trace_of(found, f"{block}.attn.scores")
        assert torch.equal(again.values[block], found.rows[block])
        assert torch.equal(again.values[f"{block}.middle"], found.rows[f"{block}.middle"])


def test_a_long_pass_shows_what_a_short_one_shows(long: tuple[Passes, Pass, Pass]) -> None:
    """The map, the lines of any position, and the numbers inside."""
    passes, found, grown = long
    for each in (found, grown):
        whole = at_once(passes, each.question)
        assert whole.trace is not None
        for one, other in zip(shown(each), shown(whole), strict=True):
            torch.testing.assert_close(one.float(), other.float(), rtol=1e-4, atol=1e-5)
        for look, position in itertools.product(passes.looks, (3, 44)):
            row = whole.trace.values[f"{look.path}.weights"][0, :, position]
            torch.testing.assert_close(passes.line(each, look, position), row)
        name = "decoder.blocks.1.attn.scores"
        torch.testing.assert_close(passes.value(each, name), whole.trace.values[name], rtol=1e-4, atol=1e-5)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many texts are looked at, no more than the limit is kept; a dropped one is made again."""
    passes = Passes(animals("mha rotary"), Question(TOKENS))
    first = passes.run(Question((1, 2, 3)))
    monkeypatch.setattr("clearhead.inspector.passes.KEPT", first.n_bytes)
    for number in range(3):
        passes.run(Question((number, 4, 5)))
        assert len(passes.kept) == 2 and first.n_bytes > 1000
    assert first.id not in passes.kept
    assert torch.equal(passes.find(first.id).output, first.output)
    with pytest.raises(KeyError, match="no trace"):
        passes.find("nothing")


# ------------------------------------------------------------------------------------------------- edits

HEAD = Edit("decoder.blocks.1.attn.weights", "zero", (None, 2))


def test_an_edit_changes_nothing_before_it() -> None:
    """Invariant 23: values made earlier are bitwise as without the edit, later ones are not."""
    model = tiny_decoder(61)
    passes = Passes(model, question(model))
    plain = passes.run(Question(TOKENS))
    edited = passes.run(Question(TOKENS, None, (HEAD,), "one"))
    assert plain.trace is not None and edited.trace is not None
    names = list(plain.trace.values)
    place = names.index(HEAD.name)
    for name in names[:place]:
        assert torch.equal(plain.trace.values[name], edited.trace.values[name]), name
    assert float(edited.trace.values[HEAD.name][0, 2].abs().max()) == 0
    assert not torch.equal(plain.output, edited.output)
    assert edited.id != plain.id


@pytest.mark.parametrize("name", ["mha rotary", "sandwich soft-cap", "experts", "encoder-decoder shared"])
def test_writing_what_stood_there_changes_nothing(name: str) -> None:
    """Invariant 23: a patch with a value's own numbers gives the unedited pass bitwise."""
    passes = passes_of(name)
    plain = passes.run(question(passes.model))
    assert plain.trace is not None
    for value in ("decoder.blocks.0.attn.weights", "decoder.blocks.1.middle", "decoder.blocks.1.ff"):
        edit = Edit(value, "patch", (), plain.trace.values[value])
        edited = passes.run(question(passes.model, edits=(edit,), edit_key=value))
        for one, other in zip(shown(plain), shown(edited), strict=True):
            assert torch.equal(one, other)


def test_an_edit_of_a_grown_pass_is_compared_with_a_whole_one() -> None:
    """The unedited text is read at once too: what differs is the edit's."""
    model = tiny_decoder(61)
    passes = Passes(model, question(model))
    passes.run(Question(TOKENS))
    ids = (*TOKENS, 3)
    assert passes.run(Question(ids)).joined
    edited = passes.run(Question(ids, None, (HEAD,), "one"))
    plain = passes.run(Question(ids))
    assert not plain.joined and plain.trace is not None and edited.trace is not None
    row = "decoder.blocks.1.attn.scores"
    assert torch.equal(plain.trace.values[row], edited.trace.values[row])
    assert plain.lens is not None and edited.lens is not None
    assert torch.equal(plain.lens.p[:3], edited.lens.p[:3])


def test_without_heads_attention_is_its_bias() -> None:
    """Invariant 24: all heads of a layer off, and the layer's attention adds only the output's bias."""
    model: Any = tiny_decoder(61, out_bias=True)
    passes = Passes(model, question(model))
    off = Edit("decoder.blocks.1.attn.mixed", "zero")
    edited = passes.run(Question(TOKENS, None, (off,), "off"))
    assert edited.trace is not None
    attention = edited.trace.values["decoder.blocks.1.attn"]
    assert torch.equal(attention, model.decoder.blocks[1].attn.o.bias.expand_as(attention))


# -------------------------------------------------------------------------------------------------- words


def test_the_bytes_of_the_tokens_are_the_text(tokenizer: Tokenizer) -> None:
    """Invariant 2, with a character that two tokens share."""
    speller = Speller(tokenizer)
    for text in (TEXT, "naïve 猫 🐈", "a<|endoftext|>b", "\x00\n"):
        pieces = speller.pieces(tokenizer.encode(text))
        assert b"".join(bytes.fromhex(piece.bytes) for piece in pieces) == text.encode()
        assert [p.start for p in pieces[1:]] == [p.end for p in pieces[:-1]]
        assert [p.special for p in pieces].count(True) == text.count("<|endoftext|>")


def test_a_cut_character_is_spelled_by_its_bytes() -> None:
    """Tokens that hold parts of one character read differently; whole characters read as themselves."""
    assert [spell(raw) for raw in (b" \xe4\xbd", b"\xa0", "你".encode(), b"\xff\xfea", b"")] == [
        " ⟨e4 bd⟩",
        "⟨a0⟩",
        "你",
        "⟨ff fe⟩a",
        "",
    ]


def test_merges_build_the_token(tokenizer: Tokenizer) -> None:
    """Played from single bytes, they end with the token, and each is a merge of the vocabulary."""
    speller = Speller(tokenizer)
    known = set(tokenizer.merges)
    for token in set(tokenizer.encode(CORPUS)):
        symbols = [bytes([byte]) for byte in tokenizer.token_bytes(token)]
        special = token in tokenizer.special_tokens.values()
        for step in speller.merges(token):
            left, right = (bytes.fromhex(part) for part in step.split())
            assert (left, right) in known
            joined, place = [], 0
            while place < len(symbols):
                both = symbols[place : place + 2] == [left, right]
                joined.append(left + right if both else symbols[place])
                place += 2 if both else 1
            symbols = joined
        assert special or symbols == [tokenizer.token_bytes(token)]


def test_a_trace_of_the_library_is_the_pass(tokenizer: Tokenizer) -> None:
    """What the server keeps is what `trace` gives, and greedy tokens are those of `generate`."""
    model = tiny_decoder(tokenizer.vocab_size)
    ids = tokenizer.encode(TEXT)
    passes = Passes(model, Question(tuple(ids)))
    found = passes.run(Question(tuple(ids)))
    again = trace(model, torch.tensor([ids]))
    assert found.trace is not None
    assert all(torch.equal(value, again.values[name]) for name, value in found.trace.values.items())
    assert generate(model, ids, max_new_tokens=1) == [int(found.output[-1].argmax())]

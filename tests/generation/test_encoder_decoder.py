"""An encoder-decoder speaks: the prompt is its source, read once, and its words begin at the start id."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

from clearhead import ModelConfig, Tokenizer, Transformer, generate
from clearhead.generation.decode import stream
from clearhead.generation.special_ids import SpecialIds, published_ids
from clearhead.published.weights import Origin

START, END = 5, 0
PROMPTS = [[7, 8, 9], [3, 1, 4, 1, 5, 9, 2, 6], [11], [2, 7, 1, 8, 2]]


@functools.cache
def make_model(**changes: Any) -> Transformer:
    sizes: dict[str, Any] = {
        "shape": "encoder-decoder",
        "vocab_size": 41,
        "source_vocab_size": 23,
        "max_len": 24,
        "d_model": 24,
        "n_layers": 2,
        "n_encoder_layers": 3,
        "n_heads": 4,
        "n_encoder_heads": 3,
        "d_ff": 40,
        "positions": "sinusoidal",
    }
    model = Transformer(ModelConfig(**sizes | changes))
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0, 0.4, generator=generator)
    return model.eval()


def published(generation: dict[str, Any] | None, **settings: Any) -> Transformer:
    """The model with a folder behind it that says this."""
    model = Transformer(make_model().config)
    model.load_state_dict(make_model().state_dict())
    model.origin = Origin("marian", settings, generation)
    return model.eval()


def slow_answer(model: Transformer, source: list[int], n: int, start: int = START) -> list[int]:
    """Greedy without a cache: the whole model anew for every token."""
    said = [start]
    with torch.no_grad():
        for _ in range(n):
            logits = model(torch.tensor([said]), source=torch.tensor([source]))
            said.append(int(logits[0, -1].argmax()))
    return said[1:]


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "relative", "rotary", "none"])
def test_a_batch_with_a_cache_equals_each_source_alone_without_one(positions: str) -> None:
    model = make_model(positions=positions)
    expected = [slow_answer(model, prompt, 9) for prompt in PROMPTS]
    assert generate(model, PROMPTS, max_new_tokens=9, start_id=START, eos_id=()) == expected
    assert len({tuple(row) for row in expected}) > 1, "the answers depend on the source"


def test_the_third_call_equals_the_first() -> None:
    answers = [
        generate(make_model(), PROMPTS, max_new_tokens=6, start_id=START, eos_id=(), temperature=1.0, seed=4)
        for _ in range(3)
    ]
    assert answers[0] == answers[1] == answers[2]


def test_a_row_ends_at_the_end_id_and_a_tensor_is_filled_up() -> None:
    long = generate(make_model(), PROMPTS, max_new_tokens=9, start_id=START, eos_id=())
    end = next(row[1] for row in long if row[1] != row[0])
    short = generate(make_model(), PROMPTS, max_new_tokens=9, start_id=START, eos_id=end)
    assert short == [row[: row.index(end) + 1] if end in row else row for row in long]
    sources = torch.tensor(PROMPTS[0])[None].expand(2, -1)
    answer = generate(make_model(), sources, max_new_tokens=9, start_id=START, eos_id=end, pad_id=40)
    assert answer.shape[0] == 2 and torch.equal(answer[0], answer[1])


def test_dropout_is_off_while_the_source_is_read() -> None:
    """Also in a model that is being trained, which stays in training."""
    model = Transformer(make_model().config.replace(residual_dropout=0.5, embed_dropout=0.5)).train()
    model.load_state_dict(make_model().state_dict())
    quiet = generate(make_model(), PROMPTS, max_new_tokens=6, start_id=START, eos_id=())
    assert generate(model, PROMPTS, max_new_tokens=6, start_id=START, eos_id=()) == quiet
    assert all(module.training for module in model.modules())


def test_what_the_published_folder_names_is_obeyed() -> None:
    """Start, end and padding, a first and a last token; what is asked for goes before."""
    names = {"decoder_start_token_id": START, "eos_token_id": [END], "pad_token_id": 40}
    free = slow_answer(make_model(), PROMPTS[1], 6)
    assert generate(published(names), PROMPTS[1], max_new_tokens=6) == free
    forced = generate(published(names | {"forced_bos_token_id": 17}), PROMPTS[1], max_new_tokens=6)
    assert forced[0] == 17
    ended = generate(published(names | {"forced_eos_token_id": END}), PROMPTS[1], max_new_tokens=6)
    assert ended == [*free[:5], END]
    assert generate(published(names), PROMPTS[1], max_new_tokens=6, eos_id=free[0]) == free[:1]
    banned = generate(published(names | {"bad_words_ids": [[free[0]], [END]]}), PROMPTS[1], max_new_tokens=6)
    assert free[0] not in banned


def test_older_folders_say_it_in_config_json() -> None:
    model = published(None, decoder_start_token_id=START, eos_token_id=END, forced_eos_token_id=END)
    assert published_ids(model) == SpecialIds(start=START, ends=(END,), last=END)
    newer = published({"eos_token_id": 3}, decoder_start_token_id=START, forced_eos_token_id=END)
    assert published_ids(newer) == SpecialIds(start=START, ends=(3,))
    words = published(None, decoder_start_token_id=40, pad_token_id=40, bad_words_ids=[[40]], num_beams=4)
    assert published_ids(words) == SpecialIds(start=40, pad=40, banned=(40,))
    assert 40 not in generate(words, PROMPTS[1], max_new_tokens=6)


def test_ids_outside_the_vocabulary_mean_none() -> None:
    ids = {"pad_token_id": -1, "eos_token_id": [41, 2], "bos_token_id": START, "bad_words_ids": [[41], [-1]]}
    model = published(ids)
    assert published_ids(model) == SpecialIds(start=START, ends=(2,))


def test_text_is_read_as_a_sentence_and_answered_as_text() -> None:
    """The source gets the tokens that the tokenizer puts around a sentence."""
    vocab = {i: bytes([97 + i]) for i in range(20)} | {20: b"<e>"}
    tokenizer = Tokenizer(vocab, [], special_tokens=["<e>"], splitter="none", end=["<e>"])
    model = make_model(vocab_size=21)
    ids = generate(model, [1, 2, 20], max_new_tokens=5, start_id=START, eos_id=20)
    text = generate(model, "bc", tokenizer=tokenizer, max_new_tokens=5, start_id=START, eos_id=20)
    assert text == tokenizer.decode([id for id in ids if id != 20])
    pieces = stream(model, "bc", tokenizer=tokenizer, max_new_tokens=5, start_id=START, eos_id=20)
    assert "".join(pieces) == text


# Mistakes


def test_mistakes_are_named() -> None:
    model = make_model()
    with pytest.raises(ValueError, match="begins with a token of its own; give start_id"):
        generate(model, [1, 2])
    with pytest.raises(ValueError, match=r"start_id: token id 41 is outside .* 0\.\.40"):
        generate(model, [1, 2], start_id=41)
    with pytest.raises(ValueError, match=r"prompts\[0\]: token id 23 is outside .* 0\.\.22"):
        generate(model, [1, 23], start_id=START)
    with pytest.raises(ValueError, match="overflow='slide' is for decoders"):
        generate(model, [1, 2], start_id=START, overflow="slide")
    with pytest.raises(ValueError, match="max_new_tokens of at most 23 fits"):
        generate(model, [1, 2], start_id=START, max_new_tokens=24)
    decoder = Transformer(ModelConfig(vocab_size=41, d_model=24, n_layers=1, n_heads=4))
    with pytest.raises(ValueError, match="start_id=5 is for encoder-decoders"):
        generate(decoder, [1, 2], start_id=START)

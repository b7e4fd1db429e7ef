"""The model speaks: equal to `transformers` and to a dull twin, one row or many, as ids, text and stream."""

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from clearhead import ModelConfig, Tokenizer, Transformer, generate
from clearhead.generation.decode import Decoding, stream
from clearhead.generation.reply import Reply
from clearhead.generation.sample import Sampling
from reference.naive_decode import naive_cut, naive_generate

END = "<|endoftext|>"
EOS = 256

# Greedy, penalised, and each filter; the last has them all.
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, penalised": {"repetition_penalty": 1.3},
    "temperature": {"temperature": 0.7},
    "top-k": {"temperature": 1.0, "top_k": 7},
    "top-p": {"temperature": 1.2, "top_p": 0.8},
    "all": {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2},
}


def randomise(model: nn.Module, seed: int) -> None:
    """Every tensor random, and large enough that the next token depends on the context."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0, 0.3, generator=generator)


def make_model(**changes: Any) -> Transformer:
    sizes = {"vocab_size": 257, "max_len": 64, "d_model": 24, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2}
    model = Transformer(ModelConfig(**{**sizes, "d_ff": 40, **changes}))
    randomise(model, seed=1)
    return model


@functools.cache
def small_model() -> Transformer:
    return make_model().eval()


@functools.cache
def byte_tokenizer() -> Tokenizer:
    """The 256 bytes and an end-of-text token: every character but ASCII takes several ids."""
    vocab = {i: bytes([i]) for i in range(256)} | {EOS: END.encode()}
    return Tokenizer(vocab, [], special_tokens=[END])


def random_prompts(n: int, longest: int, vocab_size: int = 257) -> list[list[int]]:
    generator = torch.Generator().manual_seed(n)
    lengths = torch.randint(1, longest + 1, (n,), generator=generator).tolist()
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]


class Parrot(Transformer):
    """Says the given ids whatever the prompt, one row of them per row of the batch."""

    def __init__(self, scripts: list[list[int]], vocab_size: int = 257) -> None:
        super().__init__(ModelConfig(vocab_size, max_len=4096, d_model=4, n_layers=1, n_heads=1, d_ff=4))
        self.scripts = scripts
        self.said = 0

    def forward(self, tokens, *, positions=None, mask=None, documents=None, cache=None):
        assert cache is not None
        self.said = 0 if int(cache.length) == 0 else self.said + 1
        logits = torch.zeros(*tokens.shape, self.config.vocab_size)
        for row, script in enumerate(self.scripts):
            logits[row, -1, script[self.said]] = 1.0
        cache.length += tokens.shape[1]
        return logits


# --- equal to transformers -------------------------------------------------------------------------------

LLAMA_ENDS = list(range(2, 101, 9))  # several, so that some rows end early
NEW = 10


@functools.cache
def llamas() -> tuple[Any, Transformer]:
    """A tiny random Llama of `transformers` and ours with its weights, renamed. No two sizes are equal."""
    from transformers import LlamaConfig, LlamaForCausalLM

    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=101, hidden_size=24, intermediate_size=52, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, head_dim=10, max_position_embeddings=96, rms_norm_eps=1e-5,
            tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    ).eval()  # fmt: skip
    randomise(theirs, seed=0)
    config = ModelConfig(
        vocab_size=101, max_len=96, d_model=24, n_layers=3, n_heads=4, n_kv_heads=2, d_head=10, d_ff=52,
        norm_eps=1e-5, tied=False,
    )  # fmt: skip
    ours = Transformer(config).eval()
    names = {
        "model.embed_tokens": "embed", "model.layers": "decoder.blocks", "model.norm": "decoder.norm",
        "lm_head": "head", "self_attn": "attn", "_proj": "", "mlp": "ff", "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ff_norm",
    }  # fmt: skip
    renamed = {}
    for name, tensor in theirs.state_dict().items():
        for old, new in names.items():
            name = name.replace(old, new)
        renamed[name] = tensor
    ours.load_state_dict(renamed)
    return theirs, ours


def their_answer(prompts: list[list[int]], options: dict[str, Any], seed: int) -> list[list[int]]:
    """The new ids of each row up to its end id, from one batch padded on the left."""
    model, _ = llamas()
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    sampled = {"do_sample": True, "top_k": 0} if "temperature" in options else {"do_sample": False}
    torch.manual_seed(seed)
    answer = model.generate(
        tokens,
        attention_mask=mask,
        max_new_tokens=NEW,
        eos_token_id=LLAMA_ENDS,
        pad_token_id=0,
        **{**sampled, **options},
    )
    rows = []
    for row in answer[:, width:].tolist():
        ends = [place for place, token in enumerate(row) if token in LLAMA_ENDS]
        rows.append(row[: ends[0] + 1] if ends else row)
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_20_prompts_equal_transformers_token_by_token(name: str) -> None:
    """Each prompt alone, greedy or under its own seed."""
    _, ours = llamas()
    prompts = random_prompts(20, longest=12, vocab_size=101)
    answers = [
        generate(ours, prompt, max_new_tokens=NEW, eos_id=LLAMA_ENDS, seed=seed, **SETTINGS[name])
        for seed, prompt in enumerate(prompts)
    ]
    theirs = [their_answer([prompt], SETTINGS[name], seed)[0] for seed, prompt in enumerate(prompts)]
    assert answers == theirs
    assert {len(answer) == NEW for answer in answers} == {True, False}  # some end early, some do not


@pytest.mark.parametrize("name", SETTINGS)
def test_a_left_padded_batch_equals_transformers_token_by_token(name: str) -> None:
    """20 prompts of different lengths in one batch under one seed; rows that ended draw along."""
    _, ours = llamas()
    prompts = random_prompts(20, longest=12, vocab_size=101)
    answers = generate(ours, prompts, max_new_tokens=NEW, eos_id=LLAMA_ENDS, seed=7, **SETTINGS[name])
    assert answers == their_answer(prompts, SETTINGS[name], 7)


# --- equal to the dull twin ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETTINGS)
def test_cached_equals_the_whole_sequence_every_step(name: str) -> None:
    model = make_model(vocab_size=61).eval()
    for seed, prompt in enumerate(random_prompts(3, longest=20, vocab_size=61)):
        options = {"max_new_tokens": 20, "seed": seed, **SETTINGS[name]}
        assert generate(model, prompt, **options) == naive_generate(model, prompt, **options)


@pytest.mark.parametrize(
    "changes",
    [
        {"positions": "learned"},
        {"positions": "sinusoidal"},
        {"positions": "none"},
        {"window": 5},
        {"n_kv_heads": 1, "fused_qkv": True, "qk_norm": "head"},
        {"norm": "layer", "norm_placement": "post", "gated": False, "rotary_layout": "interleaved"},
    ],
    ids=str,
)
def test_every_kind_of_model_speaks_the_same_cached_and_in_a_batch(changes: dict[str, Any]) -> None:
    model = make_model(**changes).eval()
    prompts = random_prompts(3, longest=9)
    expected = [naive_generate(model, prompt, 12) for prompt in prompts]
    assert generate(model, prompts, max_new_tokens=12) == expected


# --- batch = single, again = the first time --------------------------------------------------------------


@pytest.mark.parametrize("name", SETTINGS)
def test_batch_equals_single(name: str) -> None:
    """Greedy as it is; sampling when each row has its own generator. Rows end at different steps."""
    model = small_model()
    prompts = random_prompts(7, longest=15)
    options = {"max_new_tokens": 20, "eos_id": list(range(0, 257, 20)), **SETTINGS[name]}
    own = [torch.Generator().manual_seed(100 + row) for row in range(7)]
    together = generate(model, prompts, generators=own, **options)
    alone = [generate(model, prompt, seed=100 + row, **options) for row, prompt in enumerate(prompts)]
    assert together == alone
    assert len({len(row) for row in together}) > 1


def test_the_third_call_equals_the_first() -> None:
    """Nothing is left behind: not in the model, not in torch's global generator."""
    model = small_model()
    prompts = random_prompts(3, longest=8)
    before = torch.random.get_rng_state(), set(vars(model)), list(model.state_dict())
    answers = [generate(model, prompts, max_new_tokens=9, temperature=1.0, seed=3) for _ in range(3)]
    after = torch.random.get_rng_state(), set(vars(model)), list(model.state_dict())
    assert answers[0] == answers[1] == answers[2]
    assert before[0].equal(after[0])
    assert before[1:] == after[1:]


def test_without_a_seed_torchs_global_generator_draws() -> None:
    model, prompt = small_model(), [1, 2, 3]
    torch.manual_seed(11)
    first, second = (generate(model, prompt, max_new_tokens=8, temperature=1.0) for _ in range(2))
    assert first == generate(model, prompt, max_new_tokens=8, temperature=1.0, seed=11)
    assert first != second


def test_no_dropout_while_speaking_and_every_module_keeps_its_mode() -> None:
    model = make_model(embed_dropout=0.5, residual_dropout=0.5, ff_dropout=0.5, attn_dropout=0.5)
    expected = generate(model.eval(), [5, 6, 7], max_new_tokens=10)
    model.train()
    model.decoder.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    assert generate(model, [5, 6, 7], max_new_tokens=10) == expected
    pieces = stream(model, "abc", tokenizer=byte_tokenizer(), max_new_tokens=10)
    next(pieces)  # and leave the rest
    assert [module.training for module in model.modules()] == modes
    assert {True, False} == set(modes)


def test_no_gradients_are_recorded() -> None:
    answer = generate(make_model(), torch.tensor([[1, 2]]), max_new_tokens=3)
    assert not answer.requires_grad


# --- lengths ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 13])
def test_max_new_tokens_means_exactly_that(n: int) -> None:
    model, tokenizer = small_model(), byte_tokenizer()
    assert len(generate(model, [1, 2, 3], max_new_tokens=n)) == n
    assert [len(row) for row in generate(model, [[1], [2, 3]], max_new_tokens=n)] == [n, n]
    assert generate(model, torch.tensor([[1, 2], [3, 4]]), max_new_tokens=n).shape == (2, n)
    assert generate(model, torch.tensor([1, 2]), max_new_tokens=n).shape == (n,)
    ids = generate(model, list(b"hello"), max_new_tokens=n)
    assert generate(model, "hello", tokenizer=tokenizer, max_new_tokens=n, eos_id=()) == tokenizer.decode(ids)


def test_no_new_tokens_ask_nothing_of_the_model() -> None:
    parrot = Parrot([[]])
    assert generate(parrot, "hi", tokenizer=byte_tokenizer(), max_new_tokens=0) == ""
    assert list(stream(parrot, "hi", tokenizer=byte_tokenizer(), max_new_tokens=0)) == []


def test_an_end_id_is_the_last_id_and_no_part_of_the_text() -> None:
    tokenizer = byte_tokenizer()
    parrot = Parrot([[*b"well", EOS, *b"more"]])
    options = {"tokenizer": tokenizer, "max_new_tokens": 9}
    assert generate(parrot, [1], **options) == [*b"well", EOS]
    assert generate(parrot, "a", **options) == "well"
    assert "".join(stream(parrot, "a", **options)) == "well"
    assert generate(parrot, "a", eos_id=(), **options) == f"well{END}more"
    assert generate(parrot, "a", eos_id=ord("e"), **options) == "w"
    assert generate(parrot, "a", eos_id=[ord("l"), EOS], **options) == "we"
    assert generate(parrot, [1], max_new_tokens=9) == [*b"well", EOS, *b"more"]  # no tokenizer, no end


def test_rows_that_ended_emit_padding() -> None:
    parrot = Parrot([[7, 8, 9, 10], [7, 5, 3, 2], [5, 1, 1, 1]])
    prompts = torch.tensor([[1, 2], [3, 4], [1, 1]])
    expected = [[7, 8, 9, 10], [7, 5, 99, 99], [5, 99, 99, 99]]
    assert generate(parrot, prompts, max_new_tokens=4, eos_id=5, pad_id=99).tolist() == expected
    by_default = generate(parrot, prompts, max_new_tokens=4, eos_id=5)
    assert by_default.tolist() == [[5 if token == 99 else token for token in row] for row in expected]


def test_the_longest_prompt_that_fits_works_and_one_more_is_named() -> None:
    model = small_model()
    assert len(generate(model, [1] * 60, max_new_tokens=4)) == 4
    with pytest.raises(ValueError) as caught:
        generate(model, [[1], [1] * 60], max_new_tokens=5)
    assert str(caught.value) == (
        "a prompt of 60 tokens and max_new_tokens=5 exceed the model's 64 positions (max_len): "
        "max_new_tokens of at most 4 fits, or overflow='slide' forgets the oldest tokens"
    )
    with pytest.raises(ValueError, match=r"70 tokens .* 64 positions \(max_len\): shorten the prompt"):
        generate(model, [1] * 70, max_new_tokens=1)


@pytest.mark.parametrize("name", ["greedy", "all"])
def test_slide_forgets_the_older_half_of_a_full_window(name: str) -> None:
    """Equal to the dull twin over several windows, for prompts shorter and longer than one."""
    model = make_model(vocab_size=61, max_len=16, positions="learned").eval()
    for prompt in ([3], list(range(16)), list(range(40))):
        options = {"max_new_tokens": 36, "seed": 4, **SETTINGS[name]}
        expected = naive_generate(model, prompt, slide=True, **options)
        assert generate(model, prompt, overflow="slide", **options) == expected


def test_each_row_slides_on_its_own() -> None:
    """Batch equals single although the rows fill their windows, and end, at different steps."""
    model = make_model(max_len=16).eval()
    prompts = [[3], list(range(16)), list(range(40)), [9] * 11]
    options = {"max_new_tokens": 36, "overflow": "slide", "eos_id": list(range(0, 257, 25))}
    alone = [generate(model, prompt, **options) for prompt in prompts]
    assert generate(model, prompts, **options) == alone
    assert len({len(row) for row in alone}) > 1


# --- text ------------------------------------------------------------------------------------------------

WORLD = "Grüße, 世界! 模型会说话。👩‍👩‍👧‍👦🏳️‍🌈 naïve � 한국어 𝒳 🙂"


def test_text_for_text_and_ids_for_ids() -> None:
    model, tokenizer = small_model(), byte_tokenizer()
    texts = ["one", "and two", "模型"]
    options = {"max_new_tokens": 12, "tokenizer": tokenizer}
    answers = generate(model, texts, **options)
    assert answers == [generate(model, text, **options) for text in texts]
    ids = generate(model, [tokenizer.encode(text) for text in texts], **options)
    assert answers == [tokenizer.decode([i for i in row if i != EOS]) for row in ids]


def test_streamed_text_equals_decoded_text_for_emoji_and_cjk_one_byte_at_a_time() -> None:
    """Pieces are whole characters: none is empty, none shows a replacement that the text does not hold."""
    tokenizer = byte_tokenizer()
    script = list(WORLD.encode())
    options = {"tokenizer": tokenizer, "max_new_tokens": len(script)}
    pieces = list(stream(Parrot([script]), "say", **options))
    assert pieces == list(WORLD)  # one character per piece
    assert "".join(pieces) == tokenizer.decode(script) == generate(Parrot([script]), "say", **options)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 255), min_size=1, max_size=40))
def test_streamed_bytes_of_any_kind_equal_decoded_bytes(script: list[int]) -> None:
    """Also bytes that are no UTF-8, and a character cut by max_new_tokens."""
    tokenizer = byte_tokenizer()
    reply = Reply(len(script), tokenizer=tokenizer)
    pieces = []
    for token in script:
        reply.hear(token)
        pieces.append(reply.take())
    assert "".join(pieces) == tokenizer.decode(script)
    assert reply.done


# --- stop strings ----------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(
    st.text("ab界🙂", max_size=30),
    st.lists(st.text("ab界🙂", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_a_stop_string_cuts_the_text_exactly_before_it(text: str, stops: list[str]) -> None:
    """Every text of four characters, fed byte by byte, against `text[:text.index(stop)]`."""
    ids = list(text.encode())
    reply = Reply(len(ids), tokenizer=byte_tokenizer(), stops=stops)
    pieces = []
    for token in ids:
        reply.hear(token)
        pieces.append(reply.take())
    assert "".join(pieces) == naive_cut(text, stops)
    assert reply.done


@pytest.mark.parametrize(
    ("script", "text"),
    [
        (["ab", "ab", "c", "a"], "ab"),  # across two tokens, after a false start
        (["c", "a", "b", "c"], "c"),  # across three
        (["a", "abc", "b", "a"], "a"),  # one whole token
        (["b", "xabc", "a", "a"], "bx"),  # the end of a token
        (["ab", "c", "x", "x"], ""),  # from the first character on
        (["x", "c", "ab", "ab"], "xcabab"),  # never: the text held back comes at the end
    ],
)
def test_a_stop_string_is_found_across_the_borders_of_tokens(script: list[str], text: str) -> None:
    merges = [(b"a", b"b"), (b"ab", b"c"), (b"x", b"abc")]
    vocab = {i: bytes([i]) for i in range(256)} | {256 + i: a + b for i, (a, b) in enumerate(merges)}
    ids = {token: i for i, token in vocab.items()}
    parrot = Parrot([[ids[token.encode()] for token in script]], vocab_size=259)
    options = {"tokenizer": Tokenizer(vocab, merges), "max_new_tokens": 4, "stop": "abc"}
    assert generate(parrot, "p", **options) == text
    assert "".join(stream(parrot, "p", **options)) == text
    new = generate(parrot, [1], **options)  # ids hold the token that completed the stop string
    assert [vocab[i].decode() for i in new] == script[: len(new)]
    assert "".join(script[: len(new)]).find("abc") == (len(text) if len(new) < 4 or text != "xcabab" else -1)


def test_each_row_stops_on_its_own_text() -> None:
    scripts = [[*b"one. two."], [*b"three four"[:9]], [*b"5.6.7.8.9"]]
    options = {"tokenizer": byte_tokenizer(), "max_new_tokens": 9, "stop": (". ", "6")}
    assert generate(Parrot(scripts), ["a", "bb", "c"], **options) == ["one", "three fou", "5."]


def test_text_held_back_for_a_stop_string_comes_when_the_row_ends() -> None:
    options = {"tokenizer": byte_tokenizer(), "stop": "END!", "max_new_tokens": 9}
    parrot = Parrot([[*b"well, END", EOS]])
    assert list(stream(parrot, "a", **options)) == [*"well, ", "END"]  # by max_new_tokens
    options["max_new_tokens"] = 20
    assert list(stream(parrot, "a", **options)) == [*"well, ", "END"]  # by the end token


def test_a_special_token_can_be_a_stop_string() -> None:
    parrot = Parrot([[*b"hi", EOS, *b"x"]])
    options = {"tokenizer": byte_tokenizer(), "max_new_tokens": 4, "eos_id": (), "stop": [END]}
    assert generate(parrot, "a", **options) == "hi"


# --- steps, mistakes -------------------------------------------------------------------------------------


def test_decoding_gives_the_tokens_of_every_step() -> None:
    decoding = Decoding(Parrot([[7, 8, 9], [4, 5, 6]]), [[1], [2, 3]], Sampling(), max_new_tokens=3)
    assert list(decoding) == [[7, 4], [8, 5], [9, 6]]
    assert [reply.ids for reply in decoding.replies] == [[7, 8, 9], [4, 5, 6]]


def test_a_step_whose_logits_are_not_finite_is_named() -> None:
    class Broken(Parrot):
        def forward(self, tokens, **options):
            logits = super().forward(tokens, **options)
            return logits / 0 if self.said == 2 else logits

    with pytest.raises(ValueError, match="the logits of step 3 are not finite: nan for token 0 in row 0"):
        generate(Broken([[1, 2, 3, 4]]), [1], max_new_tokens=4)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ("", {"tokenizer": True}, "the prompt is empty; give at least one token (<|endoftext|> asks"),
        ([], {}, "the prompt is empty; give at least one token"),
        ([[1], []], {}, "prompts[1] is empty; give at least one token"),
        ("hello", {}, "a prompt that is text needs the tokenizer"),
        ([[1, 2], [3, 257]], {}, "prompts[1]: token id 257 is outside the model's vocabulary 0..256"),
        ([-1], {}, "prompts[0]: token id -1 is outside the model's vocabulary 0..256"),
        ([1], {"eos_id": 300}, "eos_id: token id 300 is outside the model's vocabulary 0..256"),
        ([1], {"pad_id": -2}, "pad_id: token id -2 is outside the model's vocabulary 0..256"),
        ([1], {"max_new_tokens": -1}, "max_new_tokens=-1 must be at least 0"),
        ([1], {"stop": "x"}, "stop=['x'] is matched on text, which needs the tokenizer"),
        ([1], {"stop": ["x", ""], "tokenizer": True}, "a stop string is empty; give stop=() for none"),
        ([1], {"temperature": -1.0}, "temperature=-1.0 must be a number of at least 0"),
        ([1], {"top_k": 5}, "top_k=5 has no effect at temperature=0"),
        (
            [[1], [2]],
            {"generators": [torch.Generator()], "temperature": 1.0},
            "1 generators were given for 2 prompts; each needs its own",
        ),
        ([1], {"generators": [torch.Generator()], "seed": 1}, "seed=1 and generators were both given"),
        (torch.zeros(1, 2, 3, dtype=torch.long), {}, "prompts of shape (1, 2, 3) are neither (B, T) nor (T)"),
    ],
)
def test_mistakes_are_named_in_one_line(prompts: Any, options: dict[str, Any], message: str) -> None:
    if options.get("tokenizer"):
        options = {**options, "tokenizer": byte_tokenizer()}
    with pytest.raises(ValueError) as caught:
        generate(small_model(), prompts, **{"max_new_tokens": 4, **options})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_stream_names_a_mistake_before_the_first_piece() -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        stream(small_model(), "", tokenizer=byte_tokenizer())


# --- compiled --------------------------------------------------------------------------------------------


@pytest.mark.compiled
@pytest.mark.slow
def test_a_compiled_model_is_traced_once_for_prompts_and_once_for_steps() -> None:
    """Prompt lengths 1 to 40: two graphs, no break, no recompilation, and the tokens of the eager model."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    model = make_model(n_layers=1).eval()
    compiled = torch.compile(model, backend=count)
    for length in [3, *range(1, 41)]:
        prompt = [(7 * i + length) % 257 for i in range(length)]
        assert generate(compiled, prompt, max_new_tokens=4) == generate(model, prompt, max_new_tokens=4)
    assert len(graphs) == 2
    assert not counters["graph_break"]
    torch._dynamo.reset()

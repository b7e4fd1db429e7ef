"""GGUF: tiny files of every plain type and the quantised ones, tokenizers, injuries."""

import random
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clearhead import ModelConfig, Tokenizer, Transformer, generate, load
from clearhead.model.transformer import Transformer as Model
from clearhead.published.gguf import load_gguf
from clearhead.published.gguf_file import GGUFFile
from clearhead.text.chat import ChatTemplate
from clearhead.text.definition import spell
from clearhead.text.foreign import ForeignTokenizer

gguf = pytest.importorskip("gguf")

MANY = settings(
    max_examples=1000,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
HEADS, KV_HEADS = 4, 2
SIZES = {"d_model": 64, "d_ff": 96, "n_layers": 2, "n_heads": HEADS, "n_kv_heads": KV_HEADS}
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}assistant:"
TOKENS = ["<|endoftext|>", *(spell(bytes([byte])) for byte in range(256)), "th", "the"]


def neighbours(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """The order of rows in a file: feature j of a head beside feature j + K/2."""
    halves = rows.reshape(n_heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def our_model(seed: int = 0, **changes: Any) -> Model:
    config = ModelConfig(vocab_size=len(TOKENS), max_len=32, **(SIZES | changes))
    return Transformer(config, seed=seed).eval()


def write(path: Path, model: Model, kind: str = "F32", extra: dict[str, torch.Tensor] | None = None) -> Path:
    """Write a model of ours as a GGUF file of the type `llama`, its matrices in this type."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.n_layers)
    writer.add_context_length(config.max_len)
    writer.add_embedding_length(config.d_model)
    writer.add_feed_forward_length(config.ff_width)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rotary_theta)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] + [1] * (len(TOKENS) - 1))
    writer.add_token_merges(["t h", "th e"])
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    qtype = gguf.GGMLQuantizationType[kind]
    for name, tensor in (tensors_of(model) | (extra or {})).items():
        value = tensor.detach().numpy().astype(np.float32)
        if value.ndim == 1 or kind == "F32":
            writer.add_tensor(name, value)
        elif kind == "F16":
            writer.add_tensor(name, value.astype(np.float16))
        else:
            writer.add_tensor(name, gguf.quantize(value, qtype), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors_of(model: Model) -> dict[str, torch.Tensor]:
    names = {"embed": "token_embd", "decoder.norm": "output_norm", "head": "output"}
    layer = {
        "attn_norm": "attn_norm",
        "attn.q": "attn_q",
        "attn.k": "attn_k",
        "attn.v": "attn_v",
        "attn.o": "attn_output",
        "ff_norm": "ffn_norm",
        "ff.gate": "ffn_gate",
        "ff.up": "ffn_up",
        "ff.down": "ffn_down",
    }
    made = {}
    for name, tensor in model.state_dict().items():
        module = name.removesuffix(".weight")
        if module == "head" and model.config.tied:
            continue
        found = re.fullmatch(r"decoder\.blocks\.(\d+)\.(.*)", module)
        theirs = names[module] if found is None else f"blk.{found[1]}.{layer[found[2]]}"
        if theirs.endswith(("attn_q", "attn_k")):
            heads = HEADS if theirs.endswith("q") else KV_HEADS
            tensor = torch.from_numpy(neighbours(tensor.numpy(), heads))
        made[f"{theirs}.weight"] = tensor
    return made


@pytest.fixture(scope="module")
def plain_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "plain.gguf", our_model())


def test_a_float32_file_is_the_same_model(plain_file: Path) -> None:
    """Rows of q and k come back into halves: every logit is equal to the bit."""
    model, tokenizer = load_gguf(plain_file)
    tokens = torch.randint(0, len(TOKENS), (2, 9))
    with torch.no_grad():
        assert torch.equal(model(tokens), our_model()(tokens))
    assert isinstance(tokenizer, Tokenizer)
    assert tokenizer.encode("the 12<|endoftext|>") == [258, 33, 50, 51, 0]
    assert ChatTemplate.of(tokenizer).render([{"role": "user", "content": "hi"}]) == (
        "user:hi<|endoftext|>assistant:"
    )
    again, _ = load(plain_file)
    assert again.config == model.config and again.origin == model.origin


def test_an_untied_head_is_read(tmp_path: Path) -> None:
    ours = our_model(tied=False)
    model, _ = load_gguf(write(tmp_path / "untied.gguf", ours))
    assert not model.config.tied and torch.equal(model.head.weight, ours.head.weight)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_narrow_types_are_what_their_bytes_say(kind: str, tmp_path: Path) -> None:
    """The tensors are those that the `gguf` package reads, and not far from what was written."""
    ours = our_model()
    path = write(tmp_path / "narrow.gguf", ours, kind)
    file, reader = GGUFFile(path), gguf.GGUFReader(path)
    for tensor in reader.tensors:
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(file.tensor(tensor.name).float().numpy(), expected)
    model, _ = load_gguf(path)
    assert model.embed.weight.dtype == torch.float32 and kind in file.kinds().values()
    worst = (model.embed.weight - ours.embed.weight).abs().max() / ours.embed.weight.abs().max()
    assert worst < 0.12


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_are_read(kind: str, tmp_path: Path) -> None:
    """Random bytes are some numbers: those of the `gguf` package."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    data = np.random.default_rng(0).integers(0, 60, (3, 2 * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_tensor("x", data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "k.gguf")
    assert file.shape("x") == (3, 2 * block)
    expected = gguf.dequantize(data, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(file.tensor("x").numpy(), expected, equal_nan=True)


def test_our_head_of_a_file_is_the_package_s(plain_file: Path) -> None:
    """Settings are those that the `gguf` package reads."""
    fields = gguf.GGUFReader(plain_file).fields
    ours = GGUFFile(plain_file).settings
    assert set(ours) == {name for name in fields if not name.startswith("GGUF.")}
    for name, value in ours.items():
        assert value == fields[name].contents()


def test_divisors_of_frequencies_are_obeyed(tmp_path: Path) -> None:
    """Llama 3.1's files hold the stretched frequencies as a tensor of divisors."""
    model = our_model()
    divisors = torch.tensor([1.0, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0])
    path = tmp_path / "stretched.gguf"
    write(path, model, extra={"rope_freqs.weight": divisors})
    stretched, _ = load_gguf(path)
    angles = stretched.decoder.rotaries[0].angles(torch.arange(20))
    plain = model.decoder.rotaries[0].angles(torch.arange(20))
    turn = torch.atan2(plain.sin[1], plain.cos[1])
    assert torch.allclose(torch.atan2(angles.sin[1], angles.cos[1]), turn / divisors, atol=1e-6)


def test_sentencepiece_tokens_with_scores(tmp_path: Path) -> None:
    """The type `llama` of tokenizer: pieces with scores, bytes, a begin token and a space before a text."""
    from clearhead.published.gguf import read_tokenizer

    words = ["▁", "t", "h", "e", "▁t", "he", "▁the"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    found = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(n) for n in range(len(words))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    tokenizer = read_tokenizer(found)
    assert isinstance(tokenizer, ForeignTokenizer)
    ids = tokenizer.encode_sentence("the é")
    assert [tokens[i] for i in ids] == ["<s>", "▁the", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids[1:]) == "the é" and tokenizer.usage.role("eos") == "</s>"


# ------------------------------------------------------------------------------------------------ injuries


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:50], "no complete GGUF file: it counts 20 things, more than it has room for"),
        (lambda data: b"GGML" + data[4:], "does not begin with GGUF"),
        (lambda data: data[:4] + b"\x09" + data[5:], "version 9 is not known"),
        (lambda data: data[:8] + b"\xff" * 8 + data[16:], "more than it has room for"),
        (lambda data: data[:2000], "no complete GGUF file: it counts 259 things"),
        (lambda data: data[:-4000], "goes on beyond the end of the file"),
        (lambda data: data.replace(b"llama", b"llamb"), "general.architecture='llamb' is not known"),
        (lambda data: data.replace(b"ffn_up", b"ffn_ub"), "left over: blk.0.ffn_ub.weight"),
        (lambda data: data.replace(b"smollm", b"smollx"), "tokenizer.ggml.pre='smollx' is not known"),
        (lambda data: data.replace(b"block_count", b"block_counx"), "there is no llama.block_count"),
    ],
)
def test_injuries_are_one_clear_line(
    change: Callable[[bytes], bytes], message: str, plain_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "injured.gguf"
    path.write_bytes(change(plain_file.read_bytes()))
    with pytest.raises(ValueError, match=message) as caught:
        load_gguf(path)
    assert "\n" not in str(caught.value) and "injured.gguf" in str(caught.value)


def test_there_must_be_a_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no file"):
        load_gguf(tmp_path / "none.gguf")


def head(n_tensors: int, *rest: bytes) -> bytes:
    """The beginning of a file that counts so many tensors."""
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, 0) + b"".join(rest)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (head(2**63), "it counts 9223372036854775808 things, more than it has room for"),
        (head(1, struct.pack("<Q", 2**63), bytes(24)), "it ends at byte 56, within its head"),
        (
            head(1, struct.pack("<Q1sI2QIQ", 1, b"x", 2, 10**5, 10**10, 0, 0), bytes(99)),
            "'x' goes on beyond the end",
        ),
        (head(1, struct.pack("<Q1sI1QIQ", 1, b"x", 1, 4, 0, 2**63), bytes(99)), "'x' goes on beyond the end"),
        (head(1, struct.pack("<Q1sI", 1, b"x", 2**31), bytes(99)), "a tensor has 2147483648 dimensions"),
        (head(1, struct.pack("<Q1sIIQ", 1, b"x", 0, 77, 0), bytes(99)), "'x' has an unknown type, 77"),
    ],
)
def test_sizes_beyond_the_file_are_not_believed(data: bytes, message: str, tmp_path: Path) -> None:
    """A small file that declares a petabyte, or a text of 2**63 bytes, takes no memory: it is refused."""
    (tmp_path / "huge.gguf").write_bytes(data)
    with pytest.raises(ValueError, match=message):
        load_gguf(tmp_path / "huge.gguf")


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = our_model(d_model=8, d_ff=4, n_layers=1)
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", model)


@pytest.mark.slow
@MANY
@given(seed=st.integers(0, 2**32))
def test_a_damaged_file_raises_value_errors_only(seed: int, tiny_file: Path, unchecked: None) -> None:
    """A thousand injuries of the head, where all that is not a plain number stands."""
    rng, whole = random.Random(seed), bytearray(tiny_file.read_bytes())
    path = tiny_file.with_name("damaged.gguf")
    for _ in range(rng.randint(1, 3)):
        start, end = rng.choice([(0, 1200), (len(TOKENS) * 10, len(TOKENS) * 26)])
        whole[rng.randrange(start, end)] = rng.randrange(256)
    cut = rng.choice([len(whole), len(whole), rng.randrange(len(whole))])
    path.write_bytes(bytes(whole[:cut]))
    try:
        load_gguf(path)
    except ValueError as error:
        assert "\n" not in str(error)


SENTENCE_PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(249))]
SENTENCE_PIECES += ["▁", "t", "h", "e", "▁t", "he", "▁the"]
SENTENCE_PIECE_SETTINGS: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": SENTENCE_PIECES,
    "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 249 + [1] * 7,
    "tokenizer.ggml.scores": [0.0] * 252 + [-float(n) for n in range(7)],
    "tokenizer.ggml.bos_token_id": 1,
}
SPARE = [
    *("llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.rope.scaling.original_context_length"),
    *("llama.attention.key_length", "llama.rope.dimension_count", "llama.expert_count"),
    *("tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token", "tokenizer.ggml.add_space_prefix"),
    *("tokenizer.ggml.eot_token_id", "tokenizer.ggml.unknown_token_id", "tokenizer.ggml.padding_token_id"),
    "tokenizer.chat_template",
]
SINGLE = [True, -1, 0, 1, 2, 258, 2**31, 2**63, 2**64 - 1, 1.5, float("nan"), float("inf"), "", "x", "yarn"]
JUNK = [*SINGLE, "linear", "none", [], *([value] * length for value in SINGLE for length in (1, len(TOKENS)))]


@pytest.mark.slow
@MANY
@given(seed=st.integers(0, 2**32))
def test_settings_of_any_kind_raise_value_errors_only(
    seed: int, tiny_file: Path, unchecked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand files in which a setting or two say something else, or are of another type."""
    rng, file = random.Random(seed), GGUFFile(tiny_file)
    if rng.random() < 0.5:
        file.settings |= SENTENCE_PIECE_SETTINGS
    for _ in range(rng.randint(1, 2)):
        name = rng.choice([*file.settings, *SPARE])
        file.settings[name] = rng.choice(JUNK)
        if rng.random() < 0.1:
            del file.settings[name]
    monkeypatch.setattr("clearhead.published.gguf.GGUFFile", lambda path: file)
    try:
        model, tokenizer = load_gguf(tiny_file)
        assert len(generate(model, tokenizer.encode("the"), max_new_tokens=1)) == 1
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) < 2000

"""Published tokenizers of other kinds: the ids and texts of their own library, our interface, refusals."""

import doctest
import functools
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from clearhead.text import pieces, sentencepiece, usage
from clearhead.text.foreign import ForeignTokenizer, open_tokenizer
from clearhead.text.sentencepiece import PieceTable
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.usage import Usage, read_usage
from text.conftest import MIXED_TEXT

Library = tokenizers.Tokenizer


def trained(library: Library, trainer: Any) -> Library:
    library.train_from_iterator([MIXED_TEXT, MIXED_TEXT.upper(), "the theme of the thesis"] * 3, trainer)
    return library


def word_piece() -> Library:
    library = Library(models.WordPiece(unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer(lowercase=True)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece(cleanup=True)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trained(library, trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False))
    library.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return library


def unigram() -> Library:
    library = Library(models.Unigram())
    library.normalizer = normalizers.NFKC()
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    trained(library, trainer)
    library.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return library


def sentence_piece_bpe() -> Library:
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    library = Library(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=special + byte_pieces, limit_alphabet=90, show_progress=False
    )
    trained(library, trainer)
    data = json.loads(library.to_str())
    data["added_tokens"] = [t for t in data["added_tokens"] if t["content"] in special]  # bytes are none
    library = Library.from_str(json.dumps(data))
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return library


def byte_level_with_extras() -> Library:
    """RoBERTa's kind: byte-level BPE whose mask token takes the space before it, which ours does not do."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", "<pad>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    trained(library, trainer)
    library.add_special_tokens([tokenizers.AddedToken("<mask>", lstrip=True)])
    library.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0), add_prefix_space=False)
    return library


KINDS: dict[str, Callable[[], Library]] = {
    "WordPiece": word_piece,
    "Unigram": unigram,
    "SentencePiece BPE": sentence_piece_bpe,
    "byte level": byte_level_with_extras,
}


@pytest.fixture(scope="module")
def libraries() -> dict[str, Library]:
    return {name: make() for name, make in KINDS.items()}


@functools.cache
def wrapped(library: Library) -> ForeignTokenizer:
    return ForeignTokenizer(library.to_str())


@pytest.fixture(params=KINDS, scope="module")
def library(request: pytest.FixtureRequest, libraries: dict[str, Library]) -> Library:
    return libraries[request.param]


@pytest.fixture(scope="module")
def ours(library: Library) -> ForeignTokenizer:
    return wrapped(library)


TEXTS = [
    "",
    " ",
    "The quick brown fox doesn't jump.",
    "  two  spaces\n\nand lines ",
    "Größere Füße, déjà vu; 订单成交 한국어 😀👍🏽 x²",
    "<s> [CLS] </s> [SEP] <pad>",
    "of the the theme ... 'tis",
]
texts = st.text(st.sampled_from("aetho sTü订😀.,'\n"), max_size=20) | st.text(max_size=12)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_the_library(text: str, ours: ForeignTokenizer, library: Library) -> None:
    assert ours.encode(text) == library.encode(text, add_special_tokens=False).ids
    assert ours.encode_sentence(text) == library.encode(text).ids
    assert ours.encode_batch([text, text]) == [ours.encode(text)] * 2
    assert ours.encode_array(text, specials="token").tolist() == ours.encode(text)


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(text=texts)
def test_decoding_equals_the_library_and_streams_join(text: str, libraries: dict[str, Library]) -> None:
    for library in libraries.values():
        ours = wrapped(library)
        for ids in (ours.encode(text), ours.encode_sentence(text)):
            assert ours.decode(ids) == library.decode(ids, skip_special_tokens=False)
            stream = ours.stream()
            assert "".join(map(stream.feed, ids)) + stream.flush() == ours.decode(ids)


def test_a_stream_that_continues_keeps_the_first_space(libraries: dict[str, Library]) -> None:
    """An answer to a prompt is a piece of a longer text: its first word comes after a space."""
    ours = ForeignTokenizer(libraries["SentencePiece BPE"].to_str())
    ids = ours.encode("the theme")
    stream = ours.stream(continuing=True)
    assert ours.decode(ids) == "the theme"
    assert "".join(map(stream.feed, ids)) + stream.flush() == " the theme"


def test_broken_bytes_leave_their_neighbours_alone(libraries: dict[str, Library]) -> None:
    """An emoji in bytes survives a stray byte behind it; the library gives it up as well."""
    ours = ForeignTokenizer(libraries["SentencePiece BPE"].to_str())
    ids = ours.encode("𝄞")
    assert len(ids) > 4  # a space and four bytes
    assert ours.decode([*ids, ids[-1]]) == "𝄞\ufffd"


def test_special_tokens_as_tokens_as_text_and_refused(ours: ForeignTokenizer) -> None:
    for special, token_id in ours.special_tokens.items():
        assert token_id in ours.encode(f"a {special}")
        if special not in ("<unk>", "[UNK]"):
            assert token_id not in ours.encode(f"a {special}", specials="text")
            assert token_id not in ours.encode_array(f"a{special}{special}")
    assert ours.encode("a fox", specials="text") == ours.encode("a fox")
    special = next(iter(ours.special_tokens))
    with pytest.raises(ValueError, match="holds the special token"):
        ours.encode(f"a {special}", specials="error")
    with pytest.raises(ValueError, match="'token', 'text' or 'error', not 'maybe'"):
        ours.encode("a", specials="maybe")
    with pytest.raises(KeyError, match="'nosuch' is not a special token"):
        ours.special_id("nosuch")


def test_sentences_are_framed_padded_and_cut(libraries: dict[str, Library]) -> None:
    ours = ForeignTokenizer(libraries["WordPiece"].to_str())
    ids, mask = ours.encode_padded(["the fox", "fox"], pad="[PAD]", truncate=4)
    assert ids.shape == mask.shape and ids[:, 0].tolist() == [2, 2]
    assert np.array_equal(ids[0, mask[0]], ours.encode_sentence("the fox", truncate=4))
    first, types = ours.encode_pair("the fox", "a dog")
    encoding = libraries["WordPiece"].encode("the fox", "a dog")
    assert (first, types) == (encoding.ids, encoding.type_ids)


def test_pieces_sizes_and_values(ours: ForeignTokenizer, library: Library, tmp_path: Path) -> None:
    assert ours.vocab_size == max(library.get_vocab().values()) + 1
    assert ours.token_bytes(ours.encode("the")[-1]).strip().endswith(b"e")
    with pytest.raises(ValueError, match="no token has the id 99999"):
        ours.decode([99999])
    path = ours.save(tmp_path)
    for again in (
        ForeignTokenizer.load(path),
        ForeignTokenizer.load(tmp_path),
        pickle.loads(pickle.dumps(ours)),
    ):
        assert again == ours and hash(again) == hash(ours) and again.fingerprint == ours.fingerprint
    assert path.read_text(encoding="utf-8") == ours.definition
    assert ours.compression("the fox") > 0.5 and "ForeignTokenizer" in repr(ours)
    with pytest.raises(ValueError, match="empty text"):
        ours.compression("")


def test_open_tokenizer_chooses(libraries: dict[str, Library], tmp_path: Path) -> None:
    """Byte-level BPE is ours; what ours does not do, and everything else, is the library's."""
    for name, library in libraries.items():
        (tmp_path / name).mkdir()
        library.save(str(tmp_path / name / "tokenizer.json"))
        assert isinstance(open_tokenizer(tmp_path / name), ForeignTokenizer)
    plain = Tokenizer({i: bytes([i]) for i in range(256)}, [])
    plain.save(tmp_path / "ours")
    assert open_tokenizer(tmp_path / "ours") == plain
    with pytest.raises(FileNotFoundError, match=r"holds none of .*vocab.txt"):
        open_tokenizer(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        open_tokenizer(tmp_path / "nosuch")


def test_vocab_txt_is_the_same_tokenizer(libraries: dict[str, Library], tmp_path: Path) -> None:
    """BERT's older folder, a list of pieces and settings, gives the ids of its tokenizer.json."""
    library = libraries["WordPiece"]
    vocab = sorted(library.get_vocab().items(), key=lambda item: item[1])
    (tmp_path / "vocab.txt").write_text("\n".join(piece for piece, _ in vocab) + "\n", encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": true}', encoding="utf-8")
    ours = open_tokenizer(tmp_path)
    for text in TEXTS:
        assert ours.encode_sentence(text) == library.encode(text).ids
    (tmp_path / "vocab.txt").write_text("a\nb\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"vocab.txt lacks the special tokens \[PAD\]"):
        open_tokenizer(tmp_path)


# ------------------------------------------------------------------------------------------- SentencePiece


def varint(number: int) -> bytes:
    made = bytearray()
    while number > 127:
        made.append(number & 127 | 128)
        number >>= 7
    return bytes([*made, number])


def field(number: int, value: bytes | int) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def model_file(table: PieceTable) -> bytes:
    """A .model file as SentencePiece writes it."""
    data = b""
    for piece, score, kind in zip(table.pieces, table.scores, table.kinds, strict=True):
        number = np.float32(score).tobytes()
        data += field(1, field(1, piece.encode()) + varint(2 << 3 | 5) + number + field(3, kind))
    data += field(2, field(3, 1 if table.model == "unigram" else 2))
    return data + field(3, field(3, int(table.add_space)) + field(4, int(table.one_space)))


def table_of(model: str) -> PieceTable:
    words = ["▁", "t", "h", "e", "m", "▁t", "he", "▁the", "th", "me", "▁them", "▁theme"]
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *([f"<0x{b:02X}>" for b in range(256)] if model == "bpe" else []),
        *words,
    ]
    kinds = [2, 3, 3] + ([6] * 256 if model == "bpe" else []) + [1] * len(words)
    scores = [0.0] * (len(pieces) - len(words)) + [-float(n) for n in range(1, len(words) + 1)]
    return PieceTable(pieces, scores, kinds, "bpe" if model == "bpe" else "unigram")


@pytest.mark.parametrize("model", ["bpe", "unigram"])
def test_a_sentencepiece_model_is_read(model: str, tmp_path: Path) -> None:
    table = table_of(model)
    assert sentencepiece.read_model(model_file(table)) == table
    (tmp_path / "tokenizer.model").write_bytes(model_file(table))
    ours = open_tokenizer(tmp_path)
    ids = ours.encode_sentence("the theme")
    assert ours.decode(ids).replace("<s>", "").replace("</s>", "").strip() == "the theme"
    assert [ours.piece(i) for i in ids if ours.piece(i) not in ("<s>", "</s>")] == ["▁the", "▁theme"]
    assert (ids[0] == 1, ids[-1] == 2) == (model == "bpe", model == "unigram")
    if model == "bpe":
        assert ours.decode(ours.encode("x😀 the")) == "x😀 the"


def test_marian_has_two_models_and_one_numbering(tmp_path: Path) -> None:
    table = table_of("unigram")
    for name in ("source.spm", "target.spm"):
        (tmp_path / name).write_bytes(model_file(table))
    order = ["</s>", "<unk>", *reversed(table.pieces[3:]), "▁zwei", "<pad>"]
    (tmp_path / "vocab.json").write_text(json.dumps({p: i for i, p in enumerate(order)}), encoding="utf-8")
    ours = ForeignTokenizer.load(tmp_path)
    ids = ours.encode_sentence("the theme")
    assert [order[i] for i in ids] == ["▁the", "▁theme", "</s>"]
    assert ours.decode(ids[:-1]) == "the theme"
    assert ours.special_tokens == {"</s>": 0, "<unk>": 1, "<pad>": len(order) - 1}


@pytest.mark.slow
@settings(deadline=None, max_examples=1000)
@given(data=st.data())
def test_a_damaged_model_raises_value_errors_only(data: st.DataObject) -> None:
    whole = bytearray(model_file(table_of("unigram")))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(whole) - 1))
        whole[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)))
    try:
        table = sentencepiece.read_model(bytes(whole[:cut]))
        ForeignTokenizer(json.dumps(sentencepiece.tokenizer_json(table)))
    except ValueError as error:
        assert str(error)


# ------------------------------------------------------------------------------------------------ injuries


def mutations(value: Any, draw: Callable[[st.SearchStrategy], Any]) -> Any:
    """The same JSON with one part somewhere in it replaced, dropped or doubled."""
    if isinstance(value, dict) and value and draw(st.integers(0, 3)):
        key = draw(st.sampled_from(sorted(value)))
        if not draw(st.integers(0, 4)):
            return {k: v for k, v in value.items() if k != key}
        return value | {key: mutations(value[key], draw)}
    if isinstance(value, list) and value and draw(st.integers(0, 3)):
        place = draw(st.integers(0, len(value) - 1))
        return [*value[:place], mutations(value[place], draw), *value[place + 1 :]]
    junk = [None, True, -1, 0, 2**40, 1.5, "", "▁", "[UNK]", [], {}, [None], {"type": "BPE"}, "ByteLevel"]
    return draw(st.sampled_from(junk))


@pytest.mark.slow
@settings(deadline=None, max_examples=1000)
@given(data=st.data(), kind=st.sampled_from(["WordPiece", "Unigram", "SentencePiece BPE"]))
def test_a_damaged_file_raises_value_errors_only(
    data: st.DataObject, kind: str, libraries: dict[str, Library]
) -> None:
    """A thousand injuries: one line each, or a tokenizer that still works."""
    whole = json.loads(libraries[kind].to_str())
    injured = mutations(whole, data.draw)
    try:
        tokenizer = ForeignTokenizer(json.dumps(injured))
        tokenizer.decode(tokenizer.encode("the fox 😀"))
    except ValueError as error:
        assert str(error) and "\n" not in str(error)


def split_by(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pre_tokenizer": split_by("(a+)+b")}, "cannot encode this: .*retry-limit"),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": "(a|aa)+$"}, "content": ""}}, "retry-limit"),
        ({"pre_tokenizer": split_by("(")}, "cannot read it: "),
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
            "cannot read it: Precompiled",
        ),
        (
            {"post_processor": {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": 1}},
            "cannot read it",
        ),
    ],
)
def test_what_the_library_gives_up_or_panics_at_is_one_line(
    changes: dict[str, Any], said: str, libraries: dict[str, Library]
) -> None:
    """Patterns that go back and forth for ever, panics of Rust, depth: each is a ValueError."""
    definition = json.dumps(json.loads(libraries["WordPiece"].to_str()) | changes)
    with pytest.raises(ValueError, match=said) as caught:
        ForeignTokenizer(definition).encode("a" * 50 + "c")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("depth", [300, 500, 700, 900, 10_000])
def test_steps_in_steps_in_steps(depth: int) -> None:
    steps = '{"type": "Sequence", "normalizers": [' * depth + "]}" * depth
    with pytest.raises(ValueError, match=r"nested too deeply|cannot read it"):
        ForeignTokenizer(f'{{"model": {{"type": "WordPiece"}}, "normalizer": {steps}}}')


def test_a_frame_of_unknown_tokens_is_one_line(libraries: dict[str, Library]) -> None:
    data = json.loads(libraries["WordPiece"].to_str())
    data["post_processor"]["special_tokens"] = {}
    with pytest.raises(ValueError, match="cannot encode this: no entry found for key"):
        ForeignTokenizer(json.dumps(data)).encode_sentence("a")


@pytest.mark.parametrize("score", [float("nan"), float("inf"), "a", None])
@pytest.mark.usefixtures("unchecked")
def test_scores_are_numbers(score: Any) -> None:
    with pytest.raises(ValueError, match="the piece 'a' has the score"):
        PieceTable(["a"], [score], [1])


# ------------------------------------------------------------------------------------------------ beside it


def test_what_lies_beside_travels_along(tmp_path: Path, libraries: dict[str, Library]) -> None:
    """Roles, template and pooling are read from a folder and written into the next."""
    folder = tmp_path / "one"
    (folder / "1_Pooling").mkdir(parents=True)
    libraries["WordPiece"].save(str(folder / "tokenizer.json"))
    modules = [
        {"path": "", "type": "sentence_transformers.models.Transformer"},
        {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    files = {
        "tokenizer_config.json": {"cls_token": "[CLS]", "pad_token": {"content": "[PAD]"}},
        "special_tokens_map.json": {"unk_token": "[UNK]", "cls_token": "old"},
        "modules.json": modules,
        "1_Pooling/config.json": {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True},
        "sentence_bert_config.json": {"max_seq_length": 9},
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value), encoding="utf-8")
    (folder / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    first = open_tokenizer(folder)
    first.save(tmp_path / "two")
    second = open_tokenizer(tmp_path / "two")
    assert second == first and second.usage == first.usage == Usage(files, "{{ messages }}")
    found = second.usage
    assert found.pooling() == ("mean", True) and found.longest_sentence() == 9
    assert found.roles() == {"unk_token": "[UNK]", "cls_token": "[CLS]", "pad_token": "[PAD]"}
    assert found.role("pad") == "[PAD]" and found.role("eos") is None
    shutil.rmtree(tmp_path / "two" / "1_Pooling")
    with pytest.raises(ValueError, match="the pooling asked for is nothing"):
        read_usage(tmp_path / "two").pooling()


@pytest.mark.parametrize("path", ["..", "../x", "a/b", "/etc", "a\\b"])
def test_modules_name_no_place_outside(path: str, tmp_path: Path) -> None:
    modules = [{"path": path, "type": "Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    with pytest.raises(ValueError, match="which is no folder beside it"):
        read_usage(tmp_path)


@pytest.mark.parametrize("module", [pieces, sentencepiece, usage])
def test_examples_in_docstrings(module: Any) -> None:
    assert doctest.testmod(module).failed == 0

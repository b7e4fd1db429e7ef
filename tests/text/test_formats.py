"""Published file formats: the same ids as their own libraries, exact round trips, and nothing passed over."""

import base64
import copy
import doctest
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.text import formats, tokenizer_json
from clearhead.text.formats import merges_from_ranks
from clearhead.text.pretokenize import SPLITTERS
from clearhead.text.tokenizer import Tokenizer

END = "<|endoftext|>"
SAMPLES = [
    "",
    "The fox doesn't say: it's 12345.67!\n\n  \tdef f(x):\r\n",
    "订单成交，Größere Füße, съешь ещё 한국어 😀👍🏽 déjà-vu\u3000x",
    f"one{END}two <|user|><|user|><|end|>{END}\n  ",
    " \n \n\n  ",
    "I'LL we'Ve ABCdef あB　c",
]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all the files that a property test writes."""
    return tmp_path_factory.mktemp("scratch")


@pytest.fixture
def learned(trained: dict[str, Tokenizer]) -> Tokenizer:
    return trained["gpt2"]


# ------------------------------------------------------------------------------------------------ round trips


@pytest.mark.parametrize("splitter", SPLITTERS)
def test_tokenizer_json_round_trip(splitter: str, trained: dict[str, Tokenizer], tmp_path: Path) -> None:
    """Everything survives: splitter, special tokens, normalisation, begin and end tokens, ignore_merges."""
    base = trained[splitter]
    everything = Tokenizer(
        base.vocab,
        base.merges,
        base.special_tokens,
        splitter,
        ignore_merges=True,
        normalise=["strip_control", "nfkc", "nfc", "lowercase"],
        begin=["<|user|>"],
        end=[END, END],
    )
    for number, ours in enumerate([base, everything]):
        path = ours.save(tmp_path / str(number))
        assert path == tmp_path / str(number) / "tokenizer.json"
        for again in (Tokenizer.load(path), Tokenizer.load(path.parent)):
            assert again == ours
            assert [again.encode(text) for text in SAMPLES] == [ours.encode(text) for text in SAMPLES]
            assert (
                again.encode_padded(["x"], pad=END)[0].tolist()
                == ours.encode_padded(["x"], pad=END)[0].tolist()
            )


@pytest.mark.parametrize(
    "steps", [["nfc"], ["nfkc"], ["lowercase"], ["strip_control"], ["nfkc", "lowercase"]]
)
def test_normalisation_equals_hugging_face(steps: list[str], learned: Tokenizer, tmp_path: Path) -> None:
    import tokenizers

    ours = Tokenizer(learned.vocab, learned.merges, learned.special_tokens, normalise=steps)
    theirs = tokenizers.Tokenizer.from_file(str(ours.save(tmp_path / "t.json")))
    for text in [*SAMPLES, "ΟΔΟΣ ﬁ² Ｆull e\u0301 \x00a\x1b\u0301 İ ㄱㅏ\u11a8", f"{END.upper()}{END}"]:
        assert ours.encode(text) == theirs.encode(text).ids


@pytest.mark.parametrize("splitter", SPLITTERS)
def test_tiktoken_round_trip(
    splitter: str, trained: dict[str, Tokenizer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The merges come back from the ranks; tiktoken reads the same file to the same ids."""
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    ours = trained[splitter]
    path = ours.save(tmp_path / "ranks.tiktoken")
    again = Tokenizer.load(path, special_tokens=list(ours.special_tokens), splitter=splitter)
    assert again == ours
    theirs = tiktoken.Encoding(
        "ranks",
        pat_str=SPLITTERS[splitter] or r"[\s\S]+",
        mergeable_ranks=load_tiktoken_bpe(str(path)),
        special_tokens={END: ours.special_id(END)},
    )
    for text in SAMPLES:
        assert again.encode(text) == ours.encode(text)
        assert again.encode(text, "text") == theirs.encode_ordinary(text)


def test_gpt2_round_trip(learned: Tokenizer, tmp_path: Path) -> None:
    """vocab.json and merges.txt, named by either or by their folder; Hugging Face reads the same pair."""
    from tokenizers import AddedToken, ByteLevelBPETokenizer

    path = learned.save(tmp_path / "vocab.json")
    for name in (path, tmp_path / "merges.txt", tmp_path):
        assert Tokenizer.load(name) == learned
    assert learned.save(tmp_path / "old" / "vocab.bpe") == tmp_path / "old" / "encoder.json"
    assert Tokenizer.load(tmp_path / "old") == learned
    theirs = ByteLevelBPETokenizer(str(path), str(tmp_path / "merges.txt"))
    theirs.add_special_tokens([AddedToken(text, normalized=False) for text in learned.special_tokens])
    for text in SAMPLES:
        assert learned.encode(text) == theirs.encode(text).ids
    other = Tokenizer.load(path, special_tokens=[END], splitter="qwen2")
    assert (other.special_tokens, other.splitter) == ({END: learned.special_id(END)}, "qwen2")


def test_characters_round_trip(tmp_path: Path) -> None:
    """A vocabulary of characters is a tokenizer.json without ByteLevel, as Hugging Face reads it."""
    import tokenizers

    tokens = ["订", "单", "成", " ", "\n", "订单", "订单成", "<x>"]
    merges = [("订".encode(), "单".encode()), ("订单".encode(), "成".encode())]
    for splitter in ("none", "gpt2"):
        ours = Tokenizer({i: t.encode() for i, t in enumerate(tokens)}, merges, ["<x>"], splitter)
        path = ours.save(tmp_path / splitter)
        assert Tokenizer.load(path) == ours
        theirs = tokenizers.Tokenizer.from_file(str(path))
        text = "订单 成订单成\n<x>单"
        assert ours.encode(text) == theirs.encode(text).ids
        assert (
            ours.decode(ours.encode(text))
            == text
            == theirs.decode(ours.encode(text), skip_special_tokens=False)
        )


# ------------------------------------------------------------------------------- files that others have made


@pytest.mark.parametrize("legacy", [False, True])
def test_a_file_that_hugging_face_trained(
    legacy: bool, tmp_path: Path, trained: dict[str, Tokenizer]
) -> None:
    """Its own trainer, special tokens first, merges as pairs or as strings, a Roberta-like template."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    theirs = tokenizers.Tokenizer(models.BPE())
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.decoder = decoders.ByteLevel()
    theirs.train_from_iterator(
        SAMPLES * 3,
        trainers.BpeTrainer(
            vocab_size=330,
            special_tokens=["<s>", "</s>", "<pad>", END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    theirs.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0), add_prefix_space=False)
    data = json.loads(theirs.to_str())
    if legacy:
        data["model"]["merges"] = [" ".join(pair) for pair in data["model"]["merges"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    ours = Tokenizer.load(tmp_path)
    assert ours.special_tokens == {"<s>": 0, "</s>": 1, "<pad>": 2, END: 3}
    for text in SAMPLES:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids
    theirs.enable_padding(pad_id=2, pad_token="<pad>")
    rows = [row.ids for row in theirs.encode_batch(SAMPLES)]
    assert ours.encode_padded(SAMPLES, pad="<pad>")[0].tolist() == rows


def test_added_tokens_beyond_the_vocabulary(learned: Tokenizer, tmp_path: Path) -> None:
    """Llama 3's way: added tokens are not in the model's vocabulary and go on counting; a template begins."""
    import tokenizers
    from tokenizers import processors

    ordinary = {i: t for i, t in learned.vocab.items() if i not in learned.special_tokens.values()}
    plain = Tokenizer(ordinary, learned.merges, splitter="llama3", ignore_merges=True)
    theirs = tokenizers.Tokenizer.from_file(str(plain.save(tmp_path / "plain.json")))
    theirs.add_special_tokens(["<|begin|>", END])
    theirs.add_tokens(["<tool>"])
    theirs.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A",
        pair="<|begin|> $A <|begin|> $B:1",
        special_tokens=[("<|begin|>", len(ordinary))],
    )
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.load(tmp_path)
    assert ours.special_tokens == {"<|begin|>": 997, END: 998, "<tool>": 999}
    for text in [*SAMPLES, f"<tool>x{END}"]:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode_padded([text], pad=END)[0].tolist() == [theirs.encode(text).ids]
    assert Tokenizer.load(ours.save(tmp_path / "again")) == ours


tokens_of_letters = st.lists(st.text("abc", min_size=2, max_size=6), max_size=14, unique=True)


@settings(deadline=None, max_examples=100)
@given(
    tokens=tokens_of_letters, seed=st.integers(0, 99), words=st.lists(st.text("abc", max_size=14), max_size=6)
)
def test_any_rank_file_equals_tiktoken(tokens: list[str], seed: int, words: list[str], scratch: Path) -> None:
    """Ranks in any order, tokens that no merge reaches, bytes ranked after words: the ids are tiktoken's."""
    import tiktoken

    everything = [bytes([i]) for i in range(256)] + [token.encode() for token in tokens]
    random.Random(seed).shuffle(everything)
    ranks = {token: rank for rank, token in enumerate(everything)}
    theirs = tiktoken.Encoding(
        "any", pat_str=SPLITTERS["gpt2"] or "", mergeable_ranks=ranks, special_tokens={}
    )
    path = scratch / "any.tiktoken"
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    path.write_text("".join(lines), encoding="utf-8")
    ours = Tokenizer.load(path, splitter="gpt2")
    for word in [*words, *tokens]:
        assert ours.encode(word) == theirs.encode_ordinary(word)
    again = Tokenizer.load(ours.save(path.with_name("again.tiktoken")), splitter="gpt2")
    assert again == ours


def test_merges_from_ranks_worked() -> None:
    """abc is made by a + bc, since b + c has the lower rank; cab is reached by nothing."""
    ranks = {bytes([i]): i for i in range(256)} | {b"bc": 256, b"ab": 257, b"abc": 258, b"bcab": 259}
    merges, complete = merges_from_ranks(ranks | {b"cabx": 260})
    assert merges == [(b"b", b"c"), (b"a", b"b"), (b"a", b"bc"), (b"bc", b"ab")]
    assert not complete


def test_published_names_tell_splitter_and_special_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cl100k_base.tiktoken splits as cl100k; its special tokens belong to the file of its size only."""
    ours = Tokenizer({i: bytes([i]) for i in range(256)}, [], splitter="cl100k")
    path = ours.save(tmp_path / "cl100k_base.tiktoken")
    assert Tokenizer.load(path) == ours
    monkeypatch.setitem(formats._PUBLISHED, "cl100k", ("cl100k", 256, {END: 300}))
    assert Tokenizer.load(path).special_tokens == {END: 300}
    assert Tokenizer.load(tmp_path).special_tokens == {END: 300}


# ------------------------------------------------------------------------------------- what cannot be written


def test_formats_refuse_what_they_cannot_hold(learned: Tokenizer, tmp_path: Path) -> None:
    def variant(**changes: Any) -> Tokenizer:
        special_tokens = changes.pop("special_tokens", learned.special_tokens)
        return Tokenizer(learned.vocab, learned.merges, special_tokens, **changes)

    characters = Tokenizer({0: b"a", 1: b"b"}, [])
    reordered = Tokenizer(learned.vocab, learned.merges[::-1])
    cases: list[tuple[Tokenizer, str, str]] = [
        (variant(splitter="llama3"), "vocab.json", "cannot hold the splitter llama3"),
        (variant(ignore_merges=True), "vocab.json", "cannot hold ignore_merges"),
        (variant(normalise=["nfc"]), "vocab.json", "cannot hold normalisation"),
        (variant(begin=[END]), "x.tiktoken", "cannot hold begin and end tokens"),
        (variant(special_tokens=["a"]), "vocab.json", "cannot tell that 'a' is special"),
        (characters, "vocab.json", "cannot hold an alphabet of characters"),
        (characters, "x.tiktoken", "cannot hold an alphabet of characters"),
        (reordered, "x.tiktoken", "holds merges in the order of their ids"),
        (variant(), "cl100k.tiktoken", "the name means the splitter cl100k, this tokenizer has gpt2"),
        (variant(special_tokens={"é": 5000}), "tokenizer.json", "would both be spelled 'é'"),
    ]
    for tokenizer, name, message in cases:
        with pytest.raises(ValueError, match="cannot save") as error:
            tokenizer.save(tmp_path / name)
        assert message in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_saving_replaces_and_leaves_nothing_else(learned: Tokenizer, tmp_path: Path) -> None:
    learned.save(tmp_path / "t")
    Tokenizer({i: bytes([i]) for i in range(256)}, []).save(str(tmp_path / "t"))
    assert [path.name for path in (tmp_path / "t").iterdir()] == ["tokenizer.json"]
    assert Tokenizer.load(str(tmp_path / "t")).vocab_size == 256


# ---------------------------------------------------------------------------------------- what cannot be read


def valid() -> dict[str, Any]:
    """A small tokenizer.json with something in every stage."""
    tokens = [bytes([i]) for i in range(256)] + [b"ab", b"abc", b" ab", b"<s>", b"</s>"]
    ours = Tokenizer(
        dict(enumerate(tokens)),
        [(b"a", b"b"), (b"ab", b"c"), (b" ", b"ab")],
        ["<s>", "</s>"],
        "cl100k",
        normalise=["nfc", "strip_control"],
        begin=["<s>"],
        end=["</s>"],
    )
    return json.loads(tokenizer_json.write(ours._definition))


def change(*path: Any, to: Any) -> Callable[[], dict[str, Any]]:
    def changed() -> dict[str, Any]:
        data = valid()
        place: Any = data
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = to
        return data

    return changed


SPLIT = {"type": "Split", "pattern": {"Regex": "x+"}, "behavior": "Isolated", "invert": False}
ADDED = {"id": 259, "content": "<s>", "special": True, "normalized": False}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (change("model", to={"type": "WordPiece", "vocab": {}}), "model 'WordPiece' is not supported"),
        (change("model", to={"type": "Unigram", "vocab": []}), "model 'Unigram' is not supported"),
        (change("model", "byte_fallback", to=True), "model option byte_fallback=True is not supported"),
        (change("model", "dropout", to=0.1), "model option dropout=0.1 is not supported"),
        (change("model", "end_of_word_suffix", to="</w>"), "end_of_word_suffix='</w>' is not supported"),
        (change("model", "vocab", "a", to="b"), "the id of token 'a' should be of type int, found 'b'"),
        (change("model", "vocab", "a", to=True), "the id of token 'a' should be of type int, found True"),
        (change("model", "vocab", "a", to=98), "id 98 belongs to two tokens"),
        (change("model", "vocab", "a", to=-4), "the id of token 'a' should be from 0 to"),
        (change("model", "merges", 0, to="a b c"), "merge 0 should be a pair of tokens, found 'a b c'"),
        (change("model", "merges", 0, to=["q", "q"]), "merge 0, b'q' and b'q': the vocabulary lacks b'qq'"),
        (change("model", "merges", 0, to=["汉", "b"]), "token '汉' holds '汉', which stands for no byte"),
        (change("normalizer", to={"type": "StripAccents"}), "normalizer StripAccents is not supported"),
        (change("normalizer", to=[]), "normalizer should be of type dict, found []"),
        (change("pre_tokenizer", to={"type": "Whitespace"}), "pre_tokenizer Whitespace is not supported"),
        (change("pre_tokenizer", "pretokenizers", 0, to=SPLIT), "unknown splitter pattern 'x+'; known: gpt2"),
        (
            change("pre_tokenizer", "pretokenizers", 0, "behavior", to="Removed"),
            "behavior 'Removed' and invert",
        ),
        (change("pre_tokenizer", "pretokenizers", 1, "add_prefix_space", to=True), "add_prefix_space"),
        (change("pre_tokenizer", "pretokenizers", 1, "use_regex", to=True), "two splitters one after the"),
        (change("decoder", to={"type": "WordPiece"}), "decoder WordPiece is not supported"),
        (change("post_processor", to={"type": "Magic"}), "post_processor Magic is not supported"),
        (change("post_processor", "single", to=[]), "should hold one sequence, found 0"),
        (change("post_processor", "special_tokens", to={}), "should be of type dict, found None"),
        (change("added_tokens", 0, "lstrip", to=True), "added token '<s>' asks for lstrip"),
        (change("added_tokens", 0, "id", to=77), "added token '<s>' has id 77; the format numbers it 259"),
        (change("added_tokens", 0, "content", to="<t>"), "added token '<t>' has id 259; the format numbers"),
        (change("added_tokens", 0, "normalized", to=True), "'<s>' is matched after normalisation"),
        (change("added_tokens", to=[]), "post_processor adds '<s>' with id 259: not an added token"),
        (change("added_tokens", to=[ADDED, 5]), "an added token should be of type dict, found 5"),
    ],
)
def test_what_is_not_supported_is_named(make: Callable[[], Any], message: str, tmp_path: Path) -> None:
    """One clear line, with the file's name, for everything that would give other ids."""
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(make()), encoding="utf-8")
    with pytest.raises(ValueError) as error:
        Tokenizer.load(path)
    assert message in str(error.value)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_added_tokens_that_overlap_in_two_passes_are_refused(tmp_path: Path) -> None:
    """Hugging Face looks for un-normalised tokens first; that shows only where tokens can overlap."""
    data = valid()
    data["normalizer"] = None
    data["added_tokens"][1]["normalized"] = True
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    assert Tokenizer.load(path).encode("<s></s>") == [259, 260]
    data["added_tokens"].append(dict(data["added_tokens"][1], id=261, content="><"))
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ValueError, match="'<s>', '><' overlap and differ in 'normalized'"):
        Tokenizer.load(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b"{", "Expecting property name"),
        ("tokenizer.json", b"\xff\xfe", "invalid start byte"),
        ("tokenizer.json", b"[" * 100_000, "nested too deeply"),
        ("tokenizer.json", b"[]", "the file should be of type dict, found []"),
        ("vocab.json", b'{"a": 0, "ab": "x"}', "the id of token 'ab' should be of type int"),
        ("vocab.json", b'{"a": 0, "b": 0}', "id 0 belongs to two tokens"),
        ("x.tiktoken", b"YQ== 0\nYg==\n", "line 2 should be 'base64 rank', found b'Yg=='"),
        ("x.tiktoken", b"YQ== 0\n!!! 1\n", "line 2 should be 'base64 rank'"),
        ("x.tiktoken", b"YQ== 0\nYQ== 1\n", "line 2 lists the token b'a' again"),
        ("x.tiktoken", b"YQ== 0\nYg== 0\n", "two tokens have the same rank"),
        ("x.tiktoken", b"YQ== 0\n", "255 of the 256 bytes are missing, the first is 0x00"),
        ("x.tiktoken", b"YQ== -1\n", "the rank in line 1 should be from 0 to"),
    ],
)
def test_broken_files(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    (tmp_path / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    with pytest.raises(ValueError) as error:
        Tokenizer.load(tmp_path / name, splitter="gpt2" if name == "x.tiktoken" else None)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_are_not_there(learned: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        Tokenizer.load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"it holds none of tokenizer.json, vocab.json \+ merges.txt"):
        Tokenizer.load(tmp_path)
    (tmp_path / "vocab.json").write_text("{}", encoding="utf-8")
    with pytest.raises(FileNotFoundError, match=r"merges\.txt"):
        Tokenizer.load(tmp_path)
    (tmp_path / "vocab.json").unlink()
    for name in ("a.tiktoken", "b.tiktoken"):
        learned.save(tmp_path / name)
    with pytest.raises(ValueError, match=r"holds 2 \.tiktoken files; name the one to load"):
        Tokenizer.load(tmp_path)
    with pytest.raises(ValueError, match="does not say how text is split; pass splitter="):
        Tokenizer.load(tmp_path / "a.tiktoken")
    with pytest.raises(ValueError, match="names its own special tokens and splitter"):
        Tokenizer.load(learned.save(tmp_path), splitter="gpt2")
    with pytest.raises(ValueError, match="unknown splitter 'gpt9'"):
        Tokenizer.load(tmp_path / "a.tiktoken", splitter="gpt9")


# ------------------------------------------------------------------------------------------ hostile files

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
junk = st.recursive(
    scalars | st.sampled_from(["BPE", "Split", "ByteLevel", "Sequence", "\ud800", 2**70, "Ġ", "a b"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place of a JSON tree; of long lists and dicts only the ends."""
    found = [path]
    if isinstance(data, dict | list):
        keys = list(data) if isinstance(data, dict) else list(range(len(data)))
        for key in keys if len(keys) < 20 else [*keys[:2], *keys[-6:]]:
            found += places(data[key], (*path, key))
    return found


VALID = valid()
PLACES = places(VALID)[1:]


@settings(deadline=None, max_examples=300)
@given(
    changes=st.lists(st.tuples(st.sampled_from(PLACES), st.sampled_from(["set", "drop"]), junk), max_size=3),
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.binary(max_size=3)), max_size=2),
)
def test_a_hostile_file_gives_only_value_errors(
    changes: list[tuple[tuple[Any, ...], str, Any]], flips: list[tuple[float, bytes]], scratch: Path
) -> None:
    """Values replaced or dropped anywhere in a valid file, bytes replaced anywhere in its text."""
    data = copy.deepcopy(VALID)
    for path, action, value in changes:
        place: Any = data
        try:
            for key in path[:-1]:
                place = place[key]
            if action == "set":
                place[path[-1]] = value
            else:
                del place[path[-1]]
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took the place away
    raw = json.dumps(data).encode("utf-8", "surrogatepass")
    for where, piece in flips:
        at = int(where * len(raw))
        raw = raw[:at] + piece + raw[at + 1 :]
    path = scratch / "tokenizer.json"
    path.write_bytes(raw)
    try:
        ours = Tokenizer.load(path)
        assert isinstance(ours.decode(ours.encode("ab abc <s> é")), str)
        assert len(ours.fingerprint) == 64
    except ValueError as error:
        assert "\n" not in str(error)


def test_examples() -> None:
    for module in (formats, tokenizer_json):
        assert doctest.testmod(module).failed == 0

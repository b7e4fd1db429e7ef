"""The Tokenizer: equal to its dull twin, to Hugging Face and to tiktoken; exact both ways; a value."""

import copy
import doctest
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.text import definition, encoder, tokenizer
from clearhead.text.bpe import train_bpe
from clearhead.text.pretokenize import SPLITTERS, mend_surrogates
from clearhead.text.tokenizer import Tokenizer
from reference.naive_encode import naive_encode

END = "<|endoftext|>"
# What patterns, UTF-8 and special tokens treat in their own way, beside letters that merge often.
NASTY = [*"aB'lLvesrdtmZ  \n\r\t/.!12\xa0あé\u0301Ⅷ²ǅʰſ😀\x1c\x85汉字ЁЖ한\u200d\ue000\ufffd\U000e0100\x00<|>"]
NASTY += [" the", "'ll", "I'VE", "  \n  ", "self.", "<|endoftext|", "123456", "é" * 5]


def mixed_texts(agreed: str, *more: str) -> st.SearchStrategy[str]:
    """Texts of nasty parts, words, and characters from all over Unicode."""
    anywhere = st.integers(0, len(agreed) - 1).map(agreed.__getitem__)
    return st.lists(st.sampled_from([*NASTY, *more]) | anywhere, max_size=24).map("".join)


# ------------------------------------------------------------------------------------ equal to everybody else

EXAMPLES = 1_700  # times six splitters: more than ten thousand texts


@pytest.mark.slow
@pytest.mark.parametrize("splitter", SPLITTERS)
def test_ids_equal_hugging_face_and_tiktoken(
    splitter: str, trained: dict[str, Tokenizer], agreed: str, tmp_path
) -> None:
    """One learned vocabulary, three encoders, 10,200 texts in all: the same ids, special tokens included.

    Hugging Face reads the file that we save. tiktoken gets the vocabulary and the pattern, its own where it
    has one of that name. The texts hold only characters that all three engines classify alike.
    """
    import tiktoken
    import tokenizers
    from tiktoken_ext import openai_public as published

    ours = trained[splitter]
    theirs = tokenizers.Tokenizer.from_file(str(ours.save(tmp_path)))
    patterns = {"gpt2": published.r50k_pat_str, "cl100k": CL100K, "o200k": O200K}
    pattern = patterns.get(splitter, SPLITTERS[splitter])
    special_ids = ours.special_tokens.values()
    ranks = {token: token_id for token_id, token in ours.vocab.items() if token_id not in special_ids}
    other = tiktoken.Encoding(
        splitter,
        pat_str=pattern or r"[\s\S]+",
        mergeable_ranks=ranks,
        special_tokens={END: ours.special_id(END)},
    )
    seen = 0

    @settings(deadline=None, max_examples=EXAMPLES, database=None)
    @given(text=mixed_texts(agreed, END, "<|user|>", "<|user|><|end|>"))
    def compare(text: str) -> None:
        nonlocal seen
        seen += 1
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False).ids
        assert ours.decode(ids) == text == theirs.decode(ids, skip_special_tokens=False)
        plain = ours.encode(text, "text")
        assert plain == other.encode_ordinary(text)
        if "<|user|>" not in text:  # tiktoken does not look for the longest of two special tokens
            assert ids == other.encode(text, allowed_special="all")

    compare()
    assert seen >= EXAMPLES


# tiktoken's own spelling of its patterns.
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
O200K = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def test_the_texts_come_from_nearly_all_of_unicode(agreed: str) -> None:
    """What the engines dispute is a small part: the newest additions."""
    assert len(agreed) > 130_000
    assert {"a", "é", "汉", "한", "😀", "²", "\u2028"} <= set(agreed)


@pytest.mark.parametrize("splitter", SPLITTERS)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_ids_equal_the_dull_twin(splitter: str, trained: dict[str, Tokenizer], data: st.DataObject) -> None:
    ours = trained[splitter]
    text = data.draw(st.lists(st.sampled_from([*NASTY, *ours.special_tokens]), max_size=12).map("".join))
    expected = naive_encode(text, dict(ours.vocab), list(ours.merges), ours.special_tokens, splitter)
    assert ours.encode(text) == expected


@settings(deadline=None, max_examples=300)
@given(
    recipe=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=10),
    order=st.randoms(use_true_random=False),
    words=st.lists(st.text("abc", max_size=12), min_size=5, max_size=5),
    ignore_merges=st.booleans(),
)
def test_odd_merges_equal_hugging_face(
    recipe: list[tuple[int, int]], order: Any, words: list[str], ignore_merges: bool
) -> None:
    """Merges in an order that no training gives, several for one token, tokens that none reaches."""
    from tokenizers import Tokenizer as Theirs
    from tokenizers import decoders, models, pre_tokenizers

    tokens, merges = [bytes([i]) for i in range(256)], []
    usable = [b"a", b"b", b"c"]
    for left, right in recipe:
        pair = usable[left % len(usable)], usable[right % len(usable)]
        if pair not in merges:
            merges.append(pair)
        if pair[0] + pair[1] not in usable:
            usable.append(pair[0] + pair[1])
    tokens += [*usable[3:], b"cba", b"bbacab"]
    order.shuffle(merges)
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    ours = Tokenizer({i: token for token, i in vocab.items()}, merges, ignore_merges=ignore_merges)
    theirs = Theirs(
        models.BPE(
            {definition.spell(token): i for token, i in vocab.items()},
            [(left.decode(), right.decode()) for left, right in merges],
            ignore_merges=ignore_merges,
        )
    )
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.decoder = decoders.ByteLevel()
    for word in words:
        assert ours.encode(word) == theirs.encode(word).ids


# ------------------------------------------------------------------------------------------ there and back


@pytest.mark.parametrize("splitter", SPLITTERS)
@settings(deadline=None, max_examples=100)
@given(text=st.text(max_size=30).map(mend_surrogates), data=st.binary(max_size=20))
def test_decode_gives_the_text_back(
    splitter: str, trained: dict[str, Tokenizer], text: str, data: bytes
) -> None:
    """Every text, in every way of encoding; decode_bytes is exact for bytes that are no text, too."""
    ours = trained[splitter]
    ids = ours.encode(text, "text")
    assert ours.decode(ids) == text
    assert ours.decode_bytes(ids) == text.encode() == b"".join(map(ours.token_bytes, ids))
    assert ours.encode_batch([text, ""], "text") == [ids, []]
    assert ours.encode_array(text).tolist() == ids
    assert list(ours.encode_iterable([text], "text")) == ids
    assert ours.decode_bytes(list(data)) == data
    assert ours.decode(list(data)) == data.decode("utf-8", "replace")


def test_surrogates_in_every_way_in(trained: dict[str, Tokenizer]) -> None:
    """A pair is its character, a half is U+FFFD: encode, batch, iterable, array, padded, special tokens."""
    ours = trained["gpt2"]
    text, mended = "x\ud83d\ude00y\ud83d", "x😀y\ufffd"
    ids = ours.encode(mended)
    assert ours.encode(text) == ids
    assert ours.encode_batch([text]) == [ids]
    assert list(ours.encode_iterable(["x\ud83d", "\ude00y\ud83d"])) == ids
    assert ours.encode_array(text).tolist() == ids
    assert ours.encode_padded([text], pad=END)[0].tolist() == [ids]
    assert ours.compression(text) == ours.compression(mended)
    special = Tokenizer(ours.vocab, ours.merges, ["\ud83d\ude00!"])
    assert special.decode(special.encode("\ud83d\ude00!")) == "😀!"
    assert len(special.encode("😀!")) == 1


def test_decode_takes_whatever_holds_integers(trained: dict[str, Tokenizer]) -> None:
    ours = trained["gpt2"]
    ids = ours.encode("any ids")
    assert ours.decode(np.array(ids)) == ours.decode(tuple(ids)) == ours.decode(iter(ids)) == "any ids"
    assert ours.token_bytes(np.uint16(97)) == b"a"


# ------------------------------------------------------------------------------------------ special tokens


def with_specials(*special_tokens: str) -> Tokenizer:
    return Tokenizer({i: bytes([i]) for i in range(256)}, [], special_tokens)


@pytest.mark.parametrize("order", [["<a>", "<a><b>", "<b>c"], ["<b>c", "<a><b>", "<a>"]])
def test_special_tokens_match_leftmost_longest(order: list[str]) -> None:
    """Whatever the order of their list; each is one id and comes back as its text."""
    ours = with_specials(*order)
    ids = ours.special_tokens
    assert ours.encode("<a><b>c<a><b>c<b>c") == [
        ids["<a><b>"],
        ord("c"),
        ids["<a><b>"],
        ord("c"),
        ids["<b>c"],
    ]
    assert ours.encode("x<a>") == [ord("x"), ids["<a>"]]
    for text, token_id in ids.items():
        assert ours.encode(text) == [token_id]
        assert ours.decode([token_id]) == text
        assert ours.token_bytes(token_id) == text.encode()


@pytest.mark.parametrize("splitter", SPLITTERS)
@pytest.mark.parametrize("ignore_merges", [False, True])
def test_text_mode_never_gives_a_special_id(splitter: str, ignore_merges: bool) -> None:
    """Not even where the special token's text is a whole pre-token and those are looked up first."""
    ours = Tokenizer(
        {i: bytes([i]) for i in range(256)}, [], [END, "word"], splitter, ignore_merges=ignore_merges
    )
    text = f"{END} word{END}word"
    assert max(ours.encode(text, "text")) < 256
    assert max(ours.encode_array(END)) < 256
    assert ours.decode(ours.encode(text, "text")) == text
    assert ours.encode("word") == [ours.special_id("word")]


def test_error_mode_names_the_special_token(trained: dict[str, Tokenizer]) -> None:
    ours = trained["cl100k"]
    with pytest.raises(ValueError, match=r"holds the special token '<\|endoftext\|>'; specials='text'"):
        ours.encode(f"some {END}", "error")
    assert ours.encode("some", "error") == ours.encode("some")


def test_ids_of_special_tokens() -> None:
    """Those in the vocabulary keep their id, others get the next free one, a mapping says it itself."""
    vocab = {i: bytes([i]) for i in range(256)} | {256: b"<x>"}
    assert Tokenizer(vocab, [], ["<y>", "<x>", "<z>", "<y>"]).special_tokens == {
        "<y>": 257,
        "<x>": 256,
        "<z>": 258,
    }
    ours = Tokenizer(vocab, [], {"<pad>": 300})
    assert (ours.special_id("<pad>"), ours.vocab_size, ours.decode([300])) == (300, 301, "<pad>")
    assert Tokenizer(vocab, [], None).special_tokens == {}


def test_a_special_token_that_is_also_learned(trained: dict[str, Tokenizer]) -> None:
    """A word that merges make may be special too, under an id of its own; as text it stays ordinary."""
    vocab, merges = train_bpe(["the other the other"], 256 + 3, ["he"], workers=1)
    ours = Tokenizer(vocab, merges, ["he"])
    assert ours.special_tokens == {"he": 258}
    assert ours.decode(ours.encode("other he")) == "other he"
    assert 258 in ours.encode("other he")
    assert 258 not in ours.encode("other he", "text")


# ------------------------------------------------------------------------------------------ alphabets


def test_characters_as_alphabet() -> None:
    """The first merge is 订 + 单; a character that the corpus lacks is an error naming it."""
    vocab, merges = train_bpe(["订单成交", "订单取消", "查询订单", "订单过期"], 12, alphabet="characters")
    ours = Tokenizer(vocab, merges)
    assert (ours.alphabet, merges[0]) == ("characters", ("订".encode(), "单".encode()))
    assert [ours.token_bytes(i).decode() for i in ours.encode("查询订单")][-1].endswith("订单")
    assert ours.decode(ours.encode("过期订单")) == "过期订单"
    assert list(ours.encode_iterable("查询订单")) == ours.encode("查询订单")
    with pytest.raises(
        ValueError, match=r"character '买' \(U\+4E70\) is not in this tokenizer's alphabet of 10"
    ):
        ours.encode("订买单")


def test_a_missing_byte_is_named() -> None:
    ours = Tokenizer({0: b"a", 1: b"b", 2: b"ab"}, [(b"a", b"b")], alphabet="bytes")
    assert ours.encode("aba") == [2, 0]
    with pytest.raises(ValueError, match="byte 0x63 is not in the vocabulary, which has 2 of the 256 bytes"):
        ours.encode("abc")


# ------------------------------------------------------------------------------------------ a value


def test_a_tokenizer_is_a_value(trained: dict[str, Tokenizer]) -> None:
    """Equal parts make equal tokenizers; copies, pickles and later changes to the parts change nothing."""
    ours = trained["o200k"]
    vocab, merges, specials = dict(ours.vocab), list(ours.merges), list(ours.special_tokens)
    again = Tokenizer(vocab, merges, specials, "o200k")
    assert again == ours
    assert hash(again) == hash(ours)
    vocab.clear(), merges.clear(), specials.clear(), again.special_tokens.clear()
    assert again.encode("the same" + END) == ours.encode("the same" + END)
    assert pickle.loads(pickle.dumps(ours)) == copy.deepcopy(ours) == ours
    for other in (trained["cl100k"], "something else"):
        assert ours != other
    assert repr(ours) == "Tokenizer(1000 tokens, 3 of them special, splitter='o200k')"
    for name in ("vocab", "merges", "splitter", "special_tokens"):
        with pytest.raises(AttributeError):
            setattr(ours, name, None)
    with pytest.raises(TypeError):
        ours.vocab[0] = b"x"


def test_fingerprint_follows_what_decides_ids() -> None:
    vocab = {i: bytes([i]) for i in range(256)} | {256: b"ab", 257: b"bc"}
    merges = [(b"a", b"b"), (b"b", b"c")]
    ours = Tokenizer(vocab, merges)
    others = [
        Tokenizer(vocab, merges[::-1]),
        Tokenizer(vocab, merges[:1]),
        Tokenizer(vocab, merges, ["<x>"]),
        Tokenizer(vocab, merges, splitter="none"),
        Tokenizer(vocab, merges, ignore_merges=True),
        Tokenizer(vocab, merges, normalise=["nfc"]),
        Tokenizer(vocab | {257: b"cd"}, merges[:1]),
    ]
    assert len({ours.fingerprint, *(other.fingerprint for other in others)}) == 8
    assert len(ours.fingerprint) == 64
    around = Tokenizer(vocab, merges, ["<x>"], begin=["<x>"])
    assert around.fingerprint == others[2].fingerprint
    assert around != others[2]


def test_array_is_as_narrow_as_the_vocabulary_allows() -> None:
    vocab = {i: bytes([i]) for i in range(256)}
    assert Tokenizer(vocab, [], {"<x>": 65535}).encode_array("a<x>", "token").tolist() == [97, 65535]
    assert Tokenizer(vocab, [], {"<x>": 65535}).encode_array("a").dtype == np.uint16
    wide = Tokenizer(vocab, [], {"<x>": 65536})
    assert wide.encode_array("a<x>", "token").tolist() == [97, 65536]
    assert wide.encode_array("").dtype == np.uint32
    assert wide.encode_array("a").flags.writeable


def test_memory_of_pre_tokens_is_bounded(
    trained: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for four pre-tokens the ids are the same, and long pre-tokens are not kept at all."""
    ours = copy.copy(trained["gpt2"])
    text = "one two three four five six one two " + "x" * 100
    expected = trained["gpt2"].encode(text)
    monkeypatch.setattr(encoder, "_REMEMBERED", 4)
    assert ours.encode(text) == expected == ours.encode(text)
    remembered = ours._encoder._remembered
    assert 0 < len(remembered) <= 4
    assert all(len(piece) < 100 for piece in remembered)


def test_compression_is_bytes_per_token() -> None:
    ours = Tokenizer({i: bytes([i]) for i in range(256)} | {256: b"ab"}, [(b"a", b"b")], [END])
    assert ours.compression("abab") == 2.0
    assert ours.compression("é") == 1.0
    assert ours.compression(END) == 1.0
    with pytest.raises(ValueError, match="an empty text has no compression"):
        ours.compression("")


# ------------------------------------------------------------------------------------------ rows for a model


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("truncate", [None, 3, 5])
def test_padded_rows_equal_hugging_face(
    side: Any, truncate: int | None, trained: dict[str, Tokenizer], tmp_path
) -> None:
    """Begin and end tokens, padding on either side, truncation that counts them: ids and mask."""
    import tokenizers

    learned = trained["llama3"]
    ours = Tokenizer(
        learned.vocab, learned.merges, learned.special_tokens, "llama3", begin=["<|user|>"], end=[END]
    )
    theirs = tokenizers.Tokenizer.from_file(str(ours.save(tmp_path)))
    pad = "<|user|><|end|>"
    theirs.enable_padding(direction=side, pad_id=ours.special_id(pad), pad_token=pad)
    if truncate is not None:
        theirs.enable_truncation(truncate)
    texts = ["one sentence here", "", f"two{END}", "订单成交 and more"]
    ids, mask = ours.encode_padded(texts, pad=pad, side=side, truncate=truncate)
    expected = theirs.encode_batch(texts)
    assert ids.tolist() == [row.ids for row in expected]
    assert mask.astype(int).tolist() == [row.attention_mask for row in expected]


def test_padded_rows_by_hand() -> None:
    ours = with_specials("<s>", "</s>", "<pad>")
    start, end, pad = (ours.special_id(text) for text in ("<s>", "</s>", "<pad>"))
    ids, _ = ours.encode_padded(["abc", "d"], pad="<pad>", begin=["<s>"], truncate=3, keep="end", width=4)
    assert ids.tolist() == [[start, ord("b"), ord("c"), pad], [start, ord("d"), pad, pad]]
    ids, mask = ours.encode_padded(["abc"], pad="<pad>", begin=["<s>"], end=["</s>"], truncate=2, keep="end")
    assert (ids.tolist(), mask.tolist()) == ([[start, end]], [[True, True]])
    with pytest.raises(ValueError, match="truncate=1 is less than the 2 begin and end tokens"):
        ours.encode_padded(["a"], pad="<pad>", begin=["<s>"], end=["</s>"], truncate=1)
    with pytest.raises(KeyError, match="'<mask>' is not a special token of this tokenizer; it has '<s>', "):
        ours.encode_padded(["a"], pad="<mask>")


# ------------------------------------------------------------------------------------------ user mistakes

BYTES = {i: bytes([i]) for i in range(256)}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tokenizer({}, []), "the vocabulary is empty"),
        (lambda: Tokenizer({b"a": 0}, []), "a key of the vocabulary should be of type int, found b'a'"),
        (lambda: Tokenizer({0: "a"}, []), "the token of id 0 should be of type bytes, found 'a'"),
        (lambda: Tokenizer({-1: b"a"}, []), "should be from 0 to 4294967295, found -1"),
        (lambda: Tokenizer(BYTES, [(b"a", b"b")]), "merge 0, b'a' and b'b': the vocabulary lacks b'ab'"),
        (lambda: Tokenizer(BYTES, [], [""]), "a special token is the empty string"),
        (
            lambda: Tokenizer(BYTES, [], {"<x>": 5}),
            "id 5 of special token '<x>' belongs to the token b'\\x05'",
        ),
        (lambda: Tokenizer(BYTES, [], {"<x>": 300, "<y>": 300}), "id 300 belongs to two special tokens"),
        (lambda: Tokenizer(BYTES, [], {"<x>": 2**32}), "the id of the special token '<x>' should be from 0"),
        (lambda: Tokenizer(BYTES, [], splitter="gpt3"), "unknown splitter 'gpt3'; known: gpt2"),
        (
            lambda: Tokenizer(BYTES, [], alphabet="words"),
            "unknown alphabet 'words'; known: bytes, characters",
        ),
        (lambda: Tokenizer(BYTES, [], normalise=["nfd"]), "unknown normalisation step 'nfd'"),
        (lambda: Tokenizer(BYTES, []).encode("a", "raise"), "specials is 'token', 'text' or 'error', not"),
        (lambda: Tokenizer(BYTES, []).decode([97, 256]), "no token has the id 256; the last is 255"),
        (lambda: Tokenizer(BYTES, []).token_bytes(-1), "no token has the id -1; the last is 255"),
        (lambda: Tokenizer(BYTES, []).stream().feed(999), "no token has the id 999"),
    ],
)
def test_mistakes_are_value_errors(unchecked: None, make: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        make()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_other_mistakes() -> None:
    with pytest.raises(TypeError, match=r"special_tokens is a list of strings; did you mean \['<x>'\]"):
        Tokenizer(BYTES, [], "<x>")
    with pytest.raises(KeyError, match="'<s>' is not a special token of this tokenizer; it has none"):
        Tokenizer(BYTES, [], begin=["<s>"])
    with pytest.raises(TypeError):
        Tokenizer(BYTES, []).decode([1.5])


def test_examples() -> None:
    for module in (tokenizer, definition, encoder):
        assert doctest.testmod(module).failed == 0

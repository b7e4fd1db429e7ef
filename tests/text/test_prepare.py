"""Preparing a corpus: the right tokens, the same bytes for any number of workers, and after any kill."""

import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from clearhead.text.corpus import open_corpus, split_corpus
from clearhead.text.foreign import ForeignTokenizer
from clearhead.text.frame import END_OF_TEXT
from clearhead.text.prepare import prepare
from clearhead.text.shards import Shards
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.workers import in_workers
from text.test_foreign import word_piece

BYTES = {i: bytes([i]) for i in range(256)}
TOKENIZER = Tokenizer(BYTES | {256: b"do", 257: b"doc"}, [(b"d", b"o"), (b"do", b"c")], [END_OF_TEXT])
END = TOKENIZER.special_tokens[END_OF_TEXT]


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
    """What fsync is for, a power cut, happens in no test."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def corpus(tmp_path) -> Path:
    """Files of every size in a folder: 200 small documents, a large separated one, some broken lines."""
    folder = tmp_path / "corpus"
    (folder / "small").mkdir(parents=True)
    for i in range(200):
        (folder / "small" / f"{i:03}.txt").write_text(f"document {i}, " * (i % 7 + 1), encoding="utf-8")
    records = [json.dumps({"text": f"line {i} " * 20}) for i in range(300)]
    records[100] = "broken"
    (folder / "large.jsonl").write_text("\n".join(records), encoding="utf-8")
    (folder / "whole.md").write_text("a large file in one piece\n" * 400, encoding="utf-8")
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def expected(source, tokenizer=TOKENIZER, **options) -> dict[str, list[int]]:
    """The tokens of both splits, computed plainly."""
    ids: dict[str, list[int]] = {"train": [], "validation": []}
    for split, text in split_corpus(open_corpus(source, **options)):
        ids[split] += tokenizer.encode(text, specials="text")
        ids[split] += tokenizer.special_tokens.values()
    return ids


# ---------------------------------------------------------------- the right tokens


def test_the_shards_hold_every_document_in_order_each_with_its_end(corpus, tmp_path):
    index = prepare(corpus, TOKENIZER, tmp_path / "out", shard_bytes=1000)
    ids, texts = expected(corpus), list(split_corpus(open_corpus(corpus)))
    for split in ("train", "validation"):
        shards = Shards(tmp_path / "out" / split, TOKENIZER.fingerprint, verify=True)
        assert len(shards.files) > 3
        assert shards.tokens[:].tolist() == ids[split]
        here = [text for name, text in texts if name == split]
        assert shards.n_documents == len(here) == int((shards.tokens[:] == END).sum())
        assert shards.text_bytes == sum(len(text.encode("utf-8")) for text in here)
        assert (shards.tokens[:][shards.document_ends.astype(int) - 1] == END).all()
        assert index[split] == {
            "tokens": shards.n_tokens, "documents": len(here), "text_bytes": shards.text_bytes
        }  # fmt: skip
    assert index["report"]["reasons"] == {"not JSON": 1}
    assert index["report"]["first"]["not JSON"].startswith(f"{corpus / 'large.jsonl'}:101, ")
    assert Tokenizer.load(tmp_path / "out").fingerprint == TOKENIZER.fingerprint
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "index.json", "tokenizer.json", "train", "validation"
    ]  # fmt: skip
    assert json.loads((tmp_path / "out" / "index.json").read_text()) == index


def test_small_files_share_a_shard_and_a_large_one_has_its_own(tmp_path):
    sizes = {"a.txt": 30, "b.txt": 30, "c.txt": 500, "d.txt": 30, "e.txt": 60, "f.txt": 30}
    for name, size in sizes.items():
        (tmp_path / name).write_text(name[0] * size)
    index = prepare(tmp_path, TOKENIZER, tmp_path / "out", shard_bytes=90, validation=tmp_path / "a.txt")
    documents = [part["train"]["documents"] for part in index["parts"][:-1]]
    assert documents == [2, 1, 2, 1]


def test_a_large_jsonl_or_separated_file_is_cut_so_that_workers_can_share_it(tmp_path):
    text = f"{END_OF_TEXT}\n".join(f"story {i}" for i in range(400))
    (tmp_path / "stories.txt").write_text(text)
    index = prepare(
        tmp_path / "stories.txt",
        TOKENIZER,
        tmp_path / "out",
        document_separator=END_OF_TEXT,
        shard_bytes=2000,
    )
    assert 3 < len(index["parts"]) <= len(text) / 2000
    ids = expected(tmp_path / "stories.txt", document_separator=END_OF_TEXT)
    assert Shards(tmp_path / "out/train").tokens[:].tolist() == ids["train"]


def test_end_of_text_in_a_document_stays_ordinary_text(tmp_path):
    """User text never becomes a real end-of-text id."""
    (tmp_path / "a.txt").write_text(f"one {END_OF_TEXT} two " * 10)
    prepare(tmp_path / "a.txt", TOKENIZER, tmp_path / "out")
    ids = Shards(tmp_path / "out/train").tokens[:]
    assert (ids == END).sum() == 1 and ids[-1] == END
    assert TOKENIZER.decode(ids[:-1].tolist()).startswith(f"one {END_OF_TEXT} two ")


def test_a_tokenizer_without_end_of_text_puts_documents_side_by_side(tmp_path):
    plain = Tokenizer(BYTES, [])
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 20)
    prepare(tmp_path, plain, tmp_path / "out")
    shards = Shards(tmp_path / "out/train")
    assert bytes(shards.tokens[:].astype(np.uint8)) == b"a" * 19 + b"b" * 19
    assert shards.end_of_text is None and shards.document_ends.tolist() == [19, 38]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_published_tokenizer_of_another_kind_prepares_too(tmp_path, workers):
    """WordPiece, also sent to worker processes; its [SEP] ends a document, and one in the text does not."""
    tokenizer = ForeignTokenizer(word_piece().to_str())
    for i in range(30):
        (tmp_path / f"{i:02}.txt").write_text(f"the thesis [SEP] of the fox {i}")
    texts = [text for split, text in split_corpus(open_corpus(tmp_path)) if split == "train"]
    prepare(tmp_path, tokenizer, tmp_path / "out", shard_bytes=100, workers=workers)
    end = tokenizer.special_id("[SEP]")
    wanted = [token for text in texts for token in [*tokenizer.encode(text, "text"), end]]
    ids = Shards(tmp_path / "out/train", tokenizer.fingerprint).tokens[:].tolist()
    assert ids == wanted and ids.count(end) == len(texts)


def test_validation_text_of_its_own_takes_the_place_of_the_split(corpus, tmp_path):
    """As for corpora that come in two files, one to train and one to validate on."""
    (tmp_path / "held.txt").write_text("held out")
    index = prepare(corpus / "small", TOKENIZER, tmp_path / "out", validation=tmp_path / "held.txt")
    assert index["train"]["documents"] == 200
    validation = Shards(tmp_path / "out/validation").tokens[:].tolist()
    assert validation == [*TOKENIZER.encode("held out"), END]


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "holds no document"), ("x", "has no text for the train split: 1 document, 1 byte")],
)
def test_a_corpus_too_small_for_two_splits_is_an_error(tmp_path, text, message):
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(ValueError, match=message):
        prepare(tmp_path / "a.txt", TOKENIZER, tmp_path / "out")


def test_strict_stops_at_the_place_also_after_a_lenient_run_of_the_same_part(corpus, tmp_path):
    prepare(corpus, TOKENIZER, tmp_path / "out")
    for out in ("out", "new"):
        with pytest.raises(ValueError, match=r"large\.jsonl:101: not JSON"):
            prepare(corpus, TOKENIZER, tmp_path / out, strict=True)


# ---------------------------------------------------------------- workers


def test_any_number_of_workers_writes_the_same_bytes(corpus, tmp_path):
    """Also the index and its counts, whichever process did which part."""
    for workers in (1, 2, 3):
        prepare(corpus, TOKENIZER, tmp_path / f"out{workers}", shard_bytes=3000, workers=workers)
    assert files(tmp_path / "out1") == files(tmp_path / "out2") == files(tmp_path / "out3")


def test_an_error_in_a_worker_is_raised_here_and_names_the_first_place(tmp_path):
    for i in range(6):
        (tmp_path / f"{i}.txt").write_bytes(b"good" if i < 2 else b"bad \xff")
    with pytest.raises(ValueError, match=r"2\.txt:1: bad UTF-8"):
        prepare(tmp_path, TOKENIZER, tmp_path / "out", shard_bytes=1, workers=2, strict=True)


def test_progress_counts_the_bytes_of_the_corpus(corpus, tmp_path):
    seen = []
    prepare(corpus, TOKENIZER, tmp_path / "out", shard_bytes=3000, progress=lambda *now: seen.append(now))
    total = sum(path.stat().st_size for path in corpus.rglob("*.*"))
    assert seen == sorted(seen) and len(seen) > 5 and seen[-1] == (total, total)


def test_less_than_one_worker_or_byte_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="workers is 0; it is at least 1"):
        prepare("pydoc", TOKENIZER, tmp_path, workers=0)
    with pytest.raises(ValueError, match="shard_bytes is 0; it is at least 1"):
        prepare("pydoc", TOKENIZER, tmp_path, shard_bytes=0)


def test_a_worker_that_dies_is_reported_and_not_waited_for():
    with pytest.raises(
        ChildProcessError, match=r"a worker process ended with exit code \d+; workers=1 needs"
    ):
        list(in_workers(os._exit, (9,), range(6), 2))


def test_preparing_needs_no_torch_and_a_script_needs_no_main_guard(corpus, tmp_path):
    """The script below would run again in each worker if they imported it."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "from clearhead.text.prepare import prepare\n"
        "from clearhead.text.tokenizer import Tokenizer\n"
        "print('started')\n"
        "tokenizer = Tokenizer({i: bytes([i]) for i in range(256)}, [], ['<|endoftext|>'])\n"
        "index = prepare(sys.argv[1], tokenizer, sys.argv[2], shard_bytes=5000, workers=2)\n"
        "print(index['train']['documents'] > 100, 'torch' in sys.modules)\n"
    )
    command = [sys.executable, str(script), str(corpus), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["started", "True", "False"] and done.stderr == ""


# ---------------------------------------------------------------- going on


class Counting(Tokenizer):
    """A tokenizer that counts the texts it encodes."""

    count = 0

    def encode_array(self, text, specials="text"):
        Counting.count += 1
        return super().encode_array(text, specials)


@pytest.fixture
def counting() -> Iterator[Tokenizer]:
    Counting.count = 0
    yield Counting(dict(TOKENIZER.vocab), TOKENIZER.merges, [END_OF_TEXT])


def test_what_is_done_is_not_done_again_and_what_is_damaged_is(corpus, tmp_path, counting):
    def run() -> int:
        before = Counting.count
        prepare(corpus, counting, out, shard_bytes=3000)
        return Counting.count - before

    out = tmp_path / "out"
    everything = run()
    whole = files(out)
    assert everything == 500 and run() == 0 and files(out) == whole
    shard = out / "train" / "shard-00001.bin"
    for injure in (shard.unlink, lambda: shard.write_bytes(b"x"), shard.with_suffix(".idx").unlink):
        injure()
        assert 0 < run() < everything / 3 and files(out) == whole
    (out / "index.json").unlink()
    assert run() == everything and files(out) == whole


def test_a_changed_file_is_tokenised_again_and_old_shards_go(corpus, tmp_path):
    out = tmp_path / "out"
    prepare(corpus, TOKENIZER, out, shard_bytes=3000)
    n_shards = len(list(out.glob("train/*.bin")))
    (corpus / "large.jsonl").write_text(json.dumps({"text": "short now"}), encoding="utf-8")
    index = prepare(corpus, TOKENIZER, out, shard_bytes=3000)
    assert len(list(out.glob("train/*.bin"))) < n_shards
    assert Shards(out / "train", verify=True).tokens[:].tolist() == expected(corpus)["train"]
    assert (
        len(Shards(out / "train").files)
        == len(list(out.glob("train/*.bin")))
        == len([part for part in index["parts"] if part["train"]])
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"tokenizer": Tokenizer(BYTES, [], [END_OF_TEXT])},
            "was prepared with tokenizer '.*', not '.*'; choose",
        ),
        ({"source": "pydoc"}, "was prepared with source '.*corpus', not 'pydoc'"),
        ({"document_separator": "\n"}, r"was prepared with document_separator None, not '\\n'"),
        (
            {"validation": "pydoc"},
            r"was prepared with source '.*', not '.* and pydoc'; choose another folder",
        ),
    ],
)
def test_a_folder_prepared_otherwise_is_refused_not_overwritten(corpus, tmp_path, change, message):
    arguments = {"source": corpus, "tokenizer": TOKENIZER, "out_dir": tmp_path / "out"}
    prepare(**arguments)
    before = files(tmp_path / "out")
    with pytest.raises(ValueError, match=message):
        prepare(**(arguments | change))
    assert files(tmp_path / "out") == before


@pytest.mark.slow
def test_a_run_stopped_before_any_step_on_the_disk_ends_with_the_same_bytes(tmp_path, monkeypatch):
    """Every rename, flush and removal in turn is the point of death: nothing half done is taken for done."""
    corpus, whole, out = (tmp_path / name for name in ("corpus", "whole", "out"))
    corpus.mkdir()
    for i in range(60):
        (corpus / f"{i}.txt").write_text(f"document {i}")
    prepare(corpus, TOKENIZER, whole, shard_bytes=300)
    assert len(list(whole.glob("train/*.bin"))) == 3
    steps_left = 0

    class Killed(BaseException):
        pass

    def dying(function):
        def step(*args, **kwargs):
            nonlocal steps_left
            steps_left -= 1
            if steps_left == 0:
                raise Killed
            return function(*args, **kwargs)

        return step

    for name in ("replace", "unlink"):
        monkeypatch.setattr(Path, name, dying(getattr(Path, name)))
    monkeypatch.setattr(os, "fsync", dying(os.fsync))
    monkeypatch.setattr(shutil, "rmtree", dying(shutil.rmtree))

    def survives(steps: int) -> bool:
        nonlocal steps_left
        steps_left = steps
        try:
            prepare(corpus, TOKENIZER, out, shard_bytes=300)
        except Killed:
            return False
        return True

    for point in range(1, 1000):
        first = survives(point)
        survives(point // 2)
        assert survives(0) and files(out) == files(whole)
        if first:
            break
        out.rename(tmp_path / f"done at {point}")
    assert point > 40


DRIVER = """
import os, random, signal, sys, time
from pathlib import Path
from clearhead.text.prepare import prepare
from clearhead.text.tokenizer import Tokenizer

corpus, tokenizer, out, kills = sys.argv[1], Tokenizer.load(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
random.seed(int(sys.argv[5]))
os.fsync = lambda _: None
rounds = killed = inside = resumed = 0
while killed < kills:
    receipts = lambda: len(list(out.glob(f"{rounds}/.parts/part-*.json")))
    before, more = receipts(), random.randrange(3)
    child = os.fork()
    if not child:
        prepare(corpus, tokenizer, out / str(rounds), shard_bytes=4000, workers=1)
        os._exit(0)
    while not os.waitpid(child, os.WNOHANG)[0] and receipts() < before + more:
        time.sleep(0.001)
    time.sleep(random.uniform(0, 0.02))
    try:
        os.kill(child, signal.SIGKILL)
    except ProcessLookupError:
        rounds += 1
        continue
    if os.waitpid(child, 0)[1] == signal.SIGKILL:
        killed += 1
        resumed += before > 0
        inside += any(out.glob(f"{rounds}/train/.*.tmp"))
    else:
        rounds += 1
prepare(corpus, tokenizer, out / str(rounds), shard_bytes=4000)
print(rounds + 1, killed, inside, resumed)
"""


@pytest.mark.slow
def test_twenty_kill_9_while_tokenising_leave_the_bytes_of_an_undisturbed_run(corpus, tmp_path):
    """R11. The kills come at random times; most of them inside a part, many after a part that stays."""
    for i in range(3):
        shutil.copytree(corpus / "small", corpus / f"more{i}")
    prepare(corpus, TOKENIZER, tmp_path / "whole", shard_bytes=4000)
    command = [
        sys.executable,
        "-c",
        DRIVER,
        corpus,
        tmp_path / "whole" / "tokenizer.json",
        tmp_path / "out",
        "20",
    ]
    done = subprocess.run([*map(str, command), "1"], capture_output=True, text=True, check=True)
    rounds, killed, inside, resumed = map(int, done.stdout.split())
    assert killed == 20 and inside >= 5 and resumed >= 5
    for number in range(rounds):
        assert files(tmp_path / "out" / str(number)) == files(tmp_path / "whole")


def test_workers_end_when_their_parent_is_killed():
    """They hold the parent's stdout: it ends only when all of them have ended."""
    script = (
        "import operator, sys\n"
        "from clearhead.text.workers import in_workers\n"
        "results = in_workers(operator.attrgetter, ('real',), [1, 1, 1], 2)\n"
        "print(next(results), flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "1\n"
        parent.kill()
        assert parent.communicate(timeout=60) == ("", None)


@pytest.mark.slow
def test_memory_does_not_follow_the_size_of_the_corpus(tmp_path):
    """4 MB of small documents through a fast stand-in for a tokenizer, in less than 2 MB."""

    class Fast(Tokenizer):
        def encode_array(self, text, specials="text"):
            return np.zeros(len(text), np.uint16)

    path = tmp_path / "large.jsonl"
    with path.open("w") as file:
        for i in range(4_000):
            file.write(json.dumps({"text": f"{i} " + "word " * 200}) + "\n")
    fast = Fast(BYTES, [], [END_OF_TEXT])
    tracemalloc.start()
    index = prepare(path, fast, tmp_path / "out", workers=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert index["report"]["documents"] == 4_000 and peak < 2e6

"""Encoded examples that are kept: the very rows, found by what they were made of, whole or not at all."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.text.encode_examples import Encoded, EncodingReport
from clearhead.text.examples import Labelled, Pair
from clearhead.text.tokenizer import Tokenizer
from clearhead.training import durable, example_data, kept_rows
from clearhead.training.durable import damage
from clearhead.training.kept_rows import KeptRows, find_or_encode, fingerprint, key_of, pack
from clearhead.training.loop import train
from clearhead.training.run_folder import RunFolder
from clearhead.training.tasks import make_task
from clearhead.training.verify import verify_run
from tiny_run import tiny_recipe
from tiny_tasks import CASES, make_recipe

TOKENIZER = Tokenizer({i: bytes([i]) for i in range(256)} | {256: b"<|endoftext|>"}, [], ["<|endoftext|>"])
ROWS = [Encoded([5, 6, 7], 1, token_types=[0, 0, 1]), Encoded([8], 0, example=3)]
REPORT = EncodingReport(examples=4, rows=2, cut=1, lost=9, longest=12, left_out=2)
KEY = "0123456789abcdef"

ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6)
TARGETS: list[st.SearchStrategy[Any]] = [
    st.lists(st.integers(-100, 2**31 - 1), min_size=1, max_size=6),
    st.lists(st.floats(allow_nan=False), min_size=2, max_size=2),
    st.integers(0, 2**40),
    st.floats(allow_nan=False),
    st.tuples(st.integers(0, 99), st.integers(0, 99)),
]


def parts(targets: st.SearchStrategy[Any]) -> st.SearchStrategy[list[tuple[Any, ...]]]:
    """What rows are made of whose targets are all of one kind, and whose other parts may be missing."""
    source = st.none() | st.lists(st.integers(0, 9), max_size=4)
    types = st.none() | st.lists(st.integers(0, 1), max_size=4)
    pair = st.tuples(st.integers(-1, 2**31 - 1), st.integers(-1, 9))
    row = st.tuples(
        ids, targets, source, types, st.integers(0, 2**40), st.none() | st.lists(pair, max_size=4)
    )
    return st.lists(row, min_size=1, max_size=7)


@settings(max_examples=80, deadline=None)
@given(made=st.sampled_from(TARGETS).flatmap(parts))
def test_packed_rows_are_the_rows(made: list[tuple[Any, ...]]) -> None:
    """All values and their types, from either end, and in slices."""
    rows = [Encoded(*row) for row in made]
    kept = KeptRows(pack(rows))
    assert list(kept) == rows
    assert [kept[number] for number in range(-len(rows), 0)] == rows
    assert kept[1:9:2] == rows[1:9:2]
    assert repr(kept[:]) == repr(rows)  # 1 is not 1.0, a tuple is no list
    with pytest.raises(IndexError):
        kept[len(rows)]


def test_targets_of_two_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the targets are of 2 kinds, \['float', 'int'\]"):
        pack([Encoded([1], 1), Encoded([1], 2.0)])


def test_the_key_follows_from_what_decides_the_rows() -> None:
    """Each change of an example, their order, the tokenizer or a setting; not the place of an example."""
    examples = [Labelled("a", "x"), Labelled("b", "y", "c")]
    other = Tokenizer({**TOKENIZER.vocab, 257: b"ab"}, [(b"a", b"b")], ["<|endoftext|>"])
    keys = [
        key_of(examples, TOKENIZER, ["classes", 32]),
        key_of(examples[::-1], TOKENIZER, ["classes", 32]),
        key_of(examples[:1], TOKENIZER, ["classes", 32]),
        key_of([Labelled("a", "y"), examples[1]], TOKENIZER, ["classes", 32]),
        key_of([examples[0], replace(examples[1], second="d")], TOKENIZER, ["classes", 32]),
        key_of(examples, TOKENIZER, ["classes", 33]),
        key_of(examples, other, ["classes", 32]),
        key_of([Pair("a", "x"), Pair("b", "y")], TOKENIZER, ["classes", 32]),
    ]
    assert len(set(keys)) == len(keys)
    assert key_of([replace(one, place="a.csv:7") for one in examples], TOKENIZER, ["classes", 32]) == keys[0]


def encode() -> tuple[list[Encoded], EncodingReport]:
    return ROWS, REPORT


def never() -> tuple[list[Encoded], EncodingReport]:
    raise AssertionError("encoded again")


def check(run: RunFolder, notes: list[str], make: Any = never) -> Path | None:
    """What is found is what was encoded, and lies in the run's folder; where it was found."""
    kept = find_or_encode(run, KEY, make, notes.append)
    assert (list(kept.rows), kept.report, kept.fingerprint) == (ROWS, REPORT, fingerprint(ROWS))
    assert [path.name for path in run.examples.iterdir()] == [KEY]
    assert damage(run.examples / KEY) == []
    return kept.found


def test_rows_are_found_again_in_the_run_and_beside_it(tmp_path) -> None:
    """A run takes them from one beside it, and needs that one no more."""
    notes: list[str] = []
    first, second = RunFolder(tmp_path / "first"), RunFolder(tmp_path / "second")
    assert check(first, notes, encode) is None
    assert check(first, notes) == first.examples / KEY
    assert check(second, notes) == first.examples / KEY
    durable.remove_folder(first.path)
    assert check(second, notes) == second.examples / KEY
    assert notes == []


@pytest.mark.parametrize("name", [kept_rows.ROWS, kept_rows.ABOUT, durable.MANIFEST])
def test_damaged_rows_are_encoded_anew(name, tmp_path) -> None:
    """One bit in any of the files is told; the folder is whole after that."""
    run, notes = RunFolder(tmp_path / "run"), []
    check(run, notes, encode)
    file = run.examples / KEY / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert check(run, notes, encode) is None
    assert len(notes) == 1
    assert f"{run.examples / KEY} is not used: {name} is not what was written" in notes[0]
    assert check(run, notes) is not None


def test_a_neighbour_that_goes_away_meanwhile_is_done_without(tmp_path, monkeypatch) -> None:
    """A run is deleted while its rows are looked at by another: they are encoded anew, and it is told."""
    first, second, notes = RunFolder(tmp_path / "first"), RunFolder(tmp_path / "second"), []
    check(first, notes, encode)

    def checked_and_gone(folder: Path) -> list[str]:
        problems = damage(folder)
        durable.remove_folder(first.path)
        return problems

    monkeypatch.setattr(kept_rows, "damage", checked_and_gone)
    assert check(second, notes, encode) is None
    assert len(notes) == 1 and f"{first.examples / KEY} is not used: " in notes[0]


def test_a_kill_at_any_point_leaves_nothing_half(tmp_path, monkeypatch) -> None:
    """After it, rows are there whole or not at all, and the next start has them."""
    points: list[str] = []
    monkeypatch.setattr(durable, "_point", points.append)
    check(RunFolder(tmp_path / "whole"), [], encode)
    assert len(points) > 4
    for number in range(len(points)):
        run, passed = RunFolder(tmp_path / f"home{number}" / "run"), []

        def die(name: str, passed: list[str] = passed, number: int = number) -> None:
            passed.append(name)
            if len(passed) == number + 1:
                raise KeyboardInterrupt

        monkeypatch.setattr(durable, "_point", die)
        with pytest.raises(KeyboardInterrupt):
            find_or_encode(run, KEY, encode, print)
        whole = [path for path in run.examples.iterdir() if not path.name.startswith(".")]
        assert all(damage(path) == [] for path in whole)
        check(run, [], never if whole else encode)


def test_a_disk_that_refuses_stops_nothing(tmp_path, monkeypatch) -> None:
    def refuse(*anything: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept_rows, "write_folder", refuse)
    run, notes = RunFolder(tmp_path / "run"), []
    kept = find_or_encode(run, KEY, encode, notes.append)
    assert list(kept.rows) == ROWS
    assert not run.path.exists()
    assert len(notes) == 1 and "could not be kept in" in notes[0] and "No space left" in notes[0]


def test_only_the_first_process_of_a_run_writes(tmp_path) -> None:
    run = RunFolder(tmp_path / "run")
    run.begun = True
    assert list(find_or_encode(run, KEY, encode, print).rows) == ROWS
    assert not run.path.exists()


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("next_token", "masked")])
def test_a_task_of_kept_rows_is_the_task(case, tmp_path, monkeypatch) -> None:
    """Every objective: the second start encodes nothing, and learns from the same batches."""
    recipe, run, notes = make_recipe(tmp_path, case), RunFolder(tmp_path / "run"), []
    first, _ = make_task(recipe, run, notes.append)
    monkeypatch.setattr(example_data, "encode", lambda *anything: never())
    second, _ = make_task(recipe, run, notes.append)
    assert first.fingerprint == second.fingerprint
    for one, other in zip(vars(first.batch(3)).items(), vars(second.batch(3)).items(), strict=True):
        assert one[0] == other[0] and str(one[1]) == str(other[1])
    ours = [note for note in notes if "learn from" in note]
    assert ours[1] == f"{ours[0]}; encoded before, in {run.path}"


def test_a_run_that_goes_on_uses_what_it_kept(tmp_path, monkeypatch) -> None:
    """Three steps and three more are six, without encoding again; verify looks at what is kept."""
    recipe = make_recipe(tmp_path, "classes", steps=6)
    train(recipe, tmp_path / "whole")
    train(recipe, tmp_path / "cut", stop_after=3)
    monkeypatch.setattr(example_data, "encode", lambda *anything: never())
    train(recipe, tmp_path / "cut", resume=True)
    files = [next((tmp_path / name / "checkpoints").glob("*6")) for name in ("whole", "cut")]
    assert [(file / "model.safetensors").read_bytes() for file in files[:1]] == [
        (file / "model.safetensors").read_bytes() for file in files[1:]
    ]
    kept = sorted((tmp_path / "cut" / "data" / "examples").iterdir())
    assert len(kept) == 2
    rows = kept[0] / kept_rows.ROWS
    rows.write_bytes(rows.read_bytes()[:-1])
    bad = {finding.path: finding.problems for finding in verify_run(tmp_path / "cut") if finding.problems}
    assert list(bad) == [kept[0]] and "rows.safetensors has" in bad[kept[0]][0]


def test_running_text_keeps_no_rows(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("the cat sees the dog. " * 40, encoding="utf-8")
    (tmp_path / "b.txt").write_text("the dog sees a cat. " * 9, encoding="utf-8")
    recipe = tiny_recipe(tmp_path / "a.txt", data={"validation": str(tmp_path / "b.txt")}, steps=1)
    run = train(recipe, tmp_path / "run")
    assert not run.examples.exists()


def test_a_report_is_kept_as_it_is(tmp_path) -> None:
    run = RunFolder(tmp_path / "run")
    find_or_encode(run, KEY, encode, print)
    about = json.loads((run.examples / KEY / kept_rows.ABOUT).read_text(encoding="utf-8"))
    assert EncodingReport(**about["report"]).summary() == REPORT.summary()

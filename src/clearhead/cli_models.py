"""The verbs for models that exist: check them, talk with them, compare texts and words, change their form.

Each verb is a few lines around a library function of the same meaning. `place` is the folder of a run, a
folder in Hugging Face form, a GGUF file, or, with --download, a name on the Hugging Face Hub.
"""

import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

if TYPE_CHECKING:
    import torch

    from clearhead.model.transformer import Transformer
    from clearhead.published.selfcheck import Row
    from clearhead.server.run_view import RunView
    from clearhead.server.sides import Given
    from clearhead.text.foreign import AnyTokenizer

Kind = Literal["cosine", "dot", "euclidean", "manhattan", "chebyshev"]
Json = Annotated[bool, arg(name="json")]


def open_model(
    place: str | Path,
    device: str = "auto",
    download: bool = False,
    dtype: "torch.dtype | None" = None,
) -> "tuple[Transformer, AnyTokenizer | None]":
    """The model and the tokenizer at a place; a place that is nothing is a FileNotFoundError."""
    is_run = check_place(place, download)
    from clearhead.published.models import load
    from clearhead.training.machine import find_device
    from clearhead.training.run_folder import load_run

    if is_run:
        model, tokenizer = load_run(place, find_device(device))
        return (model if dtype is None else model.to(dtype)), tokenizer
    return load(place, dtype=dtype, device=find_device(device), download=download)


def check_place(place: str | Path, download: bool = False) -> bool:
    """Whether a place looks like a run, else like a published model; raise an error if like neither."""
    if not str(place).strip():
        raise ValueError(
            "the place of a model is empty; give a folder, a GGUF file, or a name with --download"
        )
    path = Path(place)
    if not path.exists() and not download:
        raise FileNotFoundError(
            f"there is no {place}; give the folder of a run or of a published model, a GGUF file, or with "
            "--download a name on the Hugging Face Hub"
        )
    if not path.is_dir() or (path / "config.json").is_file() or list(path.glob("*.gguf")):
        return False
    if not (path / "model.json").exists() and not (path / "checkpoints").exists():
        raise FileNotFoundError(
            f"{place} holds neither a run (model.json, tokenizer.json, checkpoints) nor a published "
            "model (config.json, or one .gguf file)"
        )
    return True


def open_run(place: str | Path, device: str) -> "RunView | None":
    """The run at a place, with all the steps whose weights it has kept; None if it holds no run."""
    from clearhead.server.run_view import RunView
    from clearhead.training.machine import find_device
    from clearhead.training.run_folder import RunFolder

    return RunView(place, find_device(device)) if str(place).strip() and RunFolder(place).exists() else None


def open_speaker(place: str | Path, device: str, download: bool) -> "tuple[Transformer, AnyTokenizer]":
    """The same; a model without a tokenizer is a ValueError."""
    model, tokenizer = open_model(place, device, download)
    if tokenizer is None:
        raise ValueError(f"{place} holds no tokenizer, which turns text into the model's tokens and back")
    return model, tokenizer


def selfcheck(
    place: Positional[str | None] = None,
    family: tuple[str, ...] = (),
    device: str = "cpu",
    as_json: Json = False,
) -> None:
    """Check that models give the numbers they should: a table, and exit code 1 if one is off.

    Each number is the largest difference found on a path; -- where a family has no such path.

    Args:
        place: the folder of a published model; without one, a tiny random model of each family.
        family: only these families.
        device: cpu or cuda, where ours run; transformers runs on the CPU.
        as_json: print one JSON object.
    """
    from clearhead.published import selfcheck as check
    from clearhead.training.machine import find_device

    if place is None:
        found = check.selfcheck(list(family) or None, find_device(device))
    elif family:
        raise ValueError(f"--family {family[0]} is for tiny models; {place} is one model")
    else:
        found = check_model_at(place, device)
    rows: list[Row] = []
    for _, group in itertools.groupby(found, lambda row: row.family):
        line = list(group)
        if not rows and not as_json:
            print(check.table_head())
        rows += line
        if not as_json:
            print(check.table_line(line), flush=True)
    ok = all(row.ok for row in rows)
    if as_json:
        print(json.dumps({"ok": ok, "rows": [row.to_dict() for row in rows]}))
    else:
        for row in (row for row in rows if not row.ok):
            print(f"{row.family}, {row.path}: {row.max_abs_diff:.3e} is above {row.tolerance:.3e}")
        if (note := check.blank_note(rows)) is not None:
            print(note)
        print(f"{len(rows)} checks, {sum(not row.ok for row in rows) or 'none'} above tolerance")
    if not ok:
        raise SystemExit(1)


def check_model_at(place: str, device: str) -> "Iterator[Row]":
    """The table of one model."""
    import torch

    from clearhead.published.selfcheck import check_model, open_theirs
    from clearhead.training.machine import find_device

    model, _ = open_model(place, "cpu", dtype=torch.float32)
    theirs = open_theirs(Path(place), model) if Path(place).is_dir() else None
    return check_model(Path(place).name, model, theirs, device=find_device(device))


def embed(
    place: Positional[str],
    texts: Positional[tuple[str, ...]] = ("-",),
    search: Path | None = None,
    kind: Kind = "cosine",
    top_k: int | None = None,
    pool: Literal["mean", "first", "last"] | None = None,
    normalise: bool | None = None,
    device: str = "auto",
    download: bool = False,
    as_json: Json = False,
) -> None:
    """Vectors of texts: how alike they are, or which lines of a file are nearest to them.

    Args:
        place: a run, a published model, a GGUF file, or a name with --download.
        texts: the texts; - reads them from standard input, one a line.
        search: a text file; each text is answered with its nearest lines.
        kind: cosine, dot, euclidean, manhattan or chebyshev.
        top_k: how many lines of the file; by default 10.
        pool: what stands for a text: the mean of its tokens, the first, the last; by default as published.
        normalise: give the vectors length 1; by default as published.
        device: auto, cpu or cuda.
        download: fetch the model by its name.
        as_json: print one JSON object, with the vectors.
    """
    from clearhead.published import similarity

    if top_k is not None and search is None:
        raise ValueError(f"--top-k {top_k} is for --search, which answers with lines of a file")
    lines = [] if search is None else lines_of(search)
    given = read_texts(texts)
    model, tokenizer = open_speaker(place, device, download)
    options: dict[str, Any] = {"pool": pool, "normalise": normalise}
    vectors = similarity.embed(model, tokenizer, given, **options)
    if search is not None:
        table = similarity.embed(model, tokenizer, lines, **options)
        most = 10 if top_k is None else top_k
        answers = [similarity.nearest(vector, table, kind=kind, top_k=most) for vector in vectors]
        named = [[(lines[row], value) for row, value in found] for found in answers]
        show_answers(given, named, kind, as_json)
        return
    values = similarity.similarity(vectors, vectors, kind).tolist()
    if as_json:
        print(json.dumps({"texts": given, "vectors": vectors.tolist(), "kind": kind, "similarity": values}))
    elif len(given) == 1:
        print(" ".join(f"{number:.6g}" for number in vectors[0].tolist()))
    else:
        for number, (text, row) in enumerate(zip(given, values, strict=True), 1):
            print(" ".join(f"{value:8.4f}" for value in row) + f"  {number} {text}")


def show_answers(asked: list[str], answers: list[list[tuple[str, float]]], kind: str, as_json: bool) -> None:
    """Print what was found for each question."""
    if as_json:
        found = [
            {"query": query, "found": [{"text": text, "value": value} for text, value in answer]}
            for query, answer in zip(asked, answers, strict=True)
        ]
        print(json.dumps({"kind": kind, "answers": found}))
        return
    for query, answer in zip(asked, answers, strict=True):
        if len(asked) > 1:
            print(f"{query}:")
        for text, value in answer:
            print(f"{value:8.4f}  {text}")


def neighbours(
    place: Positional[str],
    words: Positional[str],
    kind: Kind = "cosine",
    top_k: int = 10,
    download: bool = False,
    as_json: Json = False,
) -> None:
    """The tokens nearest to a word in a model's embedding, or to a sum such as "king - man + woman".

    Args:
        place: a run, a published model, a GGUF file, or a name with --download.
        words: a word, or words with + and - between them.
        kind: cosine, dot, euclidean, manhattan or chebyshev.
        top_k: how many tokens.
        download: fetch the model by its name.
        as_json: print one JSON object.
    """
    from clearhead.published import similarity

    model, tokenizer = open_speaker(place, "cpu", download)
    found = similarity.neighbours(model, tokenizer, words, kind=kind, top_k=top_k)
    show_answers([words], [found], kind, as_json)


def chat(
    place: Positional[str],
    system: str | None = None,
    max_new_tokens: int | None = None,
    temperature: float = 0.7,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
    device: str = "auto",
    download: bool = False,
) -> None:
    """Talk with a chat model; it answers each line as it comes. An empty line or Ctrl-D ends.

    Args:
        place: a published model, a GGUF file, or a name with --download.
        system: what the model is told before all else.
        max_new_tokens: how long an answer may be; by default 512, or half of what the model has room for.
        temperature: 0 takes the likeliest token; higher is more varied.
        top_k: draw from the k likeliest tokens; 0: all.
        top_p: draw from the likeliest tokens that together have this probability.
        seed: makes the draws repeatable.
        device: auto, cpu or cuda.
        download: fetch the model by its name.
    """
    from clearhead.generation.conversation import Conversation

    model, tokenizer = open_speaker(place, device, download)
    talk = Conversation(model, tokenizer, system)
    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    longest = min(512, model.config.max_len // 2) if max_new_tokens is None else max_new_tokens
    forgotten = 0
    for line in read_lines():
        for piece in talk.say(line, max_new_tokens=longest, **options):
            print(piece, end="", flush=True)
        print()
        if talk.forgotten > forgotten:
            forgotten = talk.forgotten
            print(f"note: {forgotten} messages no longer fit and are forgotten", file=sys.stderr)


def read_lines() -> Iterator[str]:
    """Lines of standard input up to an empty one, with a prompt where a person types."""
    person = sys.stdin.isatty()
    while True:
        if person:
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line.strip():
            return
        yield line.strip()


def read_texts(texts: Sequence[str]) -> list[str]:
    """The texts of a command line; - stands for the lines of standard input."""
    from clearhead.cli_text import text_or_stdin

    if list(texts) != ["-"]:
        return list(texts)
    lines = [line for line in text_or_stdin("-").splitlines() if line.strip()]
    if not lines:
        raise ValueError("standard input has no lines of text")
    return lines


def lines_of(file: Path) -> list[str]:
    """The lines of a text file that are not blank; ValueError if there are none."""
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is not UTF-8: byte 0x{error.object[error.start]:02x} at {error.start}"
        ) from None
    if not lines:
        raise ValueError(f"{file} has no lines of text")
    return lines


def look(
    place: Positional[str],
    text: str | None = None,
    compare: str | None = None,
    source: str | None = None,
    port: int | None = None,
    host: str = "127.0.0.1",
    key: str | None = None,
    open: bool = False,
    device: str = "cpu",
    download: bool = False,
) -> None:
    """Serve a page that shows every number of a model, live, while you type. Ctrl-C ends.

    Args:
        place: a run, a published model, a GGUF file, or a name with --download.
        text: what the page opens with.
        compare: a second model, a run or a published one, to lay beside the first: key c shows what differs.
        source: what an encoder-decoder reads at first.
        port: where to listen; by default 8765, or a free port if that one is taken.
        host: the address to listen at; one that others reach needs a key.
        key: what everybody who opens the page must know.
        open: open the page in a browser.
        device: cpu or cuda.
        download: fetch the model by its name.
    """
    import webbrowser

    from clearhead.server.look import check_place, free_port, prepare

    check_place(host, key)
    port = free_port(host) if port is None else port
    run = open_run(place, device)
    model, tokenizer = open_model(place, device, download) if run is None else (run.model, run.tokenizer)
    text = run.text() if run is not None and text is None else text
    name = name_at(place)
    beside = None if compare is None else open_beside(compare, device, download)
    options = {"source": source, "host": host, "port": port, "key": key, "place": absolute(place)}
    seen = prepare(model, tokenizer, text, name=name, run=run, beside=beside, **options)
    print(f"{name} is at {seen.url}{'' if key is None else '?key=...'} (Ctrl-C ends)", flush=True)
    if open:
        webbrowser.open(seen.url if key is None else f"{seen.url}?key={key}")
    with contextlib.suppress(KeyboardInterrupt):
        seen.run()


def name_at(place: str) -> str:
    """How a model is called: by the last part of its folder, or as it is called on the Hub."""
    return Path(place).resolve().name if Path(place).exists() else place


def absolute(place: str) -> str:
    """The place of a model, from wherever it is opened again; a name on the Hub as it is."""
    return str(Path(place).resolve()) if Path(place).exists() else place


def open_beside(place: str, device: str, download: bool) -> "Given":
    """The model at a place, to be compared with another."""
    from clearhead.server.sides import Given

    run = open_run(place, device)
    model, tokenizer = open_model(place, device, download) if run is None else (run.model, run.tokenizer)
    return Given(model, tokenizer, name_at(place), run, absolute(place))


def export(
    place: Positional[str],
    out: Positional[Path],
    dtype: Literal["float32", "float16", "bfloat16"] | None = None,
    download: bool = False,
) -> None:
    """Write a model as a folder that transformers and clearhead read: weights, config.json, tokenizer.json.

    Args:
        place: a run, a published model, a GGUF file, or a name with --download.
        out: the folder to write.
        dtype: the type of the weights; by default as they are.
        download: fetch the model by its name.
    """
    import torch

    from clearhead.published.models import save
    from clearhead.training.run_folder import RunFolder

    if out.resolve() == Path(place).resolve():
        raise ValueError(f"{out} is the model itself; choose another folder")
    check_empty(out)
    model, tokenizer = open_model(place, "cpu", download, None if dtype is None else getattr(torch, dtype))
    run = RunFolder(place)
    save(model, tokenizer, out, settings=run.published_settings() if run.exists() else None)
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    names = ", ".join(sorted(file.name for file in out.iterdir()))
    print(f"{size / 1e6:.1f} MB of weights; {names} -> {out}")


def check_empty(out: Path) -> None:
    """OSError where no new folder can be written: told before the work, not after it."""
    from clearhead.cli_text import make_room

    if out.is_dir() and any(out.iterdir()):
        raise FileExistsError(f"{out} is a folder with something in it; choose a new one, or empty it")
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"{out} is a file; choose another place for the folder")
    with make_room(out.parent):
        pass  # it can be written to


def import_model(
    place: Positional[str],
    out: Positional[Path],
    dtype: Literal["float32", "float16", "bfloat16"] | None = None,
    download: bool = False,
) -> None:
    """Read a model from elsewhere, GGUF, .bin or a name to download, and write it as a folder.

    Args:
        place: a published model, a GGUF file, or a name with --download.
        out: the folder to write.
        dtype: the type of the weights; by default as they are, of a GGUF file float32.
        download: fetch the model by its name.
    """
    export(place, out, dtype, download)


VERBS: dict[str, Callable[..., None]] = {
    "look": look,
    "chat": chat,
    "embed": embed,
    "neighbours": neighbours,
    "import": import_model,
    "export": export,
    "selfcheck": selfcheck,
}

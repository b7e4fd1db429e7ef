"""clearhead <verb>: the command line. Every flag comes from a dataclass or a function's signature (tyro).

A user's mistake is one line on stderr and exit code 2; Ctrl-C ends with 130 and, while training, after
saving. Modules with torch are imported inside the verbs, so that `--help` answers at once.
"""

import contextlib
import copy
import functools
import inspect
import io
import itertools
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

from tyro.conf import AvoidSubcommands, DisallowNone, Positional, arg

from clearhead import cli_runs, cli_sweep
from clearhead.cli_flags import parse
from clearhead.cli_models import VERBS as MODEL_VERBS
from clearhead.cli_models import check_place, open_model, open_speaker
from clearhead.cli_tasks import VERBS as TASK_VERBS
from clearhead.training.recipe import Recipe, find_recipe, load_recipe

if TYPE_CHECKING:
    from clearhead.text.foreign import AnyTokenizer

Specials = tuple[str, ...]

END_OF_TEXT = "<|endoftext|>"


def tokenizer_train(
    source: Positional[str],
    out: Positional[Path],
    vocab_size: int = 4096,
    splitter: str = "gpt2",
    special_tokens: Specials = (END_OF_TEXT,),
    alphabet: str = "bytes",
    field: str = "text",
    document_separator: str | None = None,
    workers: int | None = None,
    strict: bool = False,
) -> None:
    """Learn a BPE vocabulary from text and write it as tokenizer.json.

    Args:
        source: a file, folder or glob, or a built-in corpus: python, pydoc.
        out: the folder or .json file to write.
        vocab_size: tokens in all: 256 bytes, merges and special tokens.
        splitter: how text is cut before merging: gpt2, cl100k, o200k, llama3, qwen2, smollm, none.
        special_tokens: tokens that are never split or merged.
        alphabet: start from bytes, or from the corpus's characters.
        field: the field that holds the text, in .jsonl and .parquet.
        document_separator: text that divides a file into documents.
        workers: processes that count; by default what the size of the text deserves.
        strict: stop at the first broken piece of text.
    """
    from clearhead.text.bpe import train_bpe
    from clearhead.text.corpus import open_corpus
    from clearhead.text.tokenizer import Tokenizer
    from clearhead.training.report import Terminal

    room = make_room(out.parent if out.suffix in (".json", ".tiktoken", ".txt") else out)
    with room, contextlib.closing(Terminal()) as terminal:
        corpus = open_corpus(source, field=field, document_separator=document_separator, strict=strict)
        progress = terminal.on_progress
        vocab, merges = train_bpe(corpus, vocab_size, special_tokens, splitter, alphabet, workers, progress)
    tokenizer = Tokenizer(vocab, merges, special_tokens, splitter)
    path = tokenizer.save(out)
    say(corpus.report.summary())
    say(f"{tokenizer.vocab_size} tokens ({len(merges)} merges) -> {path}")


def tokenizer_encode(
    tokenizer: Positional[Path], text: Positional[str] = "-", specials: str = "token"
) -> None:
    """Text to token ids.

    Args:
        tokenizer: tokenizer.json, vocab.json, a .tiktoken file, or a folder with one.
        text: the text; - reads standard input.
        specials: what a special token's text in the input becomes: token, text or error.
    """
    loaded = open_tokenizer(tokenizer)
    print(" ".join(map(str, loaded.encode(text_or_stdin(text), specials=specials))))


def tokenizer_decode(tokenizer: Positional[Path], ids: Positional[tuple[str, ...]] = ("-",)) -> None:
    """Token ids to text, byte for byte.

    Args:
        tokenizer: tokenizer.json, vocab.json, a .tiktoken file, or a folder with one.
        ids: the token ids; - reads them from standard input.
    """
    loaded = open_tokenizer(tokenizer)
    words = text_or_stdin("-").split() if ids == ("-",) else ids
    for word in words:
        if not word.isdecimal():
            raise ValueError(f"{word!r} is not a token id; ids are numbers from 0 to {loaded.vocab_size - 1}")
    sys.stdout.buffer.write(loaded.decode_bytes(map(int, words)))
    if sys.stdout.isatty():
        print()


def tokenizer_show(tokenizer: Positional[Path], text: Positional[str] = "") -> None:
    """What is in a tokenizer and, with a text, how it is cut: each token's id, bytes and text.

    Args:
        tokenizer: tokenizer.json, vocab.json, a .tiktoken file, or a folder with one.
        text: a text to cut.
    """
    loaded = open_tokenizer(tokenizer)
    specials = ", ".join(f"{text}={number}" for text, number in loaded.special_tokens.items()) or "none"
    say(f"{loaded.vocab_size} tokens, splitter {loaded.splitter}, special tokens {specials}")
    if not text:
        return
    ids = loaded.encode(text)
    for token in ids:
        piece = loaded.token_bytes(token)
        print(f"{token:>7}  {piece.hex(' '):<36}  {piece.decode('utf-8', 'backslashreplace')!r}")
    say(f"{len(ids)} tokens, {loaded.compression(text):.2f} bytes per token")


def prepare(
    source: Positional[str],
    out: Positional[Path],
    tokenizer: Path,
    field: str = "text",
    document_separator: str | None = None,
    workers: int | None = None,
    strict: bool = False,
    validation: str | None = None,
) -> None:
    """Turn text into shards of token ids on disk, split into train and validation.

    A run that was killed continues where it stopped.

    Args:
        source: a file, folder or glob, or a built-in corpus: python, pydoc.
        out: the folder to write.
        tokenizer: the tokenizer to use.
        field: the field that holds the text, in .jsonl and .parquet.
        document_separator: text that divides a file into documents.
        workers: processes that encode.
        strict: stop at the first broken piece of text.
        validation: text of its own to measure on; by default one document in twenty, chosen by its content.
    """
    from clearhead.text.documents import CorpusReport
    from clearhead.text.prepare import prepare as prepare_shards
    from clearhead.training.report import Terminal

    with contextlib.closing(Terminal()) as terminal:
        index = prepare_shards(
            source,
            open_tokenizer(tokenizer),
            out,
            validation=validation,
            field=field,
            document_separator=document_separator,
            workers=workers,
            strict=strict,
            progress=functools.partial(terminal.on_progress, "encode"),
        )
    say(CorpusReport(**index["report"]).summary())
    for split in ("train", "validation"):
        part = index[split]
        say(f"{split}: {part['documents']} documents, {part['text_bytes']} bytes, {part['tokens']} tokens")
    say(f"-> {out}")


@dataclass(frozen=True)
class TrainCommand:
    """Train a model by a recipe; every setting of the recipe is a flag, too."""

    recipe: Positional[str]  # a TOML file, or the name of one that comes with clearhead
    settings: Annotated[Recipe, arg(name="")] = field(default_factory=Recipe)
    run: Path | None = None  # the run's folder; by default runs/ and the recipe's name
    resume: bool = False  # go on from the newest checkpoint
    stop_after: int | None = None  # save and stop after this many steps in all
    tensorboard: bool = False  # also log for TensorBoard
    dry_run: bool = False  # only say what it needs: parameters, memory, arithmetic, time


def train(argv: Sequence[str]) -> None:
    """Train a model by a recipe, or go on with a run that was stopped."""
    command = read_train(argv)
    run = command.run or Path("runs") / Path(command.recipe).stem
    if command.dry_run:
        foresee(command, run)
    else:
        train_recipe(command.settings, run, command.resume, command.stop_after, command.tensorboard)


def read_train(argv: Sequence[str]) -> TrainCommand:
    """The recipe and its flags."""
    options: dict[str, Any] = {
        "config": (AvoidSubcommands,)
    }  # experts and the like only if the recipe has some
    if argv and not argv[0].startswith("-"):  # the recipe's values become the defaults of the flags
        options["default"] = TrainCommand(argv[0], flags_start(load_recipe(find_recipe(argv[0])), argv))
    elif not {"-h", "--help"} & set(argv):
        raise ValueError("name the recipe first, as in: clearhead train demo --train.minutes 10")
    return parse(TrainCommand, argv, prog="clearhead train", **options)


def launch(argv: Sequence[str]) -> None:
    """Start `train` in several processes, on one machine or many."""
    cli_runs.launch(argv, parse)


def sweep(argv: Sequence[str]) -> None:
    """Train every combination of some settings, one run after the other, with a table at the end."""
    cli_sweep.sweep(argv, read_train, say)


def foresee(command: TrainCommand, run: Path) -> None:
    """Say what a run needs, and start nothing."""
    from clearhead.training.dry_run import dry_run
    from clearhead.training.run_folder import RunFolder

    given = {"resume": command.resume, "stop_after": command.stop_after, "tensorboard": command.tensorboard}
    for name, value in given.items():
        if value:
            raise ValueError(f"{name}={value} has no effect with --dry-run; leave one of them away")
    for line in dry_run(command.settings, RunFolder(run)).lines():
        print(line)


def flags_start(recipe: Recipe, argv: Sequence[str]) -> Recipe:
    """The recipe as the flags' defaults: open where a flag for one thing decides another.

    A budget among the flags takes the place of the recipe's. Sizes that follow from others are None again, so
    that `--model.d-model 512` brings its own d_head and d_ff along; the flags' parser fills them in.
    """
    if any(re.match(r"--train\.(steps|tokens|minutes)\b", word) for word in argv):
        recipe = replace(recipe, train=replace(recipe.train, steps=None, tokens=None, minutes=None))
    model = copy.copy(recipe.model)
    for name in model.following():
        object.__setattr__(model, name, None)  # it is frozen, but nobody has seen this copy yet
    return replace(recipe, model=model)


def train_recipe(recipe: Recipe, run: Path, resume: bool, stop_after: int | None, tensorboard: bool) -> None:
    """Train with the terminal's watchers; Ctrl-C says how to go on."""
    from clearhead.training import loop, report

    is_main = os.environ.get("RANK", "0") == "0"  # of several processes one speaks
    watchers = [report.JsonLines(), report.Terminal(), report.Samples(), report.Curve()]
    if tensorboard:
        watchers.append(report.TensorBoard())
    try:
        done = loop.train(recipe, run, resume=resume, stop_after=stop_after, watchers=watchers)
    except loop.Interrupted as interrupted:
        if is_main:
            say(f"{interrupted}; saved in {run}; go on with the same command and --resume")
        raise SystemExit(130) from None
    if is_main:
        say(f"model in {done.checkpoints}, curve in {done.curve_file}, log in {done.metrics_file}")


def generate(
    run: Positional[Path],
    prompt: Positional[str],
    max_new_tokens: int | None = None,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    stop: tuple[str, ...] = (),
    overflow: Literal["error", "slide"] = "error",
    device: str = "auto",
    download: bool = False,
) -> None:
    """Let a model continue a text, or answer it, as it comes.

    Args:
        run: a run, a published model, a GGUF file, or a name with --download.
        prompt: the text to continue, or to translate and the like; - reads standard input.
        max_new_tokens: how many tokens to add at most; by default 128, or what the model has room for.
        temperature: 0 takes the likeliest token; higher is more varied.
        top_k: draw from the k likeliest tokens; 0: all.
        top_p: draw from the likeliest tokens that together have this probability.
        min_p: leave out tokens less likely than this share of the likeliest.
        repetition_penalty: above 1 makes tokens that were seen less likely.
        seed: makes the draw repeatable.
        stop: texts that end the answer.
        overflow: what to do beyond the model's max_len: error, or slide, which forgets the oldest tokens.
        device: auto, cpu or cuda.
        download: fetch the model by its name.
    """
    from clearhead.generation.decode import stream
    from clearhead.generation.special_ids import published_ids

    model, tokenizer = open_speaker(run, device, download)
    if model.config.shape == "encoder-decoder" and published_ids(model).start is None:
        raise ValueError(f"{run} learned to answer a whole text with another; use clearhead translate")
    text = text_or_stdin(prompt)
    if max_new_tokens is None:
        before = len(tokenizer.encode_sentence(text)) if model.config.shape == "decoder" else 1
        room = model.config.max_len - before
        max_new_tokens = 128 if overflow == "slide" else max(1, min(128, room))
    pieces = stream(
        model,
        text,
        tokenizer=tokenizer,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop,
        overflow=overflow,
    )
    said = [text] if model.config.shape == "decoder" else []  # an encoder-decoder answers, and does not go on
    for piece in itertools.chain(said, pieces):
        print(piece, end="", flush=True)
    print()


def evaluate(
    run: Positional[Path],
    data: Path | None = None,
    split: Literal["train", "validation"] = "validation",
    stride: int | None = None,
    device: str = "auto",
    as_json: Annotated[bool, arg(name="json")] = False,
) -> None:
    """What a trained model is worth on text it has not seen: loss, bits per byte, accuracy, BLEU, ...

    Args:
        run: the folder of a run.
        data: a folder written by `clearhead prepare` with the same tokenizer; by default the run's own.
        split: train or validation.
        stride: tokens between two windows; less than the context gives every token more to look at.
        device: auto, cpu or cuda.
        as_json: print one JSON object.
    """
    from clearhead.text.shards import Shards
    from clearhead.training.data import data_folder
    from clearhead.training.evaluate import evaluate as measure
    from clearhead.training.machine import find_device
    from clearhead.training.run_folder import RunFolder, load_run
    from clearhead.training.tasks import make_task

    model, tokenizer = load_run(run, find_device(device))
    recipe = RunFolder(run).recipe()
    if recipe.train.objective != "next_token" or recipe.data.form != "text":
        for flag, value in (("data", data), ("stride", stride), ("split", split.replace("validation", ""))):
            if value:
                raise ValueError(f"--{flag} {value} is for models of running text, and {run} is none")
        task, _ = make_task(recipe, RunFolder(run), note=lambda text: None)
        measures = task.evaluate(model, whole=True)
        lines = [f"{name.replace('_', ' '):<16}{value:.4f}" for name, value in measures.items()]
        print(json.dumps(measures) if as_json else "\n".join(lines))
        return
    folder = (data or data_folder(recipe.data, RunFolder(run))) / split
    shards = Shards(folder, tokenizer_fingerprint=tokenizer.fingerprint)
    context = recipe.train.context_length
    result = measure(
        model,
        shards,
        context_length=context,
        stride=stride,
        document_mask=recipe.train.document_mask,
    )
    if as_json:
        print(json.dumps(vars(result)))
        return
    say(f"{result.n_tokens} tokens of {folder}, windows of {context}, stride {stride or context}")
    say(f"loss            {result.loss:.4f} nats per token")
    say(f"perplexity      {result.perplexity:.3f}")
    say(f"bits per byte   {result.bits_per_byte:.4f}")


def demo(run: Path = Path("runs/demo"), minutes: float | None = None, resume: bool = False) -> None:
    """Learn a vocabulary, train a small decoder on Python's own source code, let it write a function.

    Args:
        run: the folder to leave the model in.
        minutes: how long to train, instead of the recipe's budget.
        resume: go on from the newest checkpoint.
    """
    from clearhead.training.demo import run_demo

    recipe = load_recipe(find_recipe("demo"))
    if minutes is not None:
        recipe = replace(recipe, train=replace(recipe.train, steps=None, tokens=None, minutes=minutes))
    train_recipe(recipe, run, resume, stop_after=None, tensorboard=False)
    run_demo(run, say)


def show(
    what: Positional[str],
    as_json: Annotated[bool, arg(name="json")] = False,
) -> None:
    """A model's parts and sizes: parameters, shapes, memory, arithmetic per token.

    Args:
        what: the folder of a run, a published model, a GGUF file, a recipe, or a model.json.
        as_json: print one JSON object.
    """
    from rich.console import Console

    from clearhead.model.summary import size_lines, summarise, table
    from clearhead.training.run_folder import find_config

    place = Path(what)
    published = place.suffix == ".gguf" or (place / "config.json").is_file()
    config = open_model(what, "cpu")[0].config if published else find_config(what)
    summary = summarise(config)
    if as_json:
        print(json.dumps(asdict(summary)))
        return
    Console().print(table(summary))
    for line in size_lines(summary):
        say(line)


VERBS: dict[str, Callable[..., None]] = {
    "tokenizer train": tokenizer_train,
    "tokenizer encode": tokenizer_encode,
    "tokenizer decode": tokenizer_decode,
    "tokenizer show": tokenizer_show,
    "prepare": prepare,
    "train": train,
    "sweep": sweep,
    "generate": generate,
    "evaluate": evaluate,
    "demo": demo,
    "show": show,
    "launch": launch,
    "verify": cli_runs.verify,
    **TASK_VERBS,
    **MODEL_VERBS,
}


HELP = {"-h", "--help", "help"}
HINTS = {
    FileExistsError: "; choose a path where no file is in the way",
    NotADirectoryError: "; a part of this path is a file",
    IsADirectoryError: "; name a file in it",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command line; the entry point of `clearhead`."""
    words = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    warnings.showwarning = lambda message, *args, **kwargs: print(f"note: {message}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that a terminal cannot show ends nothing
            stream.reconfigure(errors="backslashreplace")
    try:
        run_verb(words)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has gone, as in `| head`: nobody is left to tell
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except (ValueError, KeyError, OSError) as error:
        fail(describe(error))
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "memory" not in str(error):
            raise
        reason = re.sub(r"^\[.*?\] err == 0\. ", "", str(error)).partition("\n")[0]
        advice = (
            "make the model, train.context_length or train.batch_size smaller; a larger train.accumulation "
            "makes up for the last"
        )
        fail(f"not enough memory: {reason}; {advice}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None


def run_verb(words: list[str]) -> None:
    """Find the verb, parse its flags, call it."""
    for n_words in (2, 1):
        verb = " ".join(words[:n_words])
        if verb in VERBS:
            rest = words[n_words:]
            if verb in ("train", "sweep", "launch"):  # their flags are those of a recipe
                VERBS[verb](rest)
            else:
                parse(later(VERBS[verb]), rest, prog=f"clearhead {verb}", config=(DisallowNone,))()
            return
    if words[:1] == ["help"] and words[1:]:
        run_verb([*words[1:], "--help"])
    elif not words or words[0] in HELP or set(words[1:2]) & HELP:
        print(overview())
    elif words[0] == "--version":
        from clearhead import __version__

        print(f"clearhead {__version__}")
    else:
        near = get_close_matches(words[0], VERBS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"unknown command {' '.join(words[:2])!r}; {hint}choose one of {', '.join(VERBS)}")


def overview() -> str:
    """The help of `clearhead` itself."""
    width = max(map(len, VERBS))
    rows = "\n".join(
        f"  {verb:<{width}}  {(function.__doc__ or '').splitlines()[0]}" for verb, function in VERBS.items()
    )
    return (
        "usage: clearhead <command> ...\n\n"
        "A Transformer you can see through: text -> tokens -> model -> training -> generation.\n\n"
        f"{rows}\n\nclearhead <command> --help tells a command's flags."
    )


def later(function: Callable[..., None]) -> Callable[..., Callable[[], None]]:
    """The same signature and help, but the call is returned instead of made.

    A model that is not there is told before the verb loads torch.
    """

    @functools.wraps(function)
    def bound(*args: Any, **kwargs: Any) -> Callable[[], None]:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
        if "download" in given and isinstance(place := next(iter(given.values())), str | Path):
            check_place(place, given["download"])
        return functools.partial(function, *args, **kwargs)

    return bound


def describe(error: Exception) -> str:
    """What an error says, without Python's quotes and numbers.

    >>> describe(KeyError("no such token")), describe(FileNotFoundError(2, "No such file", "a.txt"))
    ('no such token', 'a.txt: no such file')
    """
    if isinstance(error, KeyError) and error.args:
        return str(error.args[0])
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    if error.filename is None:
        return error.strerror
    reason = error.strerror[:1].lower() + error.strerror[1:]
    return f"{error.filename}: {reason}{HINTS.get(type(error), '')}"


def fail(message: str) -> NoReturn:
    """One line on stderr, exit code 2."""
    print(f"clearhead: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2) from None


@contextlib.contextmanager
def make_room(folder: Path) -> Iterator[None]:
    """Make the folder to write to: where nobody can write is told before the work, not after it. A folder
    that stays empty because of an error is gone again.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} is not yours to write to; choose another folder")
        yield
    except Exception:
        with contextlib.suppress(OSError):
            for path in missing:
                path.rmdir()
        raise


def open_tokenizer(path: Path) -> "AnyTokenizer":
    """The tokenizer in this file or folder."""
    from clearhead.text.foreign import open_tokenizer

    return open_tokenizer(path)


def text_or_stdin(text: str) -> str:
    """The text itself; - reads standard input. Text that is no UTF-8 is a ValueError, not guessed at."""
    where = "standard input" if text == "-" else "the text"
    data = sys.stdin.buffer.read() if text == "-" else os.fsencode(text)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}"
        ) from None


def say(text: str) -> None:
    """Print a line for people."""
    print(text)


if __name__ == "__main__":
    main()

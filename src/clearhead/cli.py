"""clearhead <verb>: the command line. Every flag comes from a dataclass or a function's signature (tyro).

A user's mistake is one line on stderr and exit code 2; Ctrl-C ends with 130 and, while training, after
saving. Modules with torch are imported inside the verbs, so that `--help` answers at once.
"""

import contextlib
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
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from tyro.conf import DisallowNone, Positional, arg

from clearhead import cli_runs
from clearhead.cli_flags import parse
from clearhead.cli_models import VERBS as MODEL_VERBS
from clearhead.cli_models import check_place, open_model, open_speaker
from clearhead.cli_tasks import VERBS as TASK_VERBS
from clearhead.cli_text import VERBS as TEXT_VERBS
from clearhead.cli_text import say, text_or_stdin
from clearhead.cli_train import VERBS as TRAIN_VERBS
from clearhead.cli_train import train_recipe
from clearhead.training.recipe import find_recipe, load_recipe


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
    from clearhead.training.data import open_split
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
    if data is None:
        shards = open_split(recipe.data, RunFolder(run), tokenizer, split)
    else:
        shards = Shards(data / split, tokenizer_fingerprint=tokenizer.fingerprint)
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
    say(f"{result.n_tokens} tokens of {shards.folder}, windows of {context}, stride {stride or context}")
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
    **TEXT_VERBS,
    "train": TRAIN_VERBS["train"],
    "sweep": TRAIN_VERBS["sweep"],
    "generate": generate,
    "evaluate": evaluate,
    "demo": demo,
    "show": show,
    "launch": TRAIN_VERBS["launch"],
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
        fail(describe(error), not isinstance(error, OSError) or type(error) in {FileNotFoundError, *HINTS})
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "memory" not in str(error):
            raise
        reason = re.sub(r"^\[.*?\] err == 0\. ", "", str(error)).partition("\n")[0]
        advice = (
            "make the model, train.context_length or train.batch_size smaller; a larger train.accumulation "
            "makes up for the last"
        )
        fail(f"not enough memory: {reason}; {advice}", mistake=False)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":  # of several processes one speaks
            print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None


def run_verb(words: list[str]) -> None:
    """Find the verb, parse its flags, call it."""
    for n_words in (2, 1):
        verb = " ".join(words[:n_words])
        if verb in VERBS:
            rest = words[n_words:]
            if verb in TRAIN_VERBS:  # their flags are those of a recipe
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


def fail(message: str, mistake: bool = True) -> NoReturn:
    """One line on stderr, exit code 2. `mistake`: ranks that are started anew would end alike."""
    line = f"clearhead: {' '.join(message.split())}"
    if not cli_runs.tell_launcher(line, mistake):
        print(line, file=sys.stderr)
    raise SystemExit(2) from None


if __name__ == "__main__":
    main()

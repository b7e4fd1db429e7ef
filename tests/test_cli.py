"""The command line: every verb does its work on a small corpus, can be stopped, piped, asked for help."""

import inspect
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

import clearhead
from clearhead import cli
from clearhead.cli import VERBS, main
from clearhead.cli_runs import Launch
from clearhead.cli_train import TrainCommand, flags_start
from clearhead.model.config import ModelConfig
from clearhead.model.transformer import Transformer
from clearhead.training.checkpoint import checkpoints
from clearhead.training.recipe import DataConfig, TrainConfig
from clearhead.training.report import TIMINGS, read_metrics
from clearhead.training.run_folder import RunFolder
from tiny_run import tiny_recipe, write_corpus, write_recipe

RUN_FILES = {"recipe.toml", "model.json", "tokenizer.json", "budget.json", "metrics.jsonl", "loss.png"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with corpus/ and recipe.toml in which the first verbs have been run, one after the other."""
    folder = tmp_path_factory.mktemp("home")
    write_corpus(folder / "corpus")
    write_recipe(folder / "recipe.toml", tiny_recipe("corpus", sample_every=5, sample_tokens=8))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        main(shlex.split("tokenizer train corpus vocab --vocab-size 280"))
        main(shlex.split("train recipe.toml --run run"))
        main(shlex.split("prepare corpus data --tokenizer run"))
    return folder


@pytest.fixture
def clear(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Run a command line at home; return what it wrote to stdout."""
    monkeypatch.chdir(home)

    def run(command: str, stdin: str = "") -> str:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        capsys.readouterr()
        main(shlex.split(command))
        return capsys.readouterr().out

    return run


def start(command: str) -> subprocess.Popen[bytes]:
    """Start a command line as a process of its own."""
    words = [sys.executable, "-m", "clearhead.cli", *shlex.split(command)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)


def weights(run: Path) -> bytes:
    return (checkpoints(run)[0] / "model.safetensors").read_bytes()


# ---------------------------------------------------------------- the verbs


def test_tokenizer_train_writes_what_show_shows(clear: Callable[..., str]) -> None:
    said = clear("tokenizer train corpus again --vocab-size 280")
    assert "60 documents" in said
    assert "280 tokens (23 merges) -> again/tokenizer.json" in said
    assert Path("again/tokenizer.json").read_bytes() == Path("vocab/tokenizer.json").read_bytes()
    shown = clear("tokenizer show again 'the cat'").splitlines()
    assert shown[0] == "280 tokens, splitter gpt2, special tokens <|endoftext|>=279"
    assert shown[-1].endswith("bytes per token")
    pieces = [bytes.fromhex(line[9:45]) for line in shown[1:-1]]
    assert b"".join(pieces) == b"the cat"


@pytest.mark.parametrize("text", ["the old cat", "naïve 猫 🐈\n", "", "two\nlines, no end", "\x00\r\n\ufffd"])
def test_encode_and_decode_through_pipes(clear: Callable[..., str], text: str) -> None:
    """What stdin gives to encode, its output gives back through decode, byte for byte."""
    ids = clear("tokenizer encode vocab", stdin=text)
    assert clear("tokenizer decode vocab", stdin=ids).encode() == text.encode()


def test_encode_and_decode_arguments(clear: Callable[..., str]) -> None:
    ids = clear("tokenizer encode vocab 'the cat<|endoftext|>'").split()
    assert ids[-1] == "279"
    assert clear(f"tokenizer decode vocab {' '.join(ids)}") == "the cat<|endoftext|>"
    plain = clear("tokenizer encode vocab 'the cat<|endoftext|>' --specials text").split()
    assert "279" not in plain
    assert clear(f"tokenizer decode vocab {' '.join(plain)}") == "the cat<|endoftext|>"


def test_prepare_says_what_it_made(clear: Callable[..., str]) -> None:
    said = clear("prepare corpus data --tokenizer run")  # again: nothing to do
    assert re.search(r"train: \d+ documents, \d+ bytes, \d+ tokens", said)
    assert said.endswith("-> data\n")


def test_train_leaves_a_whole_run(home: Path) -> None:
    """Recipe, config, tokenizer, log, curve, samples and checkpoints are there."""
    run = RunFolder(home / "run")
    assert {file.name for file in run.path.iterdir()} >= RUN_FILES
    assert run.recipe().train.steps == 10
    assert [path.name for path in checkpoints(run.path)] == ["step-00000010", "step-00000005"]
    entries = read_metrics(run.metrics_file)
    assert [entry["step"] for entry in entries if "loss" in entry] == list(range(10))
    assert [entry["step"] for entry in entries if "bits_per_byte" in entry] == [4, 9]
    assert re.findall(r"^--- step \d+$", run.samples_file.read_text(), re.MULTILINE) == [
        "--- step 5",
        "--- step 10",
    ]


def test_stop_after_then_resume_ends_with_the_same_bits(clear: Callable[..., str], home: Path) -> None:
    clear("train recipe.toml --run halves --stop-after 3")
    assert checkpoints("halves")[0].name == "step-00000003"
    clear("train recipe.toml --run halves --resume")
    assert weights(home / "halves") == weights(home / "run")
    assert (home / "halves/samples.txt").read_text() == (home / "run/samples.txt").read_text()


def test_train_on_prepared_data(clear: Callable[..., str], home: Path) -> None:
    """A folder written by `prepare` is used as it is, and gives what the text itself gives."""
    clear("train recipe.toml --run prepared --data.source data")
    assert weights(home / "prepared") == weights(home / "run")
    assert not (home / "prepared/data").exists()


def test_flags_bring_derived_sizes_along(clear: Callable[..., str]) -> None:
    """--model.d-model changes what follows from it, although the recipe in the run holds all sizes."""
    clear("train run/recipe.toml --run wide --model.d-model 96 --stop-after 1")
    config = RunFolder("wide").config()
    assert (config.d_model, config.d_head, config.d_ff) == (96, 48, 256)
    assert config == ModelConfig(vocab_size=280, d_model=96, n_layers=2, n_heads=2, max_len=32)


def test_resume_may_change_the_policy_for_bad_steps(clear: Callable[..., str]) -> None:
    """What is done at a loss that is not finite changes no number of a good step."""
    clear("train recipe.toml --run policy --stop-after 2")
    clear("train recipe.toml --run policy --resume --stop-after 3 --train.on-nonfinite skip")
    assert RunFolder("policy").recipe().train.on_nonfinite == "skip"


def test_a_budget_of_tokens_is_fixed_and_may_be_given_again(clear: Callable[..., str], home: Path) -> None:
    write_recipe(home / "tokens.toml", tiny_recipe("corpus", tokens=300))  # 64 in a step
    clear("train tokens.toml --run tokens --stop-after 1")
    assert RunFolder("tokens").recipe().train.budget() == {"steps": 5}
    clear("train tokens.toml --run tokens --resume")
    assert checkpoints("tokens")[0].name == "step-00000005"
    clear("train tokens.toml --run again-tokens --train.steps 5")  # takes the place of the recipe's
    assert weights(home / "again-tokens") == weights(home / "tokens")


def test_generate(clear: Callable[..., str]) -> None:
    """The prompt comes first, a seed repeats the rest, stdin gives prompts, too."""
    options = "--max-new-tokens 8 --seed 3"
    said = clear(f"generate run 'the cat' {options}")
    assert said.startswith("the cat")
    assert said.endswith("\n")
    assert clear(f"generate run 'the cat' {options}") == said
    assert clear(f"generate run - {options}", stdin="the cat") == said
    assert clear("generate run 'the cat' --max-new-tokens 0") == "the cat\n"


def test_generate_slides_when_asked(clear: Callable[..., str]) -> None:
    said = clear("generate run 'the cat' --max-new-tokens 60 --overflow slide --seed 2")
    assert len(said.encode()) > 60


def test_evaluate(clear: Callable[..., str]) -> None:
    """On the run's own validation text or on any prepared with its tokenizer; in words and as JSON."""
    result = json.loads(clear("evaluate run --json"))
    assert result.keys() == {"loss", "perplexity", "bits_per_byte", "n_tokens"}
    assert json.loads(clear("evaluate run --data data --json")) == result
    words = clear("evaluate run --stride 4")
    assert f"{result['n_tokens']} tokens of run/data/validation, windows of 16, stride 4" in words
    assert json.loads(clear("evaluate run --split train --json"))["n_tokens"] > result["n_tokens"]


def test_evaluate_of_a_run_on_ids(clear: Callable[..., str], home: Path) -> None:
    """On the tokens that the run kept for validation: those that its log ends with."""
    ids = np.concatenate([np.fromfile(file, "<u2") for file in sorted(home.glob("data/train/*.bin"))])
    (ids % 256).astype("<u2").tofile(home / "ids.bin")
    write_recipe(home / "ids.toml", tiny_recipe("ids.bin", data={"tokenizer": "vocab"}, steps=2, probes=0))
    clear("train ids.toml --run ids")
    last = read_metrics(home / "ids/metrics.jsonl")[-1]
    assert json.loads(clear("evaluate ids --json"))["loss"] == pytest.approx(
        last["validation_loss"], abs=1e-5
    )
    assert "tokens of ids.bin, windows of 16" in clear("evaluate ids --split train")


def test_show_counts_what_a_model_has(clear: Callable[..., str]) -> None:
    """A run, its model.json and its recipe tell the same sizes: those of the model itself."""
    of_run = json.loads(clear("show run --json"))
    assert json.loads(clear("show run/model.json --json")) == of_run
    assert json.loads(clear("show recipe.toml --json")) == of_run
    model = Transformer(RunFolder("run").config())
    assert of_run["n_parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert f"{of_run['n_parameters']:,}" in clear("show run")


def test_show_of_a_recipe_knows_the_vocabulary_to_come(clear: Callable[..., str], home: Path) -> None:
    """model.vocab_size left away: that of the tokenizer to be learned, or of the one named."""
    for data in ('source = "corpus"\nvocab_size = 280', 'source = "corpus"\ntokenizer = "vocab"'):
        (home / "show.toml").write_text(f"[data]\n{data}\n[model]\nd_model = 32\n", encoding="utf-8")
        shown = json.loads(clear("show show.toml --json"))
        assert shown["parts"][0]["shape"] == [280, 32]


def test_demo_ends_with_its_page(
    clear: Callable[..., str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four figures in bits per byte, a function, and where all of it lies."""
    monkeypatch.setattr(cli, "find_recipe", lambda name: home / f"{name}.toml")
    write_recipe(home / "demo.toml", tiny_recipe("corpus", model={"max_len": 160}))
    said = clear("demo --run demo")
    names = "gzip -9|xz -9e|xz -9e primed with the training text|this model"
    figures = re.findall(rf"^  ({names}) +(\d\.\d{{3}})$", said, re.MULTILINE)
    assert [name for name, _ in figures] == names.split("|")
    assert float(figures[2][1]) < float(figures[1][1])
    assert "def read_lines(path):\n" in said
    assert "The curve: demo/loss.png" in said
    assert "clearhead generate demo" in said
    again = clear("demo --run demo --resume")  # nothing left to train: the page alone
    assert again == said


def test_evaluate_measures_what_was_learned(clear: Callable[..., str], home: Path) -> None:
    """A classifier by its own measures: those that its log ends with."""
    words = ("red", "green", "old", "small", "cat", "dog", "bird", "house")
    rows = [f"document {number},{word[0]}" for number, word in enumerate(words * 12)]
    (home / "lab.csv").write_text("\n".join(["text,label", *rows]) + "\n", encoding="utf-8")
    settings = {"n_heads": 2, "d_model": 16, "n_layers": 1, "shape": "encoder"}
    recipe = tiny_recipe("lab.csv", model=settings, objective="classes", steps=2, probes=0)
    write_recipe(home / "classes.toml", recipe)
    clear("train classes.toml --run classes")
    last = read_metrics(home / "classes/metrics.jsonl")[-1]
    found = json.loads(clear("evaluate classes --json"))
    assert found == {name: last[name] for name in ("validation_loss", "accuracy", "f1")}
    assert f"accuracy        {found['accuracy']:.4f}" in clear("evaluate classes").splitlines()


def test_the_same_seed_in_two_processes_gives_the_same_bytes(clear: Callable[..., str], home: Path) -> None:
    """R16: every file of the last checkpoint and the log without its times, whatever Python hashes with."""
    runs = [home / "twice-1", home / "twice-2"]
    for run in runs:
        words = [sys.executable, "-m", "clearhead.cli", "train", "recipe.toml", "--run", run.name]
        environment = os.environ | {"PYTHONHASHSEED": run.name[-1]}
        subprocess.run(words, env=environment, check=True, capture_output=True)
    one, other = ({file.name: file.read_bytes() for file in checkpoints(run)[0].iterdir()} for run in runs)
    assert one == other
    logs = [
        [
            {name: value for name, value in entry.items() if name not in TIMINGS}
            for entry in read_metrics(file)
        ]
        for file in (run / "metrics.jsonl" for run in runs)
    ]
    assert logs[0] == logs[1] != []


def test_tensorboard(clear: Callable[..., str], home: Path) -> None:
    clear("train recipe.toml --run board --stop-after 1 --tensorboard")
    assert list((home / "board/tensorboard").glob("events.out.*"))


# ---------------------------------------------------------------- the help


def flags_of(verb: str) -> list[str]:
    """The flags that a verb must explain."""
    if verb == "sweep":
        return ["out"]
    if verb == "launch":
        return [field.name for field in fields(Launch)]
    if verb != "train":
        parameters = inspect.signature(VERBS[verb]).parameters
        return [name for name, given in parameters.items() if "Positional" not in repr(given.annotation)]
    own = [field.name for field in fields(TrainCommand) if field.name not in ("recipe", "settings")]
    parts = {"data": DataConfig, "model": ModelConfig, "train": TrainConfig}
    inner = ("latent", "experts", "rotary_scaling")  # their flags appear with a recipe that has them
    names = [(part, field.name) for part, cls in parts.items() for field in fields(cls)]
    return own + [f"{part}.{name}" for part, name in names if name not in inner]


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_every_verb(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It ends well, says what the verb does, and explains every flag."""
    with pytest.raises(SystemExit) as ended:
        main([*verb.split(), "--help-all" if verb == "train" else "--help"])
    out, err = capsys.readouterr()
    assert (ended.value.code, err) == (0, "")
    out = out.replace("[no-]", "")
    doc = inspect.getdoc(TrainCommand if verb == "train" else VERBS[verb])
    assert doc is not None
    assert doc.split()[0] in out
    flags = [f"--{name.removeprefix('as_').replace('_', '-')}" for name in flags_of(verb)]
    missing = [flag for flag in flags if flag not in out]
    assert not missing


def test_help_of_a_recipe_shows_its_values(
    clear: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        clear("train recipe.toml --help")
    assert "  --data.vocab-size 280  " in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["--help"], ["help"], ["-h"], ["tokenizer", "--help"]])
def test_overview(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main(words)
    out = capsys.readouterr().out
    assert all(f"\n  {verb} " in out for verb in VERBS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    assert capsys.readouterr().out == f"clearhead {clearhead.__version__}\n"


def test_help_loads_no_torch() -> None:
    """`clearhead --help` and a verb's help answer at once."""
    code = (
        "import contextlib, sys; from clearhead.cli import main; main(['--help'])\n"
        "with contextlib.suppress(SystemExit): main(['train', '--help'])\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


# ---------------------------------------------------------------- stopping, pipes, terminals


@pytest.mark.slow
def test_a_stopped_run_is_saved_and_says_how_to_go_on(clear: Callable[..., str], home: Path) -> None:
    """Ctrl-C: exit code 130, a checkpoint of the last step, and it goes on from there."""
    command = "train recipe.toml --run stopped --train.steps 1000000 --train.save-every 1000000"
    with start(command) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        assert any(b"validation loss" in line for line in process.stderr)  # at work
        process.send_signal(signal.SIGINT)
        said = process.stdout.read().decode()
        process.stderr.read()
    assert process.returncode == 130
    steps = int(re.findall(r"stopped after (\d+) steps", said)[0])
    assert "saved in stopped; go on with the same command and --resume" in said
    assert [path.name for path in checkpoints("stopped")] == [f"step-{steps:08}"]
    clear(f"{command} --resume --stop-after {steps + 1}")
    entries = read_metrics(home / "stopped/metrics.jsonl")
    assert [entry["step"] for entry in entries if "loss" in entry] == list(range(steps + 1))


def test_ctrl_c_outside_training(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(words: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run_verb", interrupt)
    with pytest.raises(SystemExit) as ended:
        main(["show", "demo"])
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_closed_pipe_ends_quietly(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`clearhead tokenizer show vocab TEXT | head -1`: the reader goes, no traceback comes."""
    monkeypatch.chdir(home)
    with start(f"tokenizer show vocab '{'the old green cat ' * 5000}'") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b"280 tokens")
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_a_terminal_that_cannot_show_a_character(clear: Callable[..., str]) -> None:
    """The text comes with the character's number in its place, rather than not at all."""
    output = io.BytesIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="ascii"))
        main(["generate", "run", "猫", "--max-new-tokens", "0"])
        assert output.getvalue() == b"\\u732b\n"


def test_text_from_the_command_line_that_is_no_utf8(
    clear: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A shell in another encoding is told so; its bytes are not guessed at."""
    with pytest.raises(SystemExit):
        clear("tokenizer encode vocab 'caf\udce9'")
    assert capsys.readouterr().err == "clearhead: the text is not UTF-8: byte 0xe9 at offset 3\n"


def test_notes_of_the_library_come_in_one_line(
    clear: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A warning is shown as a note, without the line of code it came from."""
    import warnings

    def warn(words: list[str]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning("two copies of head.weight differ", UserWarning, "x.py", 1)

    monkeypatch.setattr(cli, "run_verb", warn)
    main([])
    assert capsys.readouterr().err == "note: two copies of head.weight differ\n"


def test_recipe_for_the_flags_is_open_where_they_decide() -> None:
    """Sizes that follow are None there, a budget gives way to another; the recipe itself stays as it was."""
    recipe = tiny_recipe("corpus")
    start = flags_start(recipe, ["recipe.toml", "--train.minutes", "5"])
    assert (start.model.d_ff, start.train.budget()) == (None, {})
    assert (recipe.model.d_ff, recipe.train.budget()) == (64, {"steps": 10})
    assert flags_start(recipe, ["recipe.toml"]).train.budget() == {"steps": 10}

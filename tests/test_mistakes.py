"""What a user may do wrong at the command line, in one table: one line on stderr says what would work.

Each row is tried in a folder of its own, in which there lie

    recipe.toml   10 steps on the texts in corpus/     run/     what came of it, trained
    vocab/        a tokenizer of 280 tokens            other/   another of 280, learned from other text
    letters/      one whose alphabet is a to e         data/    corpus/, prepared with vocab/
    chatty/ plain/ mute/ small/ encoder/               published models, see `publish`
    classes.toml, pairs.toml, ...   recipes of one step for the examples in lab.csv, pairs.tsv, ..., see FORMS
    classes/                        what came of the first of them
"""

import gzip
import io
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from clearhead import ModelConfig, Transformer, save
from clearhead.cli import describe, fail, main
from clearhead.published.mapping import read_config
from clearhead.published.twins import TWINS
from clearhead.published.weights import FAMILIES, Origin
from clearhead.text.bpe import train_bpe
from clearhead.text.prepare import prepare
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.usage import Usage
from clearhead.training.checkpoint import checkpoints
from clearhead.training.loop import train
from clearhead.training.recipe import load_recipe
from tiny_run import WORDS, tiny_recipe, write_corpus, write_recipe


@dataclass(frozen=True)
class Mistake:
    """A command line, what its answer must say, and what was done to the folder before."""

    command: str
    says: tuple[str, ...]
    files: dict[str, str | bytes] = field(default_factory=dict)
    stdin: bytes = b""
    before: Callable[[], object] | None = None


def row(
    command: str,
    *says: str,
    files: dict[str, str | bytes] | None = None,
    stdin: bytes = b"",
    before: Callable[[], object] | None = None,
) -> Mistake:
    return Mistake(command, says, files or {}, stdin, before)


def toml(text: str) -> dict[str, str | bytes]:
    """A recipe of this text, with a source."""
    return {"mine.toml": f'[data]\nsource = "corpus"\n{text}'}


def flip_every_checkpoint() -> None:
    for path in checkpoints("run"):
        file = path / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)


def remove(path: str) -> Callable[[], None]:
    return lambda: shutil.rmtree(path) if Path(path).is_dir() else Path(path).unlink()


def copy(source: str, target: str) -> Callable[[], object]:
    return lambda: shutil.copyfile(source, target)


def change_model_json(**changes: object) -> Callable[[], object]:
    def change() -> None:
        content = json.loads(Path("run/model.json").read_text())
        Path("run/model.json").write_text(json.dumps(content | changes))

    return change


def unplug() -> None:
    """The network cannot be reached."""
    import huggingface_hub

    def snapshot_download(name: str, **options: object) -> str:
        huggingface_hub.utils.validate_repo_id(name)
        raise ConnectionError("no route to host")

    PATCH.setattr(huggingface_hub, "snapshot_download", snapshot_download)


def no_hub() -> None:
    """The package is not installed."""
    PATCH.setitem(sys.modules, "huggingface_hub", None)


def train_odd() -> None:
    """A run whose model is of no published family."""
    train(tiny_recipe("corpus", model={"positions": "sinusoidal"}), "odd")


def train_and_move() -> None:
    """A run on prepared text, which is somewhere else by now."""
    train(tiny_recipe("data"), "shards")
    Path("data").rename("moved")


PATCH = pytest.MonkeyPatch()
WORDPIECE = json.dumps({"model": {"type": "WordPiece", "vocab": {"a": 0}}, "added_tokens": []})

MISTAKES = {
    # the command line itself
    "unknown verb": row("trian recipe.toml", "'trian", "tokenizer train", "generate"),
    "unknown part of a verb": row("tokenizer learn x", "'tokenizer learn'", "tokenizer train"),
    "missing argument": row("tokenizer encode", "tokenizer encode", "--help"),
    "second argument missing": row("generate run", "text to continue", "--help"),
    "required flag missing": row("prepare corpus out", "--tokenizer"),
    "unknown flag": row("generate run The --temprature 1", "--temprature", "--temperature"),
    "word for a number": row("generate run The --top-k few", "--top-k", "few"),
    "one argument too many": row("show run recipe.toml", "recipe.toml"),
    # text
    "no such file": row("tokenizer train nowhere.txt out", "nowhere.txt", "python, pydoc"),
    "glob without a match": row("tokenizer train 'no*.txt' out", "no*.txt"),
    "folder without text": row(
        "tokenizer train pictures out", "pictures", "1 .png", ".jsonl", files={"pictures/a.png": b"\x89PNG"}
    ),
    "not a text file": row("tokenizer train a.pdf out", "a.pdf", ".pdf", files={"a.pdf": b"%PDF"}),
    "empty corpus": row("tokenizer train a.txt out", "a.txt holds no document", files={"a.txt": ""}),
    "blank corpus": row("tokenizer train a.txt out", "no document", "blank", files={"a.txt": "\n \n"}),
    "vocabulary too small": row("tokenizer train corpus out --vocab-size 100", "100", "257"),
    "unknown splitter": row("tokenizer train corpus out --splitter gpt5", "gpt5", "gpt2, cl100k"),
    "unknown alphabet": row("tokenizer train corpus out --alphabet runes", "runes", "bytes, characters"),
    "special token twice": row("tokenizer train corpus out --special-tokens '<a>' '<a>'", "'<a>'", "2 times"),
    "empty special token": row("tokenizer train corpus out --special-tokens ''", "special token", "empty"),
    "field of plain text": row("tokenizer train corpus out --field body", "body", "no .jsonl"),
    "separator of no text": row(
        "tokenizer train a.jsonl out --document-separator ==", "==", "no plain text", files={"a.jsonl": "{}"}
    ),
    "broken jsonl": row(
        "tokenizer train a.jsonl out --strict",
        "a.jsonl:2",
        "not JSON",
        files={"a.jsonl": '{"text": "fine"}\n{"text": \n'},
    ),
    "every line broken": row(
        "tokenizer train a.jsonl out", "1 not JSON", "a.jsonl:1", files={"a.jsonl": "{"}
    ),
    "missing field": row(
        "tokenizer train a.jsonl out --strict --field body",
        "a.jsonl:1",
        "'body'",
        "'text'",
        files={"a.jsonl": '{"text": "fine"}\n'},
    ),
    "byte that is no UTF-8": row(
        "tokenizer train a.txt out --strict", "a.txt:3", "0xe9", files={"a.txt": b"one\ntwo\ncaf\xe9\n"}
    ),
    "truncated gzip": row(
        "tokenizer train a.txt.gz out --strict",
        "a.txt.gz:1",
        "gzip",
        files={"a.txt.gz": gzip.compress(b"some text, " * 99)[:-12]},
    ),
    "no workers": row("prepare corpus out --tokenizer vocab --workers 0", "workers", "at least 1"),
    "nothing to learn from": row(
        "prepare a.txt out --tokenizer vocab", "a.txt", "train", files={"a.txt": "a"}
    ),
    "data of other text": row("prepare pydoc data --tokenizer vocab", "data", "'corpus'", "pydoc"),
    "data of another tokenizer": row("prepare corpus data --tokenizer other", "data", "tokenizer"),
    "output is a file": row("tokenizer train corpus recipe.toml", "recipe.toml", "in the way"),
    "output below a file": row("tokenizer train corpus recipe.toml/out", "recipe.toml/out", "is a file"),
    "data below a file": row("prepare corpus recipe.toml/x --tokenizer vocab", "recipe.toml/x", "is a file"),
    # tokenizers
    "no such tokenizer": row("tokenizer encode nowhere text", "nowhere"),
    "folder without a tokenizer": row("tokenizer show corpus", "corpus", "tokenizer.json"),
    "tokenizer of another kind": row(
        "tokenizer show t/tokenizer.json",
        "t/tokenizer.json",
        "cannot read",
        files={"t/tokenizer.json": WORDPIECE},
    ),
    "broken tokenizer.json": row("tokenizer show t", "tokenizer.json", files={"t/tokenizer.json": '{"model'}),
    "vocab.json without merges": row("tokenizer show t", "merges.txt", files={"t/vocab.json": "{}"}),
    "ranks without a splitter": row(
        "tokenizer show t/a.tiktoken", "a.tiktoken", files={"t/a.tiktoken": "IQ== 0\n"}
    ),
    "unknown mode": row("tokenizer encode vocab text --specials maybe", "maybe", "token", "error"),
    "special token in the text": row(
        "tokenizer encode vocab 'a<|endoftext|>' --specials error", "<|endoftext|>", "text"
    ),
    "character outside the alphabet": row("tokenizer encode letters 'bad ß'", "' '"),
    "id outside the vocabulary": row("tokenizer decode vocab 1 280", "280", "279"),
    "word for an id": row("tokenizer decode vocab 1 two", "'two'", "0 to 279"),
    "negative id": row("tokenizer decode vocab -- -1", "'-1'", "0 to 279"),
    "stdin that is no UTF-8": row("tokenizer encode vocab", "0xff at offset 2", stdin=b"ab\xff"),
    # recipes
    "no recipe": row("train --train.steps 10", "recipe first", "clearhead train demo"),
    "no such recipe": row("train dmeo", "'dmeo'", "demo"),
    "folder for a recipe": row("train run", "'run'", "folder"),
    "broken TOML": row("train mine.toml", "mine.toml", "line 3", files=toml("[train\n")),
    "recipe that is no UTF-8": row("train mine.toml", "mine.toml", "utf-8", files={"mine.toml": b"# \xff\n"}),
    "wrong type": row(
        "train mine.toml", "mine.toml", "lr='fast'", "a number", files=toml('[train]\nlr = "fast"')
    ),
    "fraction of a step": row(
        "train mine.toml", "steps=1.5 must be a whole number", files=toml("[train]\nsteps = 1.5")
    ),
    "word for a list": row("train mine.toml", "a list of texts", files=toml('[train]\nlora_on = "q"')),
    "word for a step": row("train recipe.toml --train.steps ten", "--train.steps: 'ten' is no whole number"),
    "flag without its value": row("train recipe.toml --train.steps", "--train.steps needs a value"),
    "wrong type of the source": row("train mine.toml", "source=3", files={"mine.toml": "[data]\nsource = 3"}),
    "unknown setting": row(
        "train mine.toml", "'learning_rat'", "known", files=toml("[train]\nlearning_rat=1")
    ),
    "misspelt setting": row("train mine.toml", "'stesp'", "'steps'", files=toml("[train]\nstesp = 5")),
    "unknown table": row("train mine.toml", "'training'", "train", files=toml("[training]\nsteps = 5")),
    "setting outside a table": row("train mine.toml", "'steps'", files={"mine.toml": "steps = 5"}),
    "misspelt flag": row("train recipe.toml --train.stesp 5", "--train.stesp", "--train.steps"),
    "flag without its section": row("train recipe.toml --lr 1", "no flag --lr; did you mean --train.lr?"),
    "flag as others call it": row(
        "train recipe.toml --train.learning-rate 1", "no flag --train.learning-rate; did you mean --train.lr?"
    ),
    "flag in the wrong section": row(
        "train recipe.toml --hidden_size 8", "no flag --hidden_size; did you mean --model.d-model?"
    ),
    "key as others call it": row(
        "train odd.toml --run new",
        "unknown train setting 'gradient_accumulation_steps'; did you mean 'accumulation'?",
        files={"odd.toml": "[train]\ngradient_accumulation_steps = 2\n"},
    ),
    "no budget": row("train mine.toml", "train.steps, train.tokens, train.minutes", files=toml("")),
    "two budgets": row(
        "train recipe.toml --run x --train.steps 10 --train.minutes 1", "steps=10", "minutes=1"
    ),
    "two budgets in a recipe": row(
        "train mine.toml", "steps=5 and tokens=9", files=toml("[train]\nsteps = 5\ntokens = 9")
    ),
    "budget of nothing": row("train recipe.toml --run x --train.steps 0", "steps=0", "above 0"),
    "budget that is no number": row("train mine.toml", "minutes=nan", files=toml("[train]\nminutes = nan")),
    "negative learning rate": row("train recipe.toml --run x --train.lr -1", "lr=-1", "above 0"),
    "learning rate below its end": row("train recipe.toml --run x --train.min-lr 1", "min_lr=1", "lr=0.003"),
    "min_lr of a constant rate": row(
        "train recipe.toml --run x --train.schedule constant --train.min-lr 1e-4", "min_lr", "cosine"
    ),
    "descent that no schedule makes": row(
        "train recipe.toml --run x --train.decay 0.5", "decay=0.5", "trapezoid"
    ),
    "descent longer than the run": row(
        "train recipe.toml --run x --train.schedule trapezoid --train.decay 0.99", "decay=0.99", "warmup=0.05"
    ),
    "inverse square root of no warm-up": row(
        "train recipe.toml --run x --train.schedule inverse_sqrt --train.warmup 0", "warmup=0", "inverse_sqrt"
    ),
    "Muon's rate without Muon": row(
        "train recipe.toml --run x --train.muon-lr 0.1", "muon_lr=0.1", "optimizer=muon"
    ),
    "unknown optimizer": row("train recipe.toml --run x --train.optimizer sgd", "sgd", "adamw"),
    "spikes that nobody looks for": row(
        "train recipe.toml --run x --train.spike-factor 9", "spike_factor=9", "on_spike=skip"
    ),
    "spikes among few steps": row(
        "train recipe.toml --run x --train.on-spike skip --train.spike-window 3", "spike_window=3", "10"
    ),
    "mean without end": row("train recipe.toml --run x --train.average 1", "average=1", "below 1"),
    "dry run of a file that is not there": row(
        "train recipe.toml --run x --dry-run --data.source nowhere.txt", "nowhere.txt"
    ),
    "sweep without a recipe": row("sweep --train.lr 1e-3 3e-3", "name the recipe first"),
    "sweep of one value": row("sweep recipe.toml --train.lr 1e-3", "nothing to compare"),
    "sweep of a flag without values": row(
        "sweep recipe.toml --train.lr --train.steps 1 2", "--train.lr has 0"
    ),
    "sweep of what is no setting": row("sweep recipe.toml --lr 1 2", "--lr", "--train.lr"),
    "sweep of the same value twice": row("sweep recipe.toml --train.lr 1e-3 1e-3", "lr=1e-3", "once"),
    "sweep with a value that cannot be": row("sweep recipe.toml --train.lr 1e-3 fast", "fast"),
    "sweep with a recipe that cannot work": row(
        "sweep recipe.toml --train.context-length 8 9999", "context_length=9999:", "max_len"
    ),
    "sweep into a run": row("sweep recipe.toml --train.lr 1e-3 2e-3 --out run", "run holds a run"),
    "sweep onto a file": row("sweep recipe.toml --train.lr 1e-3 2e-3 --out recipe.toml", "in the way"),
    "sweep that resumes": row("sweep recipe.toml --train.lr 1e-3 2e-3 --resume", "--resume", "--out"),
    "sweep of a misspelt column": row(
        "sweep classes.toml --train.lr 1e-3 2e-3 --data.label-field lable", "lr=1e-3: lab.csv:1", "'lable'"
    ),
    "dry run with a tokenizer without a mask": row(
        "train masked.toml --run x --dry-run --data.tokenizer vocab", "<mask>"
    ),
    "dry run of a vocabulary that cannot be": row(
        "train recipe.toml --run x --dry-run --model.vocab-size 999", "vocab_size=999", "280"
    ),
    "run among its texts": row("train recipe.toml --run corpus", "folder corpus lies in corpus"),
    "run below its texts": row("train recipe.toml --run corpus/a/b", "corpus/a/b lies in corpus", "outside"),
    "run below its validation texts": row(
        "train recipe.toml --run data/x --data.validation data", "data/x lies in data"
    ),
    "run among other things": row("train classes.toml --run corpus", "corpus is a folder with", "000.txt"),
    "run into a tokenizer": row("train recipe.toml --run vocab", "vocab is a folder with", "tokenizer.json"),
    "sweep among its texts": row("sweep recipe.toml --train.lr 1e-3 2e-3 --out corpus", "lies in corpus"),
    "validation that is not there": row("train recipe.toml --run x --data.validation nowhere", "nowhere"),
    "dry run without its validation": row(
        "train recipe.toml --run x --dry-run --data.validation nowhere", "nowhere"
    ),
    "dry run of ids without a tokenizer": row(
        "train recipe.toml --run x --dry-run --data.source a.bin", "a.bin holds ids", files={"a.bin": b"ab"}
    ),
    "resuming with another kind of recipe": row(
        "train classes.toml --run run --resume --train.steps 10", "run was started with another recipe"
    ),
    "resuming a classifier to speak": row(
        "train recipe.toml --run classes --resume --train.steps 1", "classes was started with another recipe"
    ),
    "measuring where the shards are not": row(
        "evaluate shards", "shards learned from data;", "--data", before=train_and_move
    ),
    "dry run that stops": row("train recipe.toml --run x --dry-run --stop-after 2", "stop_after=2"),
    "sweep of text that is not there": row("sweep recipe.toml --data.source a.txt b.txt", "a.txt"),
    "dry run that resumes": row("train recipe.toml --run x --dry-run --resume", "resume", "--dry-run"),
    "warm-up in steps": row("train recipe.toml --run x --train.warmup 2", "warmup=2", "share"),
    "unknown schedule": row("train recipe.toml --run x --train.schedule step", "step", "cosine"),
    "unknown policy": row("train mine.toml", "'go'", "skip", files=toml('[train]\non_nonfinite = "go"')),
    "negative clip": row("train recipe.toml --run x --train.clip -1", "clip=-1"),
    "momentum of one": row("train recipe.toml --run x --train.beta1 1", "beta1=1", "below 1"),
    "negative seed": row("train recipe.toml --run x --train.seed -1", "seed=-1"),
    "one checkpoint": row("train recipe.toml --run x --train.keep 1", "keep=1", "at least 2"),
    "empty batch": row("train recipe.toml --run x --train.batch-size 0", "batch_size=0", "at least 1"),
    "samples of nothing": row(
        "train recipe.toml --run x --train.sample-every 5 --train.sample-prompt ''", "sample_prompt"
    ),
    "heads that do not divide": row(
        "train recipe.toml --run x --model.n-heads 3", "d_model=32", "n_heads=3", "number of heads"
    ),
    "key/value heads that do not divide": row(
        "train recipe.toml --run x --model.n-heads 4 --model.n-kv-heads 3", "n_heads=4", "n_kv_heads=3"
    ),
    "odd head": row("train recipe.toml --run x --model.d-head 9", "d_head=9", "even"),
    "context beyond the model": row(
        "train recipe.toml --run x --train.context-length 33", "context_length=33", "max_len=32"
    ),
    "shape that is not trained here": row(
        "train recipe.toml --run x --model.shape encoder", "'encoder'", "model.shape='decoder'"
    ),
    "experts without a number of them": row(
        "train r.toml --run x",
        "[model.experts]",
        "top_k",
        files={"r.toml": "[model.experts]\nn_experts = 4\n"},
    ),
    "unknown activation": row("train recipe.toml --run x --model.activation tanh", "tanh", "silu"),
    "dropout of everything": row("train recipe.toml --run x --model.ff-dropout 1", "ff_dropout=1"),
    "model beyond the memory": row(
        "train recipe.toml --run x --model.d-ff 1000000000000", "not enough memory", "smaller"
    ),
    "vocabulary not the tokenizer's": row(
        "train recipe.toml --run x --model.vocab-size 999", "model.vocab_size=999", "280"
    ),
    "vocabulary to learn too small": row(
        "train recipe.toml --run x --data.vocab-size 9", "vocab_size=9", "257"
    ),
    "splitter to learn unknown": row("train recipe.toml --run x --data.splitter gpt5", "gpt5", "gpt2"),
    "source that is not there": row("train recipe.toml --run x --data.source nowhere", "nowhere"),
    "tokenizer and another vocabulary": row(
        "train recipe.toml --run x --data.tokenizer vocab --data.vocab-size 300", "vocab_size=300", "280"
    ),
    "data prepared with another tokenizer": row(
        "train recipe.toml --run x --data.source data --data.tokenizer other", "data/train", "tokenizer"
    ),
    "field of prepared data": row(
        "train recipe.toml --run x --data.source data --data.field body", "data.field='body'", "prepared"
    ),
    "corpus shorter than a window": row(
        "train recipe.toml --run x --model.max-len 50000 --train.context-length 50000",
        "50000",
        "at least 50001",
    ),
    "unknown device": row("train recipe.toml --run x --train.device gpu", "'gpu'", "cpu or cuda"),
    "GPU that is not there": row("train recipe.toml --run x --train.device cuda:99", "'cuda:99'", "cpu"),
    "loss that is not finite": row(
        "train recipe.toml --run x --train.lr 1e30 --train.warmup 0", "step 2", "not finite", "train.lr"
    ),
    # settings without effect
    "skips of no policy": row(
        "train recipe.toml --run x --train.max-skips 5", "max_skips=5", "on_nonfinite=skip or on_spike=skip"
    ),
    "length of no samples": row("train recipe.toml --run x --train.sample-tokens 5", "sample_tokens=5"),
    "samples of a conversation": row("train chat.toml --run x --train.sample-every 1", "form='chat'"),
    "field of what has none": row("train span.toml --run x --data.field zz", "data.field='zz'", "'span'"),
    "mask of what is not masked": row(
        "train classes.toml --run x --train.mask-share 0.3", "mask_share=0.3", "it serves masked"
    ),
    "form of another objective": row("train masked.toml --run x --data.form chat", "'chat'", "next_token"),
    "adapters on nothing": row("train classes.toml --run x --train.lora-rank 4", "lora_rank=4", "start_from"),
    "layers of no adapters": row("train classes.toml --run x --train.lora-on q", "lora_on", "lora_rank"),
    "processes where there is one": row(
        "train recipe.toml --run x --train.parallel fsdp", "clearhead launch"
    ),
    "counterparts of no validation": row(
        "train pairs.toml --run x --data.validation-target a.txt", "validation_target", "data.validation"
    ),
    # objectives and models
    "misspelt objective": row("train classes.toml --run x --train.objective clases", "'clases'", "'classes'"),
    "objective of another shape": row(
        "train classes.toml --run x --model.shape encoder-decoder", "'encoder' or 'decoder'"
    ),
    "objective of another head": row(
        "train classes.toml --run x --model.head span", "'sequence'", "'span'", "leave model.head away"
    ),
    "labels of no head": row("train classes.toml --run x --model.n-labels 5", "n_labels=5", "head="),
    "number of labels not the data's": row(
        "train classes.toml --run x --model.head sequence --model.n-labels 5", "n_labels=5", "have 11"
    ),
    "classes read from their first token": row(
        "train classes.toml --run x --model.shape decoder", "model.pool='last' or 'mean'"
    ),
    "nothing to tell apart": row(
        "train pairs.toml --run x --train.objective contrastive --model.shape encoder --train.batch-size 1",
        "batch_size=1",
        "at least 2",
    ),
    "tokenizer without a mask": row("train masked.toml --run x --data.tokenizer vocab", "<mask> or [MASK]"),
    "tokenizer that is not there": row("train classes.toml --run x --data.tokenizer nowhere", "nowhere"),
    "batch beyond the memory": row(
        "train recipe.toml --run x --train.batch-size 100000000", "not enough memory", "batch_size"
    ),
    "start that is not there": row(
        "train classes.toml --run x --train.start-from nowhere", "nowhere", "import NAME FOLDER --download"
    ),
    "start that is no model": row(
        "train classes.toml --run x --train.start-from corpus", "start_from=corpus"
    ),
    "start of another shape": row(
        "train classes.toml --run x --train.start-from run --train.objective masked", "'decoder'", "'encoder'"
    ),
    "start of another width": row(
        "train classes.toml --run x --train.start-from classes --model.d-model 8",
        "d_model=8",
        "leave it away",
    ),
    "adapters on no layer": row(
        "train classes.toml --run x --train.start-from classes --train.lora-rank 4 --train.lora-on query",
        "'query'",
        "its layers are q, k, v",
    ),
    "adapters wider than the matrix": row(
        "train classes.toml --run x --train.start-from classes --train.lora-rank 99",
        "lora_rank=99",
        "16 x 16",
    ),
    # examples
    "no file of examples": row("train classes.toml --run a/b --data.source no.csv", "no file 'no.csv'"),
    "no file of validation": row("train classes.toml --run x --data.validation no.csv", "no file 'no.csv'"),
    "no built-in examples": row(
        "train classes.toml --run x --data.source python", "labelled texts", "data.source"
    ),
    "folder of examples": row("train classes.toml --run x --data.source corpus", "corpus/*.jsonl"),
    "misspelt column": row(
        "train classes.toml --run x --data.label-field lable", "lab.csv:1", "'lable'", "'label'"
    ),
    "columns divided otherwise": row(
        "train classes.toml --run x", "lab.csv:1", "'text;label'", files={"lab.csv": "text;label\na;b\n"}
    ),
    "quote without end": row(
        "train classes.toml --run x", "lab.csv:3", "quotes", files={"lab.csv": 'text,label\na,x\n"b,y\n'}
    ),
    "column too few": row(
        "train classes.toml --run x", "lab.csv:3: 1 column", files={"lab.csv": "text,label\na,x\nb\n"}
    ),
    "label too few": row(
        "train classes.toml --run x", "lab.csv:2", "'label' is empty", files={"lab.csv": "text,label\na,\n"}
    ),
    "file without examples": row(
        "train classes.toml --run x", "lab.csv holds no labelled text", files={"lab.csv": "text,label\n"}
    ),
    "label that only validation has": row(
        "train classes.toml --run x --data.validation v.csv",
        "v.csv:2",
        "'zebra' is none of the 11",
        files={"v.csv": "text,label\na,zebra\n"},
    ),
    "one label": row(
        "train classes.toml --run x --data.validation lab.csv",
        "one label, 'x'",
        files={"lab.csv": "text,label\na,x\nb,x\n"},
    ),
    "too few to keep some": row(
        "train classes.toml --run x", "2 examples are too few", files={"lab.csv": "text,label\na,x\nb,y\n"}
    ),
    "name for a number": row(
        "train classes.toml --run x --train.objective regression", "lab.csv:2", "not a finite number"
    ),
    "labels for pairs": row("train pairs.toml --run x --data.source lab.csv", "no column 'source'"),
    "one side of the pairs": row(
        "train pairs.toml --run x --data.source a.en", "a.en", "data.target", files={"a.en": "a\n"}
    ),
    "sides of other lengths": row(
        "train pairs.toml --run x --data.source a.en --data.target a.de",
        "a.en has 2 lines and a.de 1",
        files={"a.en": "a\nb\n", "a.de": "a\n"},
    ),
    "word without a tag": row(
        "train tags.toml --run x", "tags.conll:2: 1 column", files={"tags.conll": "a X\nb\n"}
    ),
    "column of no tag": row("train tags.toml --run x --data.tag-column 5", "2 columns", "no column 5"),
    "text for tagged words": row(
        "train tags.toml --run x --data.source a.txt", "a.txt:1: one column", files={"a.txt": "word\n"}
    ),
    "labels for questions": row("train span.toml --run x --data.source lab.csv", "lab.csv", ".json"),
    "answer that is not there": row(
        "train span.toml --run x",
        "span.jsonl:1",
        "it stands at 2",
        files={
            "span.jsonl": '{"context": "a b", "question": "?", "answers": [{"text": "b", "answer_start": 0}]}'
        },
    ),
    "broken JSON of questions": row(
        "train span.toml --run x --data.source a.json", "a.json:1", "not JSON", files={"a.json": '{"data": ['}
    ),
    "conversation without an answer": row(
        "train chat.toml --run x",
        "chat.jsonl:1",
        "assistant",
        files={"chat.jsonl": '{"messages": [{"role": "user", "content": "a"}]}'},
    ),
    "message without content": row(
        "train chat.toml --run x",
        "messages[0]",
        "'content'",
        files={"chat.jsonl": '{"messages": [{"role": "user"}]}'},
    ),
    "room for no text": row(
        "train classes.toml --run x --train.context-length 1", "context_length=1 leaves no room"
    ),
    # runs
    "run that is there": row("train recipe.toml --run run", "run", "--resume"),
    "no run to resume": row("train recipe.toml --run x --resume", "x holds no run", "--resume"),
    "resume with another recipe": row(
        "train recipe.toml --run run --resume --train.lr 0.1", "train.lr: 0.003 -> 0.1", "undo"
    ),
    "resume with another budget": row(
        "train recipe.toml --run run --resume --train.steps 20",
        "got steps=20; give train.steps=10 again",
        "new run",
    ),
    "resume with another budget of many tokens": row(
        "train recipe.toml --run run --resume --train.tokens 1800000",
        "got tokens=1800000; give train.steps=10",
    ),
    "resume with another text": row(
        "train recipe.toml --run run --resume",
        "another text",
        files={"run/data/train/index.json": "{}", "corpus/000.txt": "New."},
    ),
    "stop before the beginning": row(
        "train recipe.toml --run x --stop-after 0", "stop_after=0", "at least 1"
    ),
    "stop where it was": row(
        "train recipe.toml --run run --resume --stop-after 5", "stop_after=5", "step 10"
    ),
    "run folder is a file": row("train recipe.toml --run recipe.toml", "recipe.toml", "in the way"),
    "run folder below a file": row("train recipe.toml --run recipe.toml/x", "recipe.toml/x", "is a file"),
    "resume from broken checkpoints": row(
        "train recipe.toml --run run --resume", "step-00000010", "step-00000005", before=flip_every_checkpoint
    ),
    "no such run": row("generate nowhere The", "there is no nowhere", "folder of a run", "GGUF"),
    "folder that is no run": row("generate corpus The", "corpus holds neither a run", "config.json"),
    "run without its tokenizer": row(
        "generate run The", "run holds no run", "tokenizer.json", before=remove("run/tokenizer.json")
    ),
    "run without its config": row("generate run The", "model.json", before=remove("run/model.json")),
    "run without a checkpoint": row("generate run The", "no checkpoint", before=remove("run/checkpoints")),
    "broken model.json": row("generate run The", "run/model.json", "JSON", files={"run/model.json": "{"}),
    "model.json that is a list": row(
        "generate run The", "model.json", "list", files={"run/model.json": "[]"}
    ),
    "unknown field in model.json": row(
        "generate run The", "model.json", "'d_modle'", "'d_model'", before=change_model_json(d_modle=32)
    ),
    "model.json of another model": row(
        "generate run The", "model.safetensors", "in the model", before=change_model_json(d_ff=32)
    ),
    "all checkpoints tampered": row(
        "generate run The", "step-00000010", "step-00000005", "SHA-256", before=flip_every_checkpoint
    ),
    "another tokenizer of the same size": row(
        "generate run The",
        "run/tokenizer.json",
        "trained with",
        before=copy("other/tokenizer.json", "run/tokenizer.json"),
    ),
    "tokenizer of another size": row(
        "generate run The", "trained with", before=copy("letters/tokenizer.json", "run/tokenizer.json")
    ),
    # speaking
    "prompt too long": row(f"generate run '{'word ' * 40}'", "prompt", "max_len", "shorten"),
    "answer too long": row("generate run The --max-new-tokens 40", "max_new_tokens=40", "slide"),
    "empty prompt": row("generate run ''", "prompt is empty"),
    "empty stdin": row("generate run -", "prompt is empty"),
    "negative temperature": row("generate run The --temperature -1", "temperature=-1", "at least 0"),
    "temperature that is no number": row("generate run The --temperature nan", "temperature=nan"),
    "top_p beyond 1": row("generate run The --top-p 2", "top_p=2", "between 0 and 1"),
    "top_p below 0": row("generate run The --top-p -0.1", "top_p=-0.1"),
    "min_p beyond 1": row("generate run The --min-p 1.5", "min_p=1.5"),
    "negative top_k": row("generate run The --top-k -3", "top_k=-3"),
    "penalty of 0": row("generate run The --repetition-penalty 0", "repetition_penalty=0"),
    "top_k of a greedy choice": row("generate run The --temperature 0 --top-k 5", "top_k=5", "temperature"),
    "fewer than no tokens": row("generate run The --max-new-tokens -1", "max_new_tokens=-1"),
    "seed below 0": row("generate run The --seed -1", "seed=-1"),
    "empty stop": row("generate run The --max-new-tokens 4 --stop ''", "stop string is empty"),
    "unknown overflow": row("generate run The --overflow wrap", "wrap", "slide"),
    "speaking on an unknown device": row("generate run The --device abacus", "'abacus'", "cpu or cuda"),
    "device of another machine": row("generate run The --device meta", "'meta'", "this machine"),
    # measuring and showing
    "unknown split": row("evaluate run --split test", "'test'", "validation"),
    "stride of 0": row("evaluate run --stride 0", "stride=0", "at least 1"),
    "stride beyond the window": row("evaluate run --stride 17", "stride=17", "context_length=16"),
    "measuring on nothing": row("evaluate run --data nowhere", "nowhere", "clearhead prepare"),
    "measuring on another tokenizer's data": row(
        "evaluate run --data far",
        "far/validation",
        "tokenizer",
        before=lambda: main(shlex.split("prepare corpus far --tokenizer other")),
    ),
    "nothing to show": row("show nowhere", "'nowhere'", "model.json"),
    "showing a tokenizer as a model": row("show vocab/tokenizer.json", "vocab/tokenizer.json", "'version'"),
    "classifying with a speaker": row("classify run The", "'decoder'", "use clearhead generate"),
    "labelling with a classifier": row("label classes The", "'sequence'", "use clearhead classify"),
    "answering with a classifier": row("answer classes who --context me", "use clearhead classify"),
    "translating with a speaker": row("translate run The", "use clearhead generate"),
    "speaking with a classifier": row("generate classes The", "encoder", "decoder"),
    "classifying with nothing": row("classify nowhere The", "there is no nowhere"),
    "classifying an empty text": row("classify classes ''", "text 1 is empty"),
    "classifying no file": row("classify classes --file no.txt", "no.txt"),
    "measuring examples on shards": row("evaluate classes --data data", "--data", "classes"),
    "measuring examples with a stride": row("evaluate classes --stride 4", "--stride 4", "classes"),
    "verifying nothing": row("verify nowhere", "nowhere holds no run"),
    "launching nothing": row("launch --processes 2", "train RECIPE"),
    "launching no process": row("launch --processes 0 train recipe.toml", "processes=0", "at least 1"),
    "launching what cannot be": row("launch 2 train recipe.toml", "no use for 2"),
    "demo that is there": row("demo --run run", "run", "--resume"),
    "demo of no time": row("demo --run x --minutes 0", "minutes=0"),
    # published models: finding one
    "no such model": row("chat nowhere", "there is no nowhere", "--download", stdin=b"hi"),
    "empty place": row("chat ''", "place of a model is empty", stdin=b"hi"),
    "file for a model": row("embed chatty/model.safetensors a", "neither a folder nor a GGUF file"),
    "corpus for a model": row("export corpus out", "corpus holds neither", "config.json"),
    "two GGUF files": row(
        "embed two a", "two holds a.gguf, b.gguf; name one", files={"two/a.gguf": "", "two/b.gguf": ""}
    ),
    "empty GGUF file": row("embed a.gguf a", "a.gguf is no GGUF file", files={"a.gguf": ""}),
    "page saved as GGUF": row("import a.gguf out", "a.gguf is no GGUF file", files={"a.gguf": "<html>"}),
    "weights that did not come": row(
        "chat chatty", "no weights in", before=remove("chatty/model.safetensors")
    ),
    "pointer for weights": row(
        "chat chatty", "no complete safetensors file", files={"chatty/model.safetensors": "version https://"}
    ),
    "half of a tokenizer": row("embed mute a", "merges.txt", files={"mute/vocab.json": "{}"}),
    "broken chat template": row(
        "chat chatty", "chat template is broken in line 1", files={"chatty/chat_template.jinja": "{% if %}"}
    ),
    "template that is no UTF-8": row(
        "chat chatty", "chat_template.jinja is not UTF-8", files={"chatty/chat_template.jinja": b"\xff"}
    ),
    "template without end": row(
        "chat chatty",
        "chat template",
        "steps",
        files={"chatty/chat_template.jinja": "{% for i in range(9**5) %}" * 2 + "{% endfor %}" * 2},
        stdin=b"hi",
    ),
    "end that is no id": row(
        "chat chatty", "eos_token_id='2'", files={"chatty/generation_config.json": '{"eos_token_id": "2"}'}
    ),
    "config of an unknown family": row(
        "chat chatty",
        "config.json",
        "'mamba' is unknown",
        files={"chatty/config.json": '{"model_type": "mamba"}'},
    ),
    "config that is a list": row("chat chatty", "config.json", "list", files={"chatty/config.json": "[]"}),
    "download without a network": row(
        "import org/name out --download", "cannot download 'org/name'", before=unplug
    ),
    "download of no name": row("import ../../x out --download", "cannot download '../../x'", before=unplug),
    "download without the extra": row(
        "chat org/name --download", "pip install 'clearhead[hub]'", before=no_hub
    ),
    # published models: using one
    "talking with a run": row("chat run", "chat template"),
    "talking with a model that only continues": row("chat plain", "came without a chat template"),
    "talking with an encoder": row("chat encoder", "encoder", "no next token", stdin=b"hi"),
    "talking without a tokenizer": row("chat mute", "mute holds no tokenizer"),
    "talking too long": row("chat chatty --max-new-tokens 999", "up to 999", "room for 64", stdin=b"hi"),
    "talking less than nothing": row("chat chatty --max-new-tokens -1", "max_new_tokens=-1", stdin=b"hi"),
    "talking with negative top_k": row("chat chatty --top-k -1", "top_k=-1", stdin=b"hi"),
    "talking with negative temperature": row("chat chatty --temperature -1", "temperature=-1", stdin=b"hi"),
    "talking on an unknown device": row("chat chatty --device abacus", "'abacus'", "cpu or cuda"),
    "message beyond the model": row("chat chatty", "room for 64", stdin=b"word " * 40),
    "answer of an encoder": row("generate encoder The", "encoder", "no next token"),
    "answer without a tokenizer": row("generate mute The", "mute holds no tokenizer"),
    "tokens beyond the embedding": row("generate small zzz", "token id", "0..99"),
    "empty prompt of a published model": row("generate plain ''", "prompt is empty"),
    "vector of nothing": row("embed encoder ''", "text 1 is empty"),
    "vector of an empty second text": row("embed encoder a ''", "text 2 is empty"),
    "vectors of empty stdin": row("embed encoder", "standard input has no lines"),
    "vectors of stdin that is no UTF-8": row("embed encoder", "0xe9", stdin=b"caf\xe9"),
    "vector without a tokenizer": row("embed mute a", "mute holds no tokenizer"),
    "vector of tokens beyond the embedding": row("embed small zzz", "122", "100"),
    "unknown measure": row("embed encoder a --kind hamming", "'hamming'", "cosine"),
    "unknown pool": row("embed encoder a --pool max", "'max'", "mean"),
    "search in no file": row("embed encoder a --search nowhere.txt", "nowhere.txt"),
    "search in a folder": row("embed encoder a --search corpus", "corpus", "directory"),
    "search in an empty file": row("embed encoder a --search a.txt", "no lines", files={"a.txt": "\n \n"}),
    "search in no UTF-8": row("embed encoder a --search a.txt", "a.txt", "0xe9", files={"a.txt": b"\xe9"}),
    "search for nothing": row("embed encoder a --search corpus/000.txt --top-k 0", "top_k=0", "at least 1"),
    "lines of no search": row("embed encoder a --top-k 3", "--top-k 3", "--search"),
    "neighbours of nothing": row("neighbours plain ''", "no word", "king - man"),
    "neighbours of two tokens": row("neighbours plain unlikely", "no single token", "'u' 'n'"),
    "fewer than no neighbours": row("neighbours plain a --top-k -1", "top_k=-1", "at least 1"),
    "neighbours beyond the embedding": row("neighbours small z", "122", "100 rows"),
    "neighbours without a tokenizer": row("neighbours mute a", "mute holds no tokenizer"),
    # published models: writing one
    "export onto itself": row("export chatty ./chatty/../chatty", "the model itself", "another folder"),
    "export onto another model": row("export chatty plain", "plain is a folder with something in it"),
    "export into a run": row("export chatty run", "run is a folder with something in it"),
    "export into here": row("export chatty ''", "with something in it"),
    "export onto a file": row("export chatty recipe.toml", "recipe.toml is a file"),
    "export below a file": row("export chatty recipe.toml/x", "recipe.toml", "in the way"),
    "export where nobody writes": row("export chatty /proc/nowhere", "/proc"),
    "export of no model": row("export nowhere out", "there is no nowhere"),
    "export in an unknown type": row("export chatty out --dtype int8", "'int8'", "bfloat16"),
    "export of what has no form": row(
        "export odd out", "no Hugging Face form", "positions='sinusoidal'", before=train_odd
    ),
    "export to nowhere": row("export chatty", "folder to write", "--help"),
    "import of a name not asked to download": row("import org/name out", "org/name", "--download"),
    "import of a tokenizer": row("import vocab out", "vocab holds neither"),
    "checking nothing": row("selfcheck nowhere", "there is no nowhere"),
    "checking an unknown family": row("selfcheck --family mamba", "'mamba'", "llama"),
    "checking a model as a family": row(
        "selfcheck mute --family llama", "--family llama", "mute is one model"
    ),
    "checking on an unknown device": row("selfcheck mute --device abacus", "'abacus'"),
}


# What such a command has done before it fails stays: steps of a run, parts of a corpus.
DONE_BY_THEN = {MISTAKES[name].command for name in ("loss that is not finite", "nothing to learn from")}

TEXTS = [f"{one} {other} {number}" for number, (one, other) in enumerate(product(WORDS, WORDS[:8]))]
FORMS = {  # recipe: shape and objective, file and its content
    "classes": ("encoder", "classes", "lab.csv", ["text,label", *(f"{text},{text[0]}" for text in TEXTS)]),
    "pairs": ("encoder-decoder", "translation", "pairs.tsv", [f"{text}\t{text.upper()}" for text in TEXTS]),
    "tags": ("encoder", "token_labels", "tags.conll", "a X\nb Y\n\nc X\n".splitlines()),
    "span": ("encoder", "span", "span.jsonl", ["{}"]),
    "chat": ("decoder", "next_token", "chat.jsonl", ["{}"]),
    "masked": ("encoder", "masked", "corpus", []),
}


def write_forms(folder: Path) -> None:
    """A recipe for each form of example, and its file."""
    for name, (shape, objective, source, lines) in FORMS.items():
        if lines:
            (folder / source).write_text("\n".join(lines) + "\n", encoding="utf-8")
        form = '\nform = "chat"' if name == "chat" else ""
        (folder / f"{name}.toml").write_text(
            f'[data]\nsource = "{source}"\nvocab_size = 280{form}\n[model]\nshape = "{shape}"\nd_model = 16\n'
            f'n_layers = 1\nn_heads = 2\nmax_len = 32\n[train]\nobjective = "{objective}"\nsteps = 1\n'
            "batch_size = 4\ncontext_length = 32\nprobes = 0\n",
            encoding="utf-8",
        )


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of which every mistake gets a copy."""
    folder = tmp_path_factory.mktemp("mistakes")
    corpus = write_corpus(folder / "corpus")
    write_recipe(folder / "recipe.toml", tiny_recipe("corpus"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train(tiny_recipe("corpus"), "run")
        tokenizer = Tokenizer.load("run")
        tokenizer.save("vocab")
        prepare("corpus", tokenizer, "data")
        write_forms(folder)
        train(load_recipe("classes.toml"), "classes")
    for name, source, size, alphabet in (
        ("other", [file.read_text()[::-1] for file in corpus.iterdir()], 280, "bytes"),
        ("letters", ["abcde"], 5, "characters"),
    ):
        specials = ["<|endoftext|>"] if alphabet == "bytes" else []
        Tokenizer(*train_bpe(source, size, specials, alphabet=alphabet), specials).save(folder / name)
    publish(folder)
    return folder


def publish(folder: Path) -> None:
    """Models in Hugging Face form: with a chat template, without one, without a tokenizer, too small."""
    tokenizer = Tokenizer({i: bytes([i]) for i in range(256)}, [], ["<|endoftext|>"])
    usage = Usage({"tokenizer_config.json": {}}, "{% for m in messages %}{{ m.content }}{% endfor %}")
    sizes: dict[str, Any] = {"d_model": 16, "n_layers": 1, "n_heads": 2, "max_len": 64}
    model = Transformer(ModelConfig(vocab_size=257, **sizes), seed=0)
    save(model, tokenizer.with_usage(usage), folder / "chatty")
    save(model, tokenizer, folder / "plain")
    save(model, None, folder / "mute")
    save(Transformer(ModelConfig(vocab_size=100, **sizes), seed=0), tokenizer, folder / "small")
    family = FAMILIES["bert"]
    settings = TWINS["bert"][1] | {"vocab_size": 257}
    encoder = Transformer(read_config(family, settings, "BertForMaskedLM"), seed=0)
    encoder.origin = Origin("bert", settings)
    save(encoder, tokenizer.with_usage(usage), folder / "encoder")


def prepared(mistake: Mistake, workplace: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy the workplace, make the files of the mistake, and go there."""
    shutil.copytree(workplace, folder)
    monkeypatch.chdir(folder)
    for name, content in mistake.files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    if mistake.before is not None:
        mistake.before()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_mistake_is_answered_with_one_line(
    mistake: Mistake,
    workplace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line that says what was wrong, on stderr, last; nothing on stdout; exit code 2."""
    prepared(mistake, workplace, tmp_path / "here", monkeypatch)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(mistake.stdin)))
    capsys.readouterr()
    there = set(Path().rglob("*"))
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(mistake.command))
    PATCH.undo()
    out, err = capsys.readouterr()
    notes, answer = err.splitlines()[:-1], err.splitlines()[-1]
    assert ended.value.code == 2
    assert out == ""
    assert answer.startswith("clearhead: ")
    missing = [words for words in mistake.says if words not in answer]
    assert not missing, answer
    assert not any(note.startswith("clearhead: ") or "Traceback" in note for note in notes)
    # Only training has told by then what it chose; every other verb says nothing but this one line.
    assert not notes or mistake.command.startswith("train"), notes
    made = set(Path().rglob("*")) - there
    if mistake.command not in DONE_BY_THEN:
        assert not made, "something was left behind"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["unknown verb", "id outside the vocabulary", "empty stdin", "all checkpoints tampered"]
)
def test_mistake_in_a_process_of_its_own(
    name: str, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a user sees it: this one line is all that the program says."""
    mistake = MISTAKES[name]
    prepared(mistake, workplace, tmp_path / "here", monkeypatch)
    command = [sys.executable, "-m", "clearhead.cli", *shlex.split(mistake.command)]
    done = subprocess.run(command, input=mistake.stdin, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"clearhead: ")
    assert done.stderr.count(b"\n") == 1


def test_a_key_error_is_told_without_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    """Python shows the message of a KeyError in quotes; a user sees the message."""
    with pytest.raises(SystemExit):
        fail(describe(KeyError("'<pad>' is not a special token; it has none")))
    assert capsys.readouterr().err == "clearhead: '<pad>' is not a special token; it has none\n"

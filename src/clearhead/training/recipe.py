"""A recipe: everything that decides a run, as plain data. TOML in, TOML out, and one command-line flag per
field.

    [data]   which text, which vocabulary      [model]  which Transformer      [train]  how it learns

A run saves its recipe with every choice filled in, so the run can be repeated from its folder alone.
"""

import math
import tomllib
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import tomli_w

from clearhead.model.config import ModelConfig
from clearhead.model.config_fields import check_field_names, check_field_types, freeze_lists
from clearhead.text.pretokenize import check_splitter
from clearhead.training.demands import DEMANDS, Objective, check_demands
from clearhead.training.durable import write_whole

Schedule = Literal["cosine", "linear", "constant", "trapezoid", "inverse_sqrt"]
Compile = Literal["auto", "on", "off"]
DType = Literal["float32", "bfloat16"]
Optimizer = Literal["adamw", "muon"]
Form = Literal["text", "chat"]


@dataclass(frozen=True)
class DataConfig:
    """Which text, and how it becomes token ids."""

    source: str = "python"  # file, folder, glob, or a built-in corpus: python, pydoc
    field: str = "text"  # the field that holds the text, in .jsonl and .parquet
    document_separator: str | None = None  # text that divides a file into documents
    tokenizer: str | None = None  # a tokenizer to use; None: learn one from the training text
    vocab_size: int = 4096  # size of the vocabulary to learn
    splitter: str = "gpt2"  # how text is cut before merging, when learning
    strict: bool = False  # stop at the first broken piece of text instead of counting it
    form: Form = "text"  # running text, or conversations (.jsonl) of which the answers are learned
    validation: str | None = None  # what to measure on; None: a part of source, chosen by its content
    target: str | None = None  # pairs: the file whose lines are the counterparts of those in source
    validation_target: str | None = None  # and those of the lines in validation
    target_field: str | None = None  # pairs in one file: the counterpart's field; the text's is `field`
    start_token: str | None = None  # translations: what stands before the first token; None: the tokenizer's
    label_field: str = "label"  # labelled texts: the column or field of the label
    second_field: str | None = None  # and of a second text, when it is about two
    word_column: int = 1  # tagged words: the column of the word
    tag_column: int | None = None  # and of its tag; None: the last

    def __post_init__(self) -> None:
        check_field_types(self)
        check_splitter(self.splitter)
        if self.vocab_size < 257:
            raise ValueError(
                f"vocab_size={self.vocab_size} must be at least 257: the 256 bytes and <|endoftext|>"
            )


@dataclass(frozen=True)
class TrainConfig:
    """How the model learns. Exactly one budget: `steps`, `tokens` or `minutes`.

    A comment on a line of its own begins a concern; the command line's help has the same groups.
    """

    # what is learned
    objective: Objective = "next_token"  # what is asked of the model
    start_from: str | None = None  # folder of a run or a published model: its weights, config and tokenizer
    lora_rank: int = 0  # learn corrections of this rank, and leave the weights as they are; 0: learn them all
    lora_alpha: float = 16.0  # a correction counts alpha / rank
    lora_on: tuple[str, ...] = ("q", "v")  # which layers: the ends of their paths, or patterns of them
    label_smoothing: float = 0.0  # share of a target's probability that is spread over all
    mask_share: float = 0.15  # masked: share of the tokens that are asked for
    contrastive_scale: float = 20.0  # contrastive: factor on the cosines
    contrastive_both: bool = False  # contrastive: each counterpart finds its text, too
    # time, batches, machine
    steps: int | None = None  # optimizer steps
    tokens: int | None = None  # target tokens; becomes a number of steps
    minutes: float | None = None  # becomes a number of steps after a short measured warm-up
    batch_size: int = 16  # sequences in a forward pass
    accumulation: int = 1  # forward passes in an optimizer step
    context_length: int = 256  # tokens in a sequence
    document_mask: bool = False  # tokens see their own document only, positions restart in each
    seed: int = 0  # of the initial weights, the order of the data and dropout
    dtype: DType = "float32"  # of the weights and the arithmetic
    device: str = "auto"  # auto: cuda if there is one, else cpu
    compile: Compile = "auto"  # torch.compile; auto: on a GPU only, on a CPU it seldom pays for itself
    checkpoint_activations: bool = False  # compute blocks twice: less memory, a third more work
    # the optimizer
    optimizer: Optimizer = "adamw"  # muon: for the matrices inside the model, AdamW for the rest
    lr: float = 3e-3  # highest learning rate
    min_lr: float = 0.0  # learning rate at the end
    embed_lr_scale: float = 1.0  # factor on the learning rate of the embeddings, whose rows are seldom seen
    warmup: float = 0.05  # share of the steps in which the learning rate rises from 0
    schedule: Schedule = "linear"  # how it falls after that
    decay: float = 0.2  # trapezoid: share of the steps in which the learning rate falls, at the end
    weight_decay: float = 0.1  # on matrices; never on biases, norms or other vectors
    clip: float = 1.0  # highest norm of the gradient; 0: no clipping
    beta1: float = 0.9  # AdamW: memory of the gradient's mean
    beta2: float = 0.95  # AdamW: memory of the gradient's square
    eps: float = 1e-8  # AdamW: keeps the division finite
    muon_lr: float | None = None  # Muon: highest learning rate; none: 0.02, or lr with muon_scale=rms
    muon_momentum: float = 0.95  # Muon: memory of the gradient's mean
    muon_scale: Literal["shape", "rms"] = "shape"  # Muon: steps fit to a matrix's shape, or as AdamW's
    average: float = 0.0  # memory of the mean of the weights that is evaluated and used; 0: the last weights
    on_nonfinite: Literal["stop", "skip"] = "stop"  # what to do at an infinite or NaN loss or gradient
    on_spike: Literal["keep", "skip"] = "keep"  # what to do at a loss or gradient far above the usual
    spike_factor: float = 5.0  # so far: this many times the median of the last steps
    spike_window: int = 50  # how many last steps
    max_skips: int = 10  # "skip" gives up after this many in a row
    # watching
    eval_every: int = 200  # steps between two looks at the validation text
    eval_tokens: int = 20_000  # how much of it; at the end the whole of it is used
    patience: int = 0  # stop after this many looks in a row without a better validation loss; 0: never
    sample_every: int = 0  # steps between two samples of the model's own text; 0: none
    sample_prompt: str = "def "  # how a sample begins
    sample_tokens: int = 64  # how many tokens it adds
    norms_every: int = 0  # steps between two looks at the norms and the idle parts of the model; 0: none
    probes: int = 12  # steps whose weights are kept for `clearhead look` to go through; 0: none
    # saving
    save_every: int = 500  # steps between two checkpoints
    keep: int = 2  # checkpoints kept
    keep_best: bool = False  # keep the weights of the lowest validation loss beside them
    milestones: int = 0  # steps between two times when the weights are kept for good; 0: none
    async_save: bool = False  # write checkpoints while training goes on
    on_save_error: Literal["stop", "warn"] = "stop"  # what to do when one on the way cannot be written
    # several processes
    parallel: Literal["auto", "ddp", "fsdp"] = (
        "auto"  # ddp (auto): each has a whole model; fsdp: they share it
    )
    replicate: int = 1  # fsdp: groups of ranks that each share out a model of their own
    tensor_parallel: int = 1  # fsdp: ranks that work on each matrix together
    rank_timeout: float = 120.0  # seconds, from the second step on, until a silent rank is given up
    compare_every: int = 100  # steps between two looks whether ranks hold the same weights; 0: none

    def __post_init__(self) -> None:
        freeze_lists(self)
        check_field_types(self)
        self._check_sizes()
        self._check_learning()
        self._check_ranks()
        self._check_effects()

    def _check_sizes(self) -> None:
        """Raise ValueError for a number of steps, tokens and the like that cannot be."""
        sizes = ("batch_size", "accumulation", "context_length")
        for name in (*sizes, "eval_every", "eval_tokens", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        at_least_0 = ("eps", "weight_decay", "clip", "max_skips", "sample_every", "sample_tokens", "patience")
        for name in (*at_least_0, "norms_every", "lora_rank"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be a number of at least 0")
        for name in ("milestones", "compare_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be a number of steps, or 0 for never")
        for name in ("steps", "tokens", "minutes"):
            if getattr(self, name) is not None and not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be a number above 0")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} must be between 0 and {2**63 - 1}")
        if self.keep < 2:
            raise ValueError(
                f"keep={self.keep} must be at least 2, so that one good checkpoint is always left"
            )
        if not 0 <= self.probes <= 30:
            raise ValueError(f"probes={self.probes} must be between 0 and 30: each is a copy of the weights")

    def _check_learning(self) -> None:
        """Raise ValueError for a rate, a share or a factor that cannot be."""
        if not 0 < self.mask_share <= 1:
            raise ValueError(f"mask_share={self.mask_share} must be above 0 and at most 1")
        for name in ("contrastive_scale", "embed_lr_scale"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be a number above 0")
        for name in ("beta1", "beta2", "muon_momentum", "average", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0 and below 1")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup={self.warmup} is a share of the steps, at least 0 and below 1")
        if not 0 < self.lr < math.inf or not 0 <= self.min_lr <= self.lr:
            raise ValueError(
                f"lr={self.lr} must be a number above 0 and min_lr={self.min_lr} between 0 and lr"
            )
        if self.muon_lr is not None and not 0 < self.muon_lr < math.inf:
            raise ValueError(f"muon_lr={self.muon_lr} must be a number above 0")
        if not 0 <= self.decay <= (1 - self.warmup if self.schedule == "trapezoid" else 1):
            raise ValueError(
                f"decay={self.decay} is a share of the steps, at least 0 and at most 1 - warmup={self.warmup}"
            )
        if not 1 < self.spike_factor < math.inf or self.spike_window < 10:
            raise ValueError(
                f"spike_factor={self.spike_factor} must be above 1, "
                f"spike_window={self.spike_window} at least 10"
            )
        if not 0 < self.lora_alpha < math.inf or not self.lora_on:
            raise ValueError(
                f"lora_alpha={self.lora_alpha} must be a number above 0, "
                f"and lora_on={self.lora_on} must name layers"
            )

    def _check_ranks(self) -> None:
        """Raise ValueError for several processes that cannot work together so."""
        for name in ("replicate", "tensor_parallel"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1 rank")
        if max(self.replicate, self.tensor_parallel) > 1 and self.parallel == "ddp":
            raise ValueError("replicate and tensor_parallel go with parallel='fsdp', not with 'ddp'")
        if not 1 <= self.rank_timeout < 1e6:
            raise ValueError(f"rank_timeout={self.rank_timeout} must be at least 1 second")
        shared_out = self.parallel == "fsdp" or max(self.replicate, self.tensor_parallel) > 1
        if shared_out and self.sample_every:
            raise ValueError(
                f"sample_every={self.sample_every} needs the whole model on one rank, and parallel='fsdp', "
                "replicate and tensor_parallel share it out; set sample_every=0"
            )

    def _check_effects(self) -> None:
        """Raise ValueError for a setting that does nothing beside the others."""
        needs = {
            "embed_lr_scale": (self.lora_rank == 0, "lora_rank=0, as adapters leave the embedding as it is"),
            "lora_alpha": (self.lora_rank > 0, "lora_rank"),
            "lora_on": (self.lora_rank > 0, "lora_rank"),
            "lora_rank": (self.start_from is not None, "start_from, a model to correct"),
            "min_lr": (
                self.schedule not in ("constant", "inverse_sqrt"),
                "schedule=cosine, linear or trapezoid",
            ),
            "decay": (self.schedule == "trapezoid", "schedule=trapezoid"),
            "muon_lr": (self.optimizer == "muon", "optimizer=muon"),
            "muon_momentum": (self.optimizer == "muon", "optimizer=muon"),
            "muon_scale": (self.optimizer == "muon", "optimizer=muon"),
            "spike_factor": (self.on_spike == "skip", "on_spike=skip"),
            "spike_window": (self.on_spike == "skip", "on_spike=skip"),
            "max_skips": ("skip" in (self.on_nonfinite, self.on_spike), "on_nonfinite=skip or on_spike=skip"),
            "sample_prompt": (self.sample_every > 0, "sample_every"),
            "sample_tokens": (self.sample_every > 0, "sample_every"),
        }
        for name, (has_effect, what) in needs.items():
            if not has_effect and getattr(self, name) != getattr(type(self), name):
                raise ValueError(f"{name}={getattr(self, name)} has an effect only with {what}")
        if self.schedule == "inverse_sqrt" and not self.warmup:
            raise ValueError("warmup=0.0: schedule=inverse_sqrt falls from the end of a warm-up; give it one")

    def muon_rate(self) -> float:
        """Muon's highest learning rate."""
        default = self.lr if self.muon_scale == "rms" else 0.02
        return default if self.muon_lr is None else self.muon_lr

    def free(self) -> dict[str, Any]:
        """The settings that change no number of a run, so that one that is resumed may change them."""
        names = (
            *("norms_every", "checkpoint_activations", "sample_every", "sample_prompt", "sample_tokens"),
            *("on_nonfinite", "max_skips", "probes", "keep", "keep_best", "milestones", "async_save"),
            *("on_save_error", "parallel", "replicate", "tensor_parallel", "rank_timeout", "compare_every"),
        )
        return {name: getattr(self, name) for name in names}

    def budget(self) -> dict[str, int | float]:
        """What was given of `steps`, `tokens` and `minutes`."""
        given = {name: getattr(self, name) for name in ("steps", "tokens", "minutes")}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class Recipe:
    """One reproducible run."""

    data: DataConfig = field(default_factory=DataConfig)  # which text, and how it becomes token ids
    model: ModelConfig = field(default_factory=ModelConfig)  # which Transformer
    train: TrainConfig = field(default_factory=TrainConfig)  # how it learns; one of steps, tokens, minutes

    def check(self) -> None:
        """Raise ValueError for parts that do not fit each other."""
        if self.train.context_length > self.model.max_len:
            raise ValueError(
                f"train.context_length={self.train.context_length} exceeds "
                f"model.max_len={self.model.max_len}; raise max_len or shorten the context"
            )
        check_demands(self.train.objective, self.model, self._given())
        given = [f"{name}={value}" for name, value in self.train.budget().items()]
        if len(given) != 1:
            raise ValueError(
                "give exactly one budget of train.steps, train.tokens, train.minutes; "
                f"got {' and '.join(given) or 'none'}"
            )
        if self.train.sample_every and not self.train.sample_prompt:
            raise ValueError(
                "train.sample_prompt is empty and train.sample_every asks for samples; give a prompt"
            )

    def targets(self) -> str:
        """What the targets are called that a loss is a mean over, and that a budget of `tokens` counts."""
        return "answer tokens" if self.data.form == "chat" else DEMANDS[self.train.objective].targets

    def pace(self) -> tuple[str, int | None]:
        """What the speed of a step is counted in, and how many of them it has; None: as many as targets.

        >>> Recipe(train=TrainConfig(objective="classes", batch_size=8, accumulation=2)).pace()
        ('examples', 16)
        """
        settings = self.train
        rows, name = settings.batch_size * settings.accumulation, DEMANDS[settings.objective].rows
        if settings.objective == "masked":  # of the tokens that are read, few are hidden
            return "tokens", rows * settings.context_length
        return (self.targets(), None) if name is None else (name, rows)

    def _given(self) -> dict[str, Any]:
        """The settings of [data] and [train] that are not at their defaults, as train.lr."""
        parts = {"data": self.data, "train": self.train}
        return {
            f"{part}.{field.name}": getattr(table, field.name)
            for part, table in parts.items()
            for field in fields(table)
            if getattr(table, field.name) != field.default
        }


def load_recipe(path: str | Path) -> Recipe:
    """The recipe in a TOML file. An unknown key or a wrong type raises ValueError naming the file and the
    key.
    """
    path = Path(path)
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from None
    except RecursionError:
        raise ValueError(f"{path} is not valid TOML: nested too deeply") from None
    try:
        return recipe_from_dict(tables)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def recipe_from_dict(tables: dict[str, Any]) -> Recipe:
    """The recipe of these tables; what is not given keeps its default."""
    check_field_names(Recipe, tables, "recipe")
    parts = {}
    for part in fields(Recipe):
        table = tables.get(part.name, {})
        if not isinstance(table, dict):
            raise ValueError(f"[{part.name}] must be a table of settings, not {table!r}")
        cls = type(getattr(Recipe(), part.name))
        try:
            parts[part.name] = read_table(cls, table, part.name)
        except OverflowError as error:
            raise ValueError(f"[{part.name}] {error}") from None
    return Recipe(**parts)


def read_table(cls: type, table: dict[str, Any], name: str) -> Any:
    """The dataclass `cls` with the values of a TOML table, 3.0 for 3 where it wants a float; tables inside
    become its parts.
    """
    check_field_names(cls, table, name)
    kinds = {field.name: (field.type, *get_args(field.type)) for field in fields(cls)}
    made: dict[str, Any] = {}
    for key, value in table.items():
        part = next((kind for kind in kinds[key] if isinstance(kind, type) and is_dataclass(kind)), None)
        if part is not None and isinstance(value, dict):
            made[key] = read_table(part, value, f"{name}.{key}")
        else:
            made[key] = float(value) if float in kinds[key] and type(value) is int else value
            made[key] = tuple(value) if isinstance(value, list) else made[key]  # TOML has lists only
    try:
        return cls(**made)
    except TypeError:
        needed = [field.name for field in fields(cls) if field.default is MISSING and field.name not in made]
        raise ValueError(f"[{name}] must give {' and '.join(needed)}") from None
    except ValueError as error:
        raise ValueError(f"[{name}] {error}") from None


def find_recipe(name: str | Path) -> Path:
    """A recipe file: the path itself, or the recipe of this name that comes with clearhead."""
    path = Path(name)
    if path.is_file():
        return path
    package = Path(__file__).parents[1]
    folders = (package / "recipes", package.parents[1] / "recipes")  # in a wheel, in a checkout
    ours = {file.stem: file for folder in folders for file in sorted(folder.glob("*.toml"))}
    if str(name) in ours:
        return ours[str(name)]
    known = ", ".join(ours) or "none"
    there = "it is a folder" if path.is_dir() else "there is no such file"
    raise FileNotFoundError(f"no recipe {str(name)!r}: {there}; give a TOML file, or one of ours: {known}")


def save_recipe(recipe: Recipe, path: str | Path) -> None:
    """Write the recipe with every choice filled in, whole or not at all.

    TOML has no null: a missing key means none.
    """
    write_whole(path, tomli_w.dumps(without_none(asdict(recipe))))


def without_none(table: dict[str, Any]) -> dict[str, Any]:
    """A table of tables without the keys that hold None."""
    kept = {key: value for key, value in table.items() if value is not None}
    return {key: without_none(value) if isinstance(value, dict) else value for key, value in kept.items()}


def differences(old: Recipe, new: Recipe) -> list[str]:
    """The settings in which two recipes differ, as `train.lr: 0.003 -> 0.001`."""
    before, after = asdict(old), asdict(new)
    return [
        f"{part}.{key}: {before[part][key]} -> {after[part][key]}"
        for part in before
        for key in before[part]
        if before[part][key] != after[part][key]
    ]


def with_vocabulary(recipe: Recipe, vocab_size: int) -> Recipe:
    """The recipe with the model's vocabulary set to the tokenizer's."""
    return replace(recipe, model=recipe.model.replace(vocab_size=vocab_size))

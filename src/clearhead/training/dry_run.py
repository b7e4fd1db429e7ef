"""What a run will need, found out before it starts: nothing is written, and no large tensor is made.

A step is made of tensors without values, which hold no memory, and every byte that would be alive is counted
(memory.py). Time comes from a few steps on random tokens where the machine can make one within seconds, else
from the rate of a matrix product of the model's sizes, which no step can beat.

    FLOPs in training = 3 x those of the forward pass (see model/summary.py), 4 x where blocks run twice
"""

import math
import os
import shutil
import time
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from clearhead.model.config import ModelConfig
from clearhead.model.experts import Routing
from clearhead.model.summary import forward_flops
from clearhead.model.transformer import Transformer
from clearhead.text.corpus import open_corpus
from clearhead.text.shards import Shards
from clearhead.text.token_files import is_token_file
from clearhead.training.activations import recompute_blocks
from clearhead.training.budget import count_steps
from clearhead.training.data import HOW_TEXT_IS_READ, data_folder, open_ids
from clearhead.training.demands import DEMANDS, fit_head
from clearhead.training.example_data import find_labels, read_splits
from clearhead.training.learner import Learner
from clearhead.training.lora import Lora, add_adapters
from clearhead.training.machine import find_device
from clearhead.training.memory import LiveBytes
from clearhead.training.objectives import token_loss
from clearhead.training.recipe import Recipe, TrainConfig
from clearhead.training.run_folder import RunFolder
from clearhead.training.start import fit_recipe, open_start
from clearhead.training.tasks import check_tokenizer

PATIENCE = 2.0  # seconds that one pass may take for a few of them to be tried


@dataclass(frozen=True)
class Needs:
    """The bytes of one process, and how many parameters learn."""

    n_parameters: int
    n_learning: int
    weights: int
    gradients: int
    optimizer: int  # its state, with the mean of the weights
    activations: int  # at the moment when most is alive

    @property
    def total(self) -> int:
        """All of them together."""
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class DryRun:
    """All that is known of a run before it starts."""

    recipe: Recipe  # with the sizes that follow from the data
    device: torch.device
    needs: Needs
    memory: int  # bytes of the device
    disk: int  # bytes that are free where the run would be
    data: str
    targets_per_step: int
    tokens_per_step: int
    steps: int
    flops_per_token: int
    seconds_per_step: float
    measured: str  # how the time was found

    def saved(self) -> int:
        """The bytes of the checkpoints that are on the disk at once."""
        return (self.recipe.train.keep + 1) * (self.needs.weights + self.needs.optimizer)

    def lines(self) -> list[str]:
        """The report, one line for each thing."""
        needs, targets = self.needs, self.steps * self.targets_per_step
        flops = self.flops_per_token * self.tokens_per_step * self.steps
        mega = {n: f"{b / 2**20:,.1f}" for n, b in vars(needs).items() if not n.startswith("n_")}
        much = "; THAT IS TOO MUCH: make the model or train.batch_size smaller"
        full = "; THAT IS TOO MUCH: make room, or choose another disk for --run"
        seconds = self.steps * self.seconds_per_step
        learning = "" if needs.n_learning == needs.n_parameters else f", {needs.n_learning:,} of them learn"
        return [
            f"model       {needs.n_parameters:,} parameters{learning}",
            f"memory      weights {mega['weights']}, gradients {mega['gradients']}, optimizer "
            f"{mega['optimizer']}, activations {mega['activations']}: {needs.total / 2**20:,.1f} MiB of "
            f"{self.memory / 2**20:,.0f} MiB ({self.device.type}){much if needs.total > self.memory else ''}",
            f"disk        checkpoints {self.saved() / 2**20:,.1f} MiB of {self.disk / 2**20:,.0f} MiB free"
            f"{full if self.saved() > self.disk else ''}",
            f"data        {self.data}",
            f"budget      {self.steps:,} steps of {self.targets_per_step:,} {self.recipe.targets()} at most: "
            f"{targets:,}",
            f"arithmetic  {self.flops_per_token / 1e6:,.1f} M FLOPs per token, {flops:.2e} in all",
            f"time        {spell(self.seconds_per_step)} a step, {spell(seconds)} in all ({self.measured})",
        ]


def dry_run(recipe: Recipe, run: RunFolder) -> DryRun:
    """Find out what a run of this recipe in this folder needs.

    The folder may hold a run: nothing is started there. ValueError, FileNotFoundError: what `train` would say
    of the recipe and of its data.
    """
    if recipe.train.start_from is not None:
        recipe = fit_recipe(recipe, open_start(recipe.train.start_from))
    recipe.check()
    device = find_device(recipe.train.device)
    recipe, data = look_at_data(recipe, run)
    settings = recipe.train
    needs = foresee(recipe)
    per_pass = rows_of(settings) * settings.context_length
    flops = training_flops(recipe)
    memory = memory_of(device)
    rate = matmul_rate(recipe.model, device, per_pass)
    seconds = settings.accumulation * per_pass * flops / rate
    measured = f"by the {rate / 1e9:,.0f} GFLOP/s that its matrix products reach now, nothing else counted"
    if seconds / settings.accumulation <= PATIENCE and needs.total < memory:
        seconds, measured = time_steps(recipe, device) * settings.accumulation, "a few steps were tried"
    tokens = settings.accumulation * per_pass
    targets = settings.accumulation * targets_of(recipe)
    steps = count_steps(settings, targets, lambda: seconds)
    there = next(path for path in (run.path, *run.path.absolute().parents) if path.is_dir())
    disk = shutil.disk_usage(there).free
    return DryRun(recipe, device, needs, memory, disk, data, targets, tokens, steps, flops, seconds, measured)


def rows_of(settings: TrainConfig) -> int:
    """The sequences of a forward pass."""
    return settings.batch_size * (2 if settings.objective == "contrastive" else 1)


def targets_of(recipe: Recipe) -> int:
    """How many targets a forward pass has: of all its tokens, or of its examples where they have one each."""
    settings, rows = recipe.train, recipe.train.batch_size
    tokens = rows * settings.context_length
    targets = {
        "masked": max(1, round(settings.mask_share * tokens)),
        "classes": rows,
        "several_labels": rows * recipe.model.n_labels,
        "regression": rows,
        "span": 2 * rows,
        "contrastive": rows,
    }
    return targets.get(settings.objective, tokens)


def look_at_data(recipe: Recipe, run: RunFolder) -> tuple[Recipe, str]:
    """The recipe with the vocabulary and the labels that the data will give it; the data in words."""
    data, objective = recipe.data, recipe.train.objective
    prepared = data_folder(data, run) if data_folder(data, run) != run.data else None
    recipe = check_tokenizer(recipe, run)
    is_text = DEMANDS[objective].examples == "text" and data.form == "text"
    n_labels = 0
    if is_text and is_token_file(data.source):
        told = f"{open_ids(data).train.n_tokens:,} tokens are ready in {data.source}"
    elif prepared is not None:
        tokens = len(Shards(prepared / "train").tokens)
        told = f"{tokens:,} tokens are prepared in {prepared}"
    elif is_text:
        reading: dict[str, Any] = {name: getattr(data, name) for name in HOW_TEXT_IS_READ}
        files = open_corpus(data.source, **reading).files
        if data.validation is not None:
            open_corpus(data.validation, **reading)
        size = sum(file.size() for file in files)
        told = f"{len(files):,} files, {size / 2**20:,.1f} MiB as they are stored"
    else:
        train, validation = read_splits(objective, data, lambda text: None)
        labels = find_labels(objective, train, validation)
        n_labels = 1 if objective == "regression" else len(labels)
        told = f"{len(train):,} examples to learn from, {len(validation):,} to measure on"
        told += f", {len(labels)} labels" if labels else ""
    return replace(recipe, model=fit_head(recipe.model, objective, n_labels)), told


# ------------------------------------------------------------------------------------------------- bytes


def foresee(recipe: Recipe) -> Needs:
    """Count the bytes of a step, from tensors without values."""
    settings = recipe.train
    with FakeTensorMode():
        model = without_values(recipe)
        weights = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        learning = [p for p in model.parameters() if p.requires_grad]
        gradients = sum(p.nbytes for p in learning)
        learner = Learner(model, settings)
        with LiveBytes() as live:
            for _ in range(
                min(2, settings.accumulation)
            ):  # the first makes the gradients, others add to them
                one_pass(model, settings, torch.device("cpu"))
            passes = live.peak
            learner.move(1.0, 1.0)
            state = live.now - gradients
            peak = max(live.peak, passes + state)
    n_parameters = sum(p.numel() for p in model.parameters())
    n_learning = sum(p.numel() for p in learning)
    return Needs(n_parameters, n_learning, weights, gradients, state, max(0, peak - gradients - state))


def without_values(recipe: Recipe) -> Transformer:
    """The recipe's model with tensors that have shapes alone; call it in a FakeTensorMode."""
    with torch.device("meta"):
        model = Transformer(recipe.model)
    settings = recipe.train
    if settings.lora_rank:
        with torch.device("meta"):
            add_adapters(model, Lora(settings.lora_rank, settings.lora_alpha, settings.lora_on))
    made: dict[Tensor, Any] = {}  # so that tied weights stay tied
    for module in model.modules():
        for name, there in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if there not in made:
                empty = torch.empty(there.shape, dtype=there.dtype)
                is_parameter = isinstance(there, nn.Parameter)
                made[there] = nn.Parameter(empty, there.requires_grad) if is_parameter else empty
            setattr(module, name, made[there])
    if settings.checkpoint_activations:
        recompute_blocks(model)
    return model


def one_pass(model: Transformer, settings: TrainConfig, device: torch.device) -> None:
    """Forward and backward over one micro-batch of tokens 0, of the sizes that a run may have at most."""
    tokens = torch.zeros(rows_of(settings), settings.context_length, dtype=torch.long, device=device)
    config = model.config
    routing = None if config.experts is None else Routing()
    with torch.autocast(device.type, torch.bfloat16, enabled=settings.dtype == "bfloat16"):
        if config.shape == "encoder-decoder":
            outputs = model(tokens, source=tokens, routing=routing)
        else:
            outputs = model(tokens, documents=tokens if settings.document_mask else None, routing=routing)
    if config.head in ("lm", "masked"):
        loss, _ = token_loss(outputs, tokens)
    else:
        loss = outputs.float().square().sum()
    if config.experts is not None and routing is not None:
        loss = loss + sum(stack.loss(config.experts) for stack, _ in routing.stacks())
    (loss / tokens.numel()).backward()


def check_size(recipe: Recipe, device: torch.device) -> None:
    """Raise ValueError for a model or a batch that the device cannot hold, whatever else a step needs.

    Counted are the weights, their gradients and moments, and a batch of running text with its logits.
    """
    train, config = recipe.train, recipe.model
    if recipe.data.tokenizer is None:  # the vocabulary follows, and has 257 tokens at least
        config = config.replace(vocab_size=min(config.vocab_size, 257))
    with torch.device("meta"):
        n_weights = sum(p.numel() for p in Transformer(config).parameters())
    least = n_weights * 4 * (1 if train.lora_rank else 4)
    if DEMANDS[train.objective].examples == "text" and recipe.data.form == "text":
        least += train.batch_size * train.context_length * (16 + config.vocab_size * 2)
    memory = memory_of(device)
    if least > memory:
        raise ValueError(
            f"not enough memory: a step needs {least / 2**30:,.0f} GiB at least, and this machine has "
            f"{memory / 2**30:,.0f} ({device.type}); make the model, train.batch_size or "
            "train.context_length smaller"
        )


def memory_of(device: torch.device) -> int:
    """The bytes that a device has in all."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# -------------------------------------------------------------------------------------------------- time


def training_flops(recipe: Recipe) -> int:
    """Floating-point operations of one token in training, with all of the context seen."""
    with torch.device("meta"):
        model = Transformer(recipe.model)
    config = recipe.model.replace(max_len=recipe.train.context_length)
    return (4 if recipe.train.checkpoint_activations else 3) * forward_flops(config, model)


@torch.no_grad()
def matmul_rate(config: ModelConfig, device: torch.device, rows: int) -> float:
    """FLOPs per second of (rows, d_model) times (d_model, d_ff), the best of a few tries."""
    rows, depth, width = min(rows, 8192), min(config.d_model, 8192), min(config.ff_width, 8192)
    a, b = torch.ones(rows, depth, device=device), torch.ones(depth, width, device=device)
    best = math.inf
    began = time.perf_counter()
    while time.perf_counter() - began < 0.3:
        started = time.perf_counter()
        (a @ b).sum().item()
        best = min(best, time.perf_counter() - started)
    return 2 * rows * depth * width / best


def time_steps(recipe: Recipe, device: torch.device, n_steps: int = 4) -> float:
    """Median seconds of a pass with its optimizer step, the first one left out."""
    settings = recipe.train
    model = Transformer(recipe.model, seed=0).to(device)
    if settings.lora_rank:
        add_adapters(model, Lora(settings.lora_rank, settings.lora_alpha, settings.lora_on))
    if settings.checkpoint_activations:
        recompute_blocks(model)
    learner = Learner(model, settings)
    learner.set_rate(0.0)
    times = []
    for _ in range(n_steps):
        started = time.perf_counter()
        one_pass(model, settings, device)
        learner.move(1.0, 1.0)
        learner.optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return median(times[1:])


def spell(seconds: float) -> str:
    """A time in the unit that suits it.

    >>> spell(0.0123), spell(75.0), spell(7500.0), spell(2e5)
    ('12 ms', '75 s', '2.1 h', '2.3 days')
    """
    units = (("days", 86_400, 1.5), ("h", 3600, 1.5), ("min", 60, 2), ("s", 1, 1))
    for name, size, least in units:
        if seconds >= size * least:
            amount = seconds / size
            return f"{amount:.1f} {name}" if amount < 10 or name == "days" else f"{amount:.0f} {name}"
    return f"{1000 * seconds:.0f} ms"

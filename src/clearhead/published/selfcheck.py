"""The parity table that a user can run again: do the models give the numbers they should, on this machine?

Each family's tiny model (twins.py), with every tensor random, or one given model, is run along every path:

    plain, hidden states    a whole pass; what every layer gives
    right padded, left padded   a batch of sequences of different lengths, at the real tokens
    cached                  token by token
    batched                 each sequence in the batch and alone
    gradients               of a loss, each relative to its tensor's largest
    bf16, float64           the same pass in narrower and in wider numbers
    files, export           written again: the same bytes; read by `transformers`: the same numbers

The other side is `transformers` (eager attention, float32, on the CPU) where it is installed, and else our
own plain pass in float64.
"""

import copy
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import load_file
from torch import Tensor, nn

from clearhead.model.stack import Stack
from clearhead.model.transformer import Transformer
from clearhead.published.mapping import Json, pair_names, read_config
from clearhead.published.models import load, save
from clearhead.published.twins import TWINS, model_type
from clearhead.published.weights import FAMILIES, Origin, find_family, fitting_class, own_tensors

TOLERANCE = 1e-5
LOOSER = {"t5 v1.1": 2e-5}  # unscaled scores, up to 40: their own two ways of attention differ as much
BF16_TOLERANCE = 0.1  # relative to the largest output: 8 bits in a number, some tens of operations
DEEPER = 3  # float32 against float64 in a model of many layers, whose roundings add up
LENGTHS = (24, 7, 17)
TARGETS = (12, 17, 5)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    family: str
    path: str
    max_abs_diff: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the difference is small enough; one that is no number is not."""
        return self.max_abs_diff <= self.tolerance

    def to_dict(self) -> Json:
        """The line as JSON values."""
        return {
            "family": self.family,
            "path": self.path,
            "max_abs_diff": self.max_abs_diff,
            "tolerance": self.tolerance,
            "ok": self.ok,
        }


# The columns of the table: a word for each path.
COLUMNS = {
    "plain": "plain",
    "hidden states": "hidden",
    "right padded": "right",
    "left padded": "left",
    "batched": "batched",
    "cached": "cached",
    "loss": "loss",
    "gradients": "slopes",
    "bf16": "bf16",
    "float64": "float64",
    "files": "files",
    "export": "export",
}


def table_head() -> str:
    """The first two lines of the table, in Markdown."""
    names = [f"{'family':<13}", *(f"{name:>7}" for name in COLUMNS.values())]
    rules = [f"{'':-<13}", *(f"{':':->7}" for _ in COLUMNS)]
    return f"| {' | '.join(names)} |\n| {' | '.join(rules)} |"


def table_line(rows: list[Row]) -> str:
    """One family's line of the table, in Markdown; a number above its tolerance has an exclamation mark."""
    found = {row.path: f"{row.max_abs_diff:.0e}{'' if row.ok else '!'}" for row in rows}
    cells = [found.get(path, "--").replace("0e+00", "0") for path in COLUMNS]
    return f"| {rows[0].family:<13} | {' | '.join(f'{cell:>7}' for cell in cells)} |"


def blank_note(rows: list[Row]) -> str | None:
    """Why cells of the table are empty that `transformers` would fill; None if it did."""
    paths = {row.path for row in rows}
    if "float64" in paths or not paths:
        return None
    whole = "files" in paths  # a tiny model, on all paths
    blank = [
        COLUMNS[path] for path in (("loss", "gradients", "float64", "export") if whole else ("float64",))
    ]
    there = find_spec("transformers") is not None
    why = "transformers does not open this model" if there else "the package transformers is not installed"
    return (
        f"{why}: the other side is our own pass in float64, and -- stands in {', '.join(blank)}"
        f"{'' if there else '; pip install transformers fills them'}"
    )


class Batch(NamedTuple):
    """Inputs of a pass: tokens and mask (True = real), and those of the source of an encoder-decoder."""

    tokens: Int[Tensor, "B T"]
    mask: Bool[Tensor, "B T"]
    source: Int[Tensor, "B S"] | None = None
    source_mask: Bool[Tensor, "B S"] | None = None

    def row(self, index: int) -> "Batch":
        """One sequence alone, without its padding."""
        tokens, mask = self.tokens[index, self.mask[index]][None], self.mask[index, self.mask[index]][None]
        if self.source is None or self.source_mask is None:
            return Batch(tokens, mask)
        real = self.source_mask[index]
        return Batch(tokens, mask, self.source[index, real][None], real[real][None])


def selfcheck(families: list[str] | None = None, device: str | torch.device = "cpu") -> Iterator[Row]:
    """Check a tiny random model of each family (None: all), and yield the lines of the table.

    An unknown family is a ValueError that lists the known ones.
    """
    for name in families or TWINS:
        if name not in TWINS:
            raise ValueError(f"there is no family {name!r:.60}; known: {', '.join(TWINS)}")
        tolerance = LOOSER.get(name, TOLERANCE)
        with tempfile.TemporaryDirectory() as folder, transformers_quietly() as library:
            torch.manual_seed(0)
            if library is None:
                ours, theirs = our_twin(name), None
            else:
                theirs = their_twin(library, name)
                theirs.save_pretrained(Path(folder) / "theirs")
                ours, _ = load(Path(folder) / "theirs")
            yield from check_model(name, ours, theirs, tolerance, device)
            yield from check_training(name, ours, theirs, tolerance, device)
            yield from check_files(name, ours, theirs, Path(folder))


def check_model(
    name: str,
    ours: Transformer,
    theirs: Any = None,
    tolerance: float | None = None,
    device: str | torch.device = "cpu",
) -> Iterator[Row]:
    """Check a model in float32 against `theirs`, the same of `transformers`, or else against float64.

    tolerance: None takes 1e-5 of the largest output, at least 1e-5, and compares hidden states relative to
        the largest of their layer.
    """
    ours = ours.float().to(device)
    wide = None if theirs is not None else copy.deepcopy(ours).cpu().double()
    wanted_from = wide if theirs is None else theirs
    whole = make_batch(ours, "right", equal=True)
    with torch.no_grad():
        plain = run(wanted_from, whole)
        given, tolerance = tolerance, tolerance or TOLERANCE * max(1.0, plain.abs().max().item())

        def row(path: str, difference: float, allowed: float | None = None) -> Row:
            return Row(name, path, difference, tolerance if allowed is None else allowed)

        found = run(ours, whole, device)
        yield row("plain", gap(found, plain))
        yield row(
            "hidden states", max(state_gaps(ours, wanted_from, whole, device, given)), given or TOLERANCE
        )
        alone = []
        for side in ("right", "left"):
            batch = make_batch(ours, side)
            rows = real_rows(run(ours, batch, device), batch)
            pairs = [(batch.row(index), kept) for index, kept in enumerate(rows)]
            yield row(f"{side} padded", max(gap(run(wanted_from, one)[0], kept) for one, kept in pairs))
            alone += [gap(run(ours, one, device)[0], kept) for one, kept in pairs]
        yield row("batched", max(alone))
        if ours.config.shape != "encoder" and per_token(found, whole):
            yield row("cached", gap(run_cached(ours, whole, device), plain))
        scale = plain.abs().max().item()
        narrow = run(copy.deepcopy(ours).bfloat16(), whole, device)
        reference = plain if theirs is None else run(copy.deepcopy(theirs).bfloat16(), whole)
        yield row("bf16", narrow_gap(ours, narrow, reference), BF16_TOLERANCE * scale)
        if theirs is not None:
            double = copy.deepcopy(ours).cpu().double()
            allowed = TOLERANCE * max(1.0, scale)
            yield row("float64", gap(found, run(double, whole)), allowed if given else DEEPER * allowed)


def check_training(
    name: str, ours: Transformer, theirs: Any, tolerance: float, device: str | torch.device
) -> Iterator[Row]:
    """Check the loss and all gradients, relative, of a padded batch, with dropout off."""
    if theirs is None:
        return
    batch = make_batch(ours, "right")
    losses = []
    for model in (ours, theirs):
        model.zero_grad()
        output = torch.cat(real_rows(run(model, batch, device if model is ours else "cpu"), batch))
        targets = torch.arange(len(output)) * 7 % output.shape[-1]
        losses.append(nn.functional.cross_entropy(output, targets))
        losses[-1].backward()
    yield Row(name, "loss", abs((losses[0] - losses[1]) / losses[1]).item(), tolerance)
    yield Row(name, "gradients", gradient_gap(ours, theirs), tolerance)


def check_files(name: str, ours: Transformer, theirs: Any, folder: Path) -> Iterator[Row]:
    """Check that saving gives the same bytes again, and that `transformers` reads from them what it wrote."""
    save(ours, None, folder / "ours")
    again, _ = load(folder / "ours")
    batch = make_batch(ours, "right", equal=True)
    with torch.no_grad():
        if theirs is None:
            save(again, None, folder / "theirs")
        one, other = ((folder / side / "model.safetensors") for side in ("ours", "theirs"))
        yield Row(name, "files", float(differing_tensors(one, other)), 0.0)
        if theirs is not None:
            reread = type(theirs).from_pretrained(
                folder / "ours", dtype=torch.float32, attn_implementation="eager"
            )
            yield Row(name, "export", gap(run(reread.eval(), batch), run(theirs, batch)), 0.0)


def differing_tensors(one: Path, other: Path) -> int:
    """How many tensors of two files differ in name, type, shape or any bit."""
    first, second = load_file(one), load_file(other)
    odd = first.keys() ^ second.keys()
    for name in first.keys() & second.keys():
        a, b = first[name], second[name]
        alike = a.dtype == b.dtype and a.shape == b.shape
        if not alike or not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            odd |= {name}
    return len(odd)


# ----------------------------------------------------------------------------------------------------- models


def our_twin(name: str) -> Transformer:
    """The tiny model of a family, ours alone, with every tensor random."""
    class_name, settings = TWINS[name]
    settings = settings | {"model_type": model_type(name), "architectures": [class_name]}
    family, class_name = find_family(settings)
    model = Transformer(read_config(family, settings, class_name)).eval()
    model.origin = Origin(family.model_type, settings, None)
    randomise(list(own_tensors(model).values()))
    return model


def their_twin(library: Any, name: str) -> Any:
    """The tiny model of a family in `transformers`, with every tensor random that is saved."""
    class_name, settings = TWINS[name]
    model_class = getattr(library, class_name)
    model = model_class(model_class.config_class(**settings, attn_implementation="eager")).eval()
    saved = model.state_dict(keep_vars=True)
    computed = {id(saved[key]) for key in model._keys_to_ignore_on_save or ()}
    randomise([tensor for tensor in saved.values() if id(tensor) not in computed])
    return model


def randomise(tensors: list[Tensor]) -> None:
    """Give every tensor random numbers that keep a pass in proportion; gains stay around their start."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in {id(tensor): tensor for tensor in tensors if tensor.is_floating_point()}.values():
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.dim() < 2 or 1 in tensor.shape[:-1]:
                tensor.add_(0.2 * noise)
            else:
                tensor.copy_(noise / tensor.shape[-1] ** 0.5)


@contextmanager
def transformers_quietly() -> Iterator[Any]:
    """The library without its progress bars and notes; None if it is not installed."""
    try:
        import transformers
    except ImportError:
        yield None
        return
    level = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield transformers
    finally:
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.logging.enable_progress_bar()


def open_theirs(folder: Path, ours: Transformer) -> Any:
    """The model of a folder in `transformers`, in float32; None if the library is not installed."""
    with transformers_quietly() as library:
        if library is None or ours.origin is None:
            return None
        family = FAMILIES[ours.origin.model_type]
        model_class = getattr(library, fitting_class(family, ours.config, ours.origin.settings))
        return model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


# ----------------------------------------------------------------------------------------------------- passes


def make_batch(model: Transformer, side: str, equal: bool = False) -> Batch:
    """Random tokens of three lengths, padded at one side; `equal`: of one length."""
    config = model.config
    if config.shape != "encoder-decoder":
        return Batch(*make_tokens(config.vocab_size, LENGTHS, side, equal))
    source = make_tokens(config.source_vocab_size or config.vocab_size, LENGTHS, side, equal)
    return Batch(*make_tokens(config.vocab_size, TARGETS, side, equal), *source)


def make_tokens(
    vocab_size: int, lengths: tuple[int, ...], side: str, equal: bool
) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Random tokens, none of them of the first ids, which are special in the twins; and their mask."""
    width = max(lengths)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(4, vocab_size, (len(lengths), width), generator=generator)
    places, counts = torch.arange(width)[None], torch.tensor(lengths)[:, None]
    mask = places < counts if side == "right" else places >= width - counts
    mask = mask | equal
    return tokens.masked_fill(~mask, 1), mask


def run(model: Any, batch: Batch, device: str | torch.device = "cpu") -> Float[Tensor, "..."]:
    """What a model makes of a batch, ours or theirs, on the CPU in its own type."""
    padded = not bool(batch.mask.all())
    if isinstance(model, Transformer):
        moved = [None if part is None else part.to(device) for part in batch]
        tokens, mask, source, source_mask = moved
        whole_source = batch.source_mask is None or bool(batch.source_mask.all())
        return model(
            tokens,
            mask=mask if padded else None,
            source=source,
            source_mask=None if whole_source else source_mask,
        ).cpu()
    if batch.source is None:
        return output_of(model(input_ids=batch.tokens, attention_mask=batch.mask.long() if padded else None))
    assert batch.source_mask is not None
    return output_of(
        model(
            input_ids=batch.source,
            attention_mask=batch.source_mask.long(),
            decoder_input_ids=batch.tokens,
            decoder_attention_mask=batch.mask.long(),
        )
    )


def output_of(found: Any) -> Float[Tensor, "..."]:
    """Logits, or the hidden states of a model without a head."""
    for name in ("logits", "prediction_logits", "last_hidden_state"):
        if getattr(found, name, None) is not None:
            return getattr(found, name)
    return torch.stack([found.start_logits, found.end_logits], dim=-1)


def run_cached(model: Transformer, batch: Batch, device: str | torch.device) -> Float[Tensor, "..."]:
    """Three tokens at once, then one by one, with a cache."""
    tokens = batch.tokens.to(device)
    memory = None if batch.source is None else model.encode(batch.source.to(device))
    cache = model.new_cache(len(tokens), tokens.shape[1])
    cuts = [0, *range(3, tokens.shape[1] + 1)]
    steps = [model(tokens[:, start:stop], memory=memory, cache=cache) for start, stop in pairwise(cuts)]
    return torch.cat(steps, 1).cpu()


def per_token(output: Tensor, batch: Batch) -> bool:
    """Whether a model gives something at every token, and not one thing per sequence."""
    return output.shape[:2] == batch.tokens.shape


def real_rows(output: Tensor, batch: Batch) -> list[Tensor]:
    """What a batch gives at the real tokens of each sequence."""
    if not per_token(output, batch):
        return list(output)
    return [output[index, batch.mask[index]] for index in range(len(output))]


def gap(one: Tensor, other: Tensor) -> float:
    """The largest difference; infinite if one of the two is not finite."""
    difference = (one.double() - other.double()).abs().max().item()
    return difference if difference == difference else float("inf")


def narrow_gap(model: Transformer, one: Tensor, other: Tensor) -> float:
    """The largest difference; in a mixture of experts that of the median token.

    Rounding may send a token to another expert, and such a token has another result.
    """
    if model.config.experts is None or one.dim() < 3:
        return gap(one, other)
    return (one.double() - other.double()).abs().amax(-1).median().item()


def state_gaps(
    ours: Transformer, other: Any, batch: Batch, device: str | torch.device, absolute: object
) -> list[float]:
    """The difference of every layer's hidden states, or else relative to the largest of each."""
    found = states_of(ours, lambda: run(ours, batch, device))
    if isinstance(other, Transformer):
        wanted = states_of(other, lambda: run(other, batch))
    elif batch.source is None:
        wanted = list(other(input_ids=batch.tokens, output_hidden_states=True).hidden_states)
    else:
        output = other(input_ids=batch.source, decoder_input_ids=batch.tokens, output_hidden_states=True)
        wanted = [*output.encoder_hidden_states, *output.decoder_hidden_states]
    sizes = [1.0 if absolute else max(1.0, state.abs().max().item()) for state in wanted]
    gaps = [gap(one.cpu(), two) for one, two in zip(found, wanted, strict=True)]
    return [difference / size for difference, size in zip(gaps, sizes, strict=True)]


def states_of(model: Transformer, call: Callable[[], Any]) -> list[Tensor]:
    """What enters each stack's first block and what every block gives, the last after the final norm."""
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    stacks.sort(key=lambda stack: stack.causal)
    kept: dict[int, list[Tensor]] = {id(stack): [] for stack in stacks}
    hooks = []
    for stack in stacks:
        states = kept[id(stack)]
        hooks.append(stack.blocks[0].register_forward_pre_hook(keep_input(states)))
        hooks += [module.register_forward_hook(keep_output(states)) for module in (*stack.blocks, stack.norm)]
    try:
        call()
    finally:
        for hook in hooks:
            hook.remove()
    return [state for stack in stacks for state in [*kept[id(stack)][:-2], kept[id(stack)][-1]]]


def keep_input(states: list[Tensor]) -> Callable[..., None]:
    """A hook that keeps what enters a module."""
    return lambda module, inputs: states.append(inputs[0])


def keep_output(states: list[Tensor]) -> Callable[..., None]:
    """A hook that keeps what a module gives."""
    return lambda module, inputs, output: states.append(output)


def gradient_gap(ours: Transformer, theirs: Any) -> float:
    """The largest difference of a gradient, relative to its tensor's largest.

    Ours are put into the form of the family's files, whose names the parameters of `transformers` have.
    """
    assert ours.origin is not None
    family = FAMILIES[ours.origin.model_type]
    tensors = own_tensors(ours)
    class_name = fitting_class(family, ours.config, ours.origin.settings)
    wanted = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    largest = max(gradient.abs().max().item() for gradient in wanted.values())
    worst = 0.0
    for pair in pair_names(family, class_name, tensors):
        gradients = [tensors[name].grad for name in pair.ours]
        if any(gradient is None for gradient in gradients):
            continue
        made = pair.op.write([gradient.cpu() for gradient in gradients if gradient is not None])
        for name, gradient in zip(pair.theirs, made, strict=True):
            if name in wanted:
                scale = max(wanted[name].abs().max().item(), 1e-2 * largest)  # some are 0 but for rounding
                worst = max(worst, gap(gradient, wanted[name]) / scale)
    return worst

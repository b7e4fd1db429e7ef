"""A tiny random model of `transformers` is the twin that a published family must equal.

Every tensor is random, also those that start at 0 or 1 (biases, gains, buffers that are saved), so that a
forgotten one is seen. The checks compare with HF's eager attention in float32.
"""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from clearhead import load, save
from clearhead.model.transformer import Transformer
from clearhead.published.mapping import find_class, pair_names
from clearhead.published.weights import FAMILIES, own_tensors

LENGTH = 24


def tiny(
    transformers: Any, class_name: str, seed: int = 0, options: dict[str, Any] | None = None, **settings: Any
) -> Any:
    """A model of this class with random tensors, in eval mode, with eager attention.

    settings: of its config; options: of the class beside it.
    """
    model_class = getattr(transformers, class_name)
    settings = {"attn_implementation": "eager"} | settings
    model = model_class(model_class.config_class(**settings), **options or {}).eval()
    generator = torch.Generator().manual_seed(seed)
    saved = model.state_dict(keep_vars=True)
    computed = {id(saved[name]) for name in model._keys_to_ignore_on_save or ()}
    with torch.no_grad():
        for tensor in {id(t): t for t in saved.values()}.values():
            if not tensor.is_floating_point() or id(tensor) in computed:
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.dim() < 2 or 1 in tensor.shape[:-1]:  # a gain or a bias: around where it starts
                tensor.add_(0.2 * noise)
            else:
                tensor.copy_(noise / tensor.shape[-1] ** 0.5)
    return model


def their_config(transformers: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """config.json as today's `transformers` writes it, from one of any age."""
    config = transformers.AutoConfig.for_model(**copy.deepcopy(settings))
    return json.loads(config.to_json_string(use_diff=False))


def padded_batch(
    vocab_size: int, lengths: tuple[int, ...], side: str, seed: int = 1
) -> tuple[Tensor, Tensor]:
    """Random tokens and their mask (True = real); id 0 is padding and nothing else."""
    tokens = torch.randint(
        1, vocab_size, (len(lengths), LENGTH), generator=torch.Generator().manual_seed(seed)
    )
    places = torch.arange(LENGTH)[None]
    counts = torch.tensor(lengths)[:, None]
    mask = places < counts if side == "right" else places >= LENGTH - counts
    return tokens.masked_fill(~mask, 0), mask


def output_of(found: Any) -> Tensor:
    """Logits, or the hidden states of a model without a head."""
    for name in ("logits", "last_hidden_state"):
        if getattr(found, name, None) is not None:
            return getattr(found, name)
    return torch.stack([found.start_logits, found.end_logits], dim=-1)


def call_theirs(theirs: Any, tokens: Tensor, mask: Tensor | None = None, **more: Any) -> Any:
    """Their output; with a mask, positions are counted over real tokens, as `generate` does."""
    if mask is not None:
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        more = {"attention_mask": mask.long(), "position_ids": positions} | more
    return theirs(input_ids=tokens, **more)


def gap(one: Tensor, other: Tensor, mask: Tensor | None = None) -> float:
    """The largest difference, at real tokens where the outputs are per token."""
    assert one.shape == other.shape, f"{tuple(one.shape)} and {tuple(other.shape)}"
    assert torch.isfinite(one).all()
    difference = (one - other).abs()
    if mask is not None and difference.shape[:2] == mask.shape and difference.dim() == 3:
        difference = difference[mask]
    return difference.max().item()


def hidden_states(model: Transformer, run: Callable[[], Any]) -> list[Tensor]:
    """What enters the first block, and what every block gives, the last after the final norm."""
    found: list[Tensor] = []
    blocks, norm = model.stack.blocks, model.stack.norm
    hooks = [blocks[0].register_forward_pre_hook(lambda m, inputs: found.append(inputs[0]))]
    hooks += [block.register_forward_hook(lambda m, i, output: found.append(output)) for block in blocks]
    hooks.append(norm.register_forward_hook(lambda m, i, output: found.append(output)))
    run()
    for hook in hooks:
        hook.remove()
    return [*found[:-2], found[-1]]


def check_decoder(theirs: Any, folder: Path, *, atol: float = 1e-5, exempt: bool = False) -> Transformer:
    """Plain, padded on either side, every layer, cached, row by row, trained, and saved again.

    `exempt`: the rotary scaling depends on the longest sequence of the call, so that rows and steps differ
    from the batch, in both libraries.
    """
    theirs.save_pretrained(folder / "theirs")
    ours, _ = load(folder / "theirs")
    vocab_size = ours.config.vocab_size
    gaps: dict[str, float] = {}
    with torch.no_grad():
        tokens, _ = padded_batch(vocab_size, (LENGTH, LENGTH), "right")
        if ours.config.head == "sequence":  # their batch looks for pads, and a row alone needs none
            tokens, _ = padded_batch(vocab_size, (LENGTH,), "right")
        expected = call_theirs(theirs, tokens, output_hidden_states=True)
        states = hidden_states(ours, lambda: gaps.update(plain=gap(ours(tokens), output_of(expected))))
        theirs_states = expected.hidden_states
        assert len(states) == len(theirs_states)
        for layer, (one, other) in enumerate(zip(states, theirs_states, strict=True)):
            gaps[f"layer {layer}"] = gap(one, other)
        for side in ("right", "left"):
            padded, mask = padded_batch(vocab_size, (24, 7, 17), side)
            wanted = output_of(call_theirs(theirs, padded, mask))
            found = ours(padded, mask=mask)
            gaps[f"{side} padding"] = gap(found, wanted, mask)
            if not exempt:
                for row, real in enumerate(mask):
                    alone = ours(padded[row, real][None])[0]
                    kept = found[row] if ours.config.head == "sequence" else found[row, real]
                    gaps[f"{side} padding, row {row} alone"] = (alone - kept).abs().max().item()
        if ours.config.head in ("lm", "none"):
            gaps |= cached_gaps(theirs, ours, tokens, output_of(expected), exempt)
    too_far = {name: value for name, value in gaps.items() if not value <= atol}
    assert not too_far, f"{theirs.config.model_type}: {too_far}"
    check_gradients(theirs, ours, folder)
    check_round_trip(theirs, ours, folder, lambda model: output_of(call_theirs(model, tokens)))
    return ours


def cached_gaps(
    theirs: Any, ours: Transformer, tokens: Tensor, full: Tensor, exempt: bool
) -> dict[str, float]:
    """A prefix of 3 and then token by token, with a cache, against their cached steps and the whole pass."""
    cache, memory, steps = ours.new_cache(len(tokens), LENGTH), None, []
    gaps = {}
    for start, stop in [(0, 3), *((t, t + 1) for t in range(3, LENGTH))]:
        step = call_theirs(theirs, tokens[:, start:stop], cache=memory, use_cache=True)
        memory = step.cache
        steps.append(ours(tokens[:, start:stop], cache=cache))
        gaps[f"cached step {start}"] = gap(steps[-1], output_of(step))
    if not exempt:
        gaps["cached, whole"] = gap(torch.cat(steps, 1), full)
    return gaps


def check_gradients(theirs: Any, ours: Transformer, folder: Path, rtol: float = 1e-5) -> None:
    """Loss and all gradients, relative to each tensor's largest, with left padding and dropout 0.

    Their gradients are saved as if they were weights, so that they stand under the names of the file.
    """
    tokens, mask = padded_batch(ours.config.vocab_size, (24, 7), "left", seed=2)
    logits = [output_of(call_theirs(theirs, tokens, mask)), ours(tokens, mask=mask)]
    losses = [some_loss(found, mask) for found in logits]
    assert abs(losses[0].item() - losses[1].item()) <= rtol * abs(losses[0].item())
    theirs.zero_grad()
    ours.zero_grad()
    for loss in losses:
        loss.backward()
    compare_gradients(theirs, ours, folder, rtol)


def some_loss(output: Tensor, mask: Tensor) -> Tensor:
    """Cross-entropy of each real position's (or the sequence's) numbers with some targets."""
    rows = output[mask] if output.dim() == 3 else output
    targets = torch.arange(len(rows)) * 7 % rows.shape[-1]
    return F.cross_entropy(rows, targets)


def compare_gradients(theirs: Any, ours: Transformer, folder: Path, rtol: float = 1e-5) -> None:
    """The gradients that stand in both models."""
    carrier = copy.deepcopy(theirs)
    gradients = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, parameter in carrier.named_parameters():
            gradient = gradients[name].grad
            parameter.copy_(torch.zeros_like(parameter) if gradient is None else gradient)
    carrier.save_pretrained(folder / "gradients")
    expected = load_file(folder / "gradients" / "model.safetensors")
    largest = max(tensor.abs().max().item() for tensor in expected.values())
    buffers = dict(theirs.named_buffers())
    for name, gradient in their_form(ours, lambda tensor: tensor.grad).items():
        if name in buffers:  # it is saved, but not trained there
            continue
        wanted = expected[name]
        scale = max(wanted.abs().max().item(), 1e-2 * largest)  # some are 0 up to rounding: keys' biases
        difference = (gradient - wanted).abs().max().item() / scale
        assert difference <= rtol, f"gradient of {name}: {difference}"


def their_form(ours: Transformer, value: Callable[[Tensor], Tensor | None]) -> dict[str, Tensor]:
    """Something that every parameter of ours has, in the file's shapes, under the file's names."""
    tensors = own_tensors(ours)
    family = FAMILIES[ours.origin.model_type]
    made = {}
    class_name = find_class(family, ours.config)
    assert class_name is not None
    for pair in pair_names(family, class_name, tensors):
        values = [value(tensors[name]) for name in pair.ours]
        if any(found is None for found in values):  # buffers have no gradient
            continue
        made |= zip(pair.theirs, pair.op.write([v for v in values if v is not None]), strict=True)
    return made


def check_round_trip(theirs: Any, ours: Transformer, folder: Path, run: Callable[[Any], Tensor]) -> None:
    """Saved again, the files are the same to the byte, and `transformers` computes the same from them."""
    save(ours, None, folder / "ours")
    before, after = (folder / name / "model.safetensors" for name in ("theirs", "ours"))
    one, other = load_file(before), load_file(after)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        same = torch.equal(tensor.view(torch.uint8), other[name].view(torch.uint8))
        assert same and tensor.dtype == other[name].dtype and tensor.shape == other[name].shape, name
    assert before.read_bytes() == after.read_bytes()
    again = (
        type(theirs).from_pretrained(folder / "ours", dtype=torch.float32, attn_implementation="eager").eval()
    )
    with torch.no_grad():
        assert torch.equal(run(again), run(theirs))
    reread, _ = load(folder / "ours")
    assert reread.config == ours.config

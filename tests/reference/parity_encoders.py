"""The checks of parity.py for encoders and encoder-decoders, against tiny random models of `transformers`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clearhead import load
from clearhead.model.stack import Stack
from clearhead.model.transformer import Transformer
from reference.parity import LENGTH, check_round_trip, compare_gradients, gap, output_of, some_loss

PAD = 1  # of every model here; no real token is one


def batch(
    vocab_size: int, lengths: tuple[int, ...], side: str = "right", seed: int = 1
) -> tuple[Tensor, Tensor]:
    """Random tokens as long as the longest row, and their mask (True = real)."""
    width = max(lengths)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, vocab_size, (len(lengths), width), generator=generator)
    places, counts = torch.arange(width)[None], torch.tensor(lengths)[:, None]
    mask = places < counts if side == "right" else places >= width - counts
    return tokens.masked_fill(~mask, PAD), mask


def states_of(stack: Stack, run: Callable[[], Any]) -> list[Tensor]:
    """What enters a stack's first block, and what every block gives, the last after the final norm."""
    found: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
        found.append(output)

    hooks = [stack.blocks[0].register_forward_pre_hook(lambda module, inputs: found.append(inputs[0]))]
    hooks += [module.register_forward_hook(keep) for module in (*stack.blocks, stack.norm)]
    run()
    for hook in hooks:
        hook.remove()
    return [*found[:-2], found[-1]]


def state_gaps(name: str, ours: list[Tensor], theirs: Any) -> dict[str, float]:
    """The differences of every layer's hidden states."""
    assert len(ours) == len(theirs)
    pairs = zip(ours, theirs, strict=True)
    return {f"{name} {layer}": gap(one, other) for layer, (one, other) in enumerate(pairs)}


def refuse_large(gaps: dict[str, float], atol: float, name: str) -> None:
    too_far = {path: value for path, value in gaps.items() if not value <= atol}
    assert not too_far, f"{name}: {too_far}"


# -------------------------------------------------------------------------------------------------- encoders


def check_encoder(theirs: Any, folder: Path, *, atol: float = 1e-5, same_files: bool = True) -> Transformer:
    """Plain, padded on either side, every layer, token types, row by row, trained, and saved again.

    `same_files` False: theirs hold tensors that nothing uses, so the files saved again differ.
    """
    theirs.save_pretrained(folder / "theirs")
    ours, _ = load(folder / "theirs")
    vocab_size, typed = ours.config.vocab_size, ours.config.n_token_types > 1
    tokens, _ = batch(vocab_size, (LENGTH, LENGTH))
    types = torch.arange(LENGTH).expand(2, -1) // 10 % 2
    gaps: dict[str, float] = {}
    with torch.no_grad():
        more = {"token_type_ids": types} if typed else {}
        expected = theirs(tokens, output_hidden_states=True, **more)
        expected_output = output_of(expected)

        def plain() -> None:
            found = ours(tokens, types=types if typed else None)
            gaps["plain"] = gap(found, expected_output)
            if getattr(expected, "pooler_output", None) is not None:
                gaps["pooler"] = gap(ours.head.pooled(found), expected.pooler_output)

        states = states_of(ours.encoder, plain)
        gaps |= state_gaps("layer", states, expected.hidden_states)
        for side in ("right", "left"):
            gaps |= padded_gaps(theirs, ours, side)
    refuse_large(gaps, atol, type(theirs).__name__)

    padded, mask = batch(vocab_size, (LENGTH, 7), seed=2)
    outputs = [output_of(theirs(padded, attention_mask=mask.long())), ours(padded, mask=mask)]
    backpropagate(theirs, ours, [some_loss(output, mask) for output in outputs], folder)
    if same_files:
        check_round_trip(theirs, ours, folder, lambda model: output_of(model(tokens)))
    return ours


def padded_gaps(theirs: Any, ours: Transformer, side: str) -> dict[str, float]:
    """A padded batch against theirs, and every row against the row alone."""
    padded, mask = batch(ours.config.vocab_size, (LENGTH, 7, 17), side)
    found = ours(padded, mask=mask)
    per_row = found.shape[:2] != padded.shape
    gaps = {}
    if not (side == "left" and per_row and ours.config.pool == "first"):  # theirs pools the padding then
        positions = (mask.cumsum(-1) - 1).clamp(min=0) + ours.config.position_offset
        more = {} if "distil" in theirs.config.model_type else {"position_ids": positions}
        if more or side == "right":
            wanted = output_of(theirs(padded, attention_mask=mask.long(), **more))
            gaps[f"{side} padding"] = gap(found, wanted, mask)
    for row, real in enumerate(mask):
        tokens = padded[row, real][None]
        kept = found[row] if per_row else found[row, real]
        gaps[f"{side} padding, row {row} alone"] = gap(ours(tokens)[0], kept)
        gaps[f"{side} padding, row {row} alone, theirs"] = gap(output_of(theirs(tokens))[0], kept)
    return gaps


def backpropagate(theirs: Any, ours: Transformer, losses: list[Tensor], folder: Path) -> None:
    """The losses are the same, and so are the gradients of all tensors, relative to each tensor's largest."""
    assert abs(losses[0].item() - losses[1].item()) <= 1e-5 * abs(losses[0].item())
    theirs.zero_grad()
    ours.zero_grad()
    for loss in losses:
        loss.backward()
    compare_gradients(theirs, ours, folder)


# ------------------------------------------------------------------------------------------ encoder-decoders


def check_encoder_decoder(theirs: Any, folder: Path, *, atol: float = 1e-5) -> Transformer:
    """Plain, padded source and target, every layer, cached, row by row, trained, and saved again."""
    theirs.save_pretrained(folder / "theirs")
    ours, _ = load(folder / "theirs")
    sources = ours.config.source_vocab_size or ours.config.vocab_size
    source, _ = batch(sources, (LENGTH, LENGTH))
    target, _ = batch(ours.config.vocab_size, (17, 17), seed=3)
    gaps: dict[str, float] = {}
    with torch.no_grad():
        expected = theirs(source, decoder_input_ids=target, output_hidden_states=True)

        def plain() -> None:
            gaps["plain"] = gap(ours(target, source=source), output_of(expected))

        decoded: list[Tensor] = []
        encoded = states_of(ours.encoder, lambda: decoded.extend(states_of(ours.decoder, plain)))
        gaps |= state_gaps("encoder", encoded, expected.encoder_hidden_states)
        gaps |= state_gaps("decoder", decoded, expected.decoder_hidden_states)
        if ours.config.head in ("lm", "none"):
            gaps |= step_gaps(ours, source, target, output_of(expected))
        for side in ("right", "left"):
            gaps |= padded_pair_gaps(theirs, ours, side)
    refuse_large(gaps, atol, type(theirs).__name__)

    padded, real = batch(sources, (LENGTH, 7), seed=4)
    target, mask = batch(ours.config.vocab_size, (12, 17), seed=5)
    more = {"attention_mask": real.long(), "decoder_attention_mask": mask.long()}
    outputs = [
        output_of(theirs(padded, decoder_input_ids=target, **more)),
        ours(target, mask=mask, source=padded, source_mask=real),
    ]
    backpropagate(theirs, ours, [some_loss(output, mask) for output in outputs], folder)
    check_round_trip(theirs, ours, folder, lambda m: output_of(m(source, decoder_input_ids=target)))
    return ours


def step_gaps(ours: Transformer, source: Tensor, target: Tensor, full: Tensor) -> dict[str, float]:
    """A prefix of 3 and then token by token, the source read once, against their whole pass."""
    cache, memory, steps = ours.new_cache(len(target), target.shape[1]), ours.encode(source), []
    for start, stop in [(0, 3), *((t, t + 1) for t in range(3, target.shape[1]))]:
        steps.append(ours(target[:, start:stop], memory=memory, cache=cache))
    return {"cached": gap(torch.cat(steps, 1), full)}


def padded_pair_gaps(theirs: Any, ours: Transformer, side: str) -> dict[str, float]:
    """Source and target of different lengths, padded on this side, against each pair alone."""
    source, source_mask = batch(
        ours.config.source_vocab_size or ours.config.vocab_size, (9, LENGTH, 14), side, seed=6
    )
    target, mask = batch(ours.config.vocab_size, (17, 4, 9), side, seed=7)
    found = ours(target, mask=mask, source=source, source_mask=source_mask)
    per_row = found.shape[:2] != target.shape
    gaps = {}
    if side == "right":  # their positions count padding on the left
        more = {"attention_mask": source_mask.long(), "decoder_attention_mask": mask.long()}
        if not per_row:
            wanted = output_of(theirs(source, decoder_input_ids=target, **more))
            gaps["right padding"] = gap(found, wanted, mask)
    for row, (real, said) in enumerate(zip(source_mask, mask, strict=True)):
        one, other = source[row, real][None], target[row, said][None]
        kept = found[row] if per_row else found[row, said]
        gaps[f"{side} padding, row {row} alone"] = gap(ours(other, source=one)[0], kept)
        wanted = output_of(theirs(one, decoder_input_ids=other))[0]
        gaps[f"{side} padding, row {row} alone, theirs"] = gap(wanted, kept)
    return gaps

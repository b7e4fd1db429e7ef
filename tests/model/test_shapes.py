"""The three shapes: equal to torch.nn.Transformer, and each sequence gets its own result everywhere."""

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from clearhead.model.config import ModelConfig
from clearhead.model.stack import Stack
from clearhead.model.transformer import Transformer

TOLERANCE = {"atol": 1e-5, "rtol": 0}
POSITIONS = ["rotary", "learned", "sinusoidal", "sinusoidal_concat", "relative", "none"]
SHAPES = ["decoder", "encoder", "encoder-decoder"]
PLACEMENTS = ["pre", "post", "branch", "sandwich"]


def randomised(module: nn.Module, seed: int = 1) -> Any:
    """Every weight random, of a size that keeps the numbers around 1; gains around 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() > 1:
                weight.copy_(noise / weight.shape[-1] ** 0.5)
            else:
                weight.copy_(0.2 * noise + ("norm" in name and name.endswith("weight")))
    return module.eval()


def build(shape: str, **changes: Any) -> Transformer:
    """A small model of unequal sizes."""
    sizes: dict[str, Any] = {
        "shape": shape,
        "vocab_size": 61,
        "max_len": 80,
        "d_model": 24,
        "n_layers": 2,
        "n_heads": 6,
        "d_ff": 40,
    }
    if changes.get("positions") == "relative":
        sizes |= {"relative_buckets": 10, "relative_max_distance": 16}
    if shape == "encoder-decoder":
        sizes |= {"n_encoder_layers": 3, "n_encoder_heads": 3, "encoder_d_ff": 56, "source_vocab_size": 47}
    return randomised(Transformer(ModelConfig(**sizes | changes)))


def rows(lengths: list[int], vocab_size: int = 47, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator) for length in lengths]


def pad(sequences: list[Tensor], side: str, extra: int = 0) -> tuple[Tensor, Tensor]:
    """The sequences as one batch, with `extra` columns that no sequence needs, and the mask."""
    width = max(map(len, sequences)) + extra
    tokens = torch.full((len(sequences), width), 7)
    mask = torch.zeros(len(sequences), width, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        place = slice(0, len(sequence)) if side == "right" else slice(width - len(sequence), width)
        tokens[row, place], mask[row, place] = sequence, True
    return tokens, mask


# ------------------------------------------------------------------------------------------ the 2017 original


def original_pair(norm_first: bool, final_norms: bool, activation: str) -> tuple[nn.Transformer, Transformer]:
    """torch.nn.Transformer and ours, with its weights: 2 + 3 layers, width 24, 4 heads, inner width 40."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its nested tensors are a prototype, and not for pre-norm
        theirs = nn.Transformer(
            24, 4, 2, 3, 40, 0.0, activation, layer_norm_eps=1e-5, batch_first=True, norm_first=norm_first
        )
    if not final_norms:
        theirs.encoder.norm = theirs.decoder.norm = None
    randomised(theirs)
    ours = Transformer(
        ModelConfig(
            shape="encoder-decoder",
            vocab_size=61,
            d_model=24,
            n_layers=3,
            n_encoder_layers=2,
            n_heads=4,
            d_ff=40,
            activation="relu" if activation == "relu" else "gelu",
            gated=False,
            qkv_bias=True,
            out_bias=True,
            ff_bias=True,
            norm="layer",
            norm_eps=1e-5,
            norm_placement="pre" if norm_first else "post",
            final_norm=final_norms,
            positions="none",
            head="none",
        )
    ).eval()
    where = "norm" if norm_first else "post_norm"
    parts = {"self_attn": "attn", "multihead_attn": "cross"}
    state: dict[str, Tensor] = {"embed.weight": torch.randn(61, 24)}
    for name, tensor in theirs.state_dict().items():
        stack, *path = name.split(".")
        if path[0] == "norm":
            state[f"{stack}.norm.{path[1]}"] = tensor
            continue
        _, layer, part, *rest = path
        block = f"{stack}.blocks.{layer}"
        if part in parts and rest[0].startswith("in_proj"):
            for letter, piece in zip("qkv", tensor.chunk(3), strict=True):
                state[f"{block}.{parts[part]}.{letter}.{rest[0].removeprefix('in_proj_')}"] = piece
        elif part in parts:
            state[f"{block}.{parts[part]}.o.{rest[1]}"] = tensor
        elif part.startswith("linear"):
            state[f"{block}.ff.{'up' if part == 'linear1' else 'down'}.{rest[0]}"] = tensor
        else:
            order = ["attn", "ff"] if stack == "encoder" else ["attn", "cross", "ff"]
            state[f"{block}.{order[int(part[-1]) - 1]}_{where}.{rest[0]}"] = tensor
    ours.load_state_dict(state)
    return theirs, ours


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("final_norms", [True, False], ids=["final norms", "no final norms"])
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre", "post"])
def test_the_weights_of_torch_nn_transformer_give_its_numbers(
    norm_first: bool, final_norms: bool, activation: str
) -> None:
    """With padding in source and target, in eval and, dropout 0, in training; gradients of the inputs too."""
    theirs, ours = original_pair(norm_first, final_norms, activation)
    source, source_mask = pad(rows([9, 4, 7]), "right", extra=2)
    target, mask = pad(rows([6, 8, 1], seed=1), "right")
    causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1]).isinf()
    for training in (False, True):
        theirs.train(training)
        ours.train(training)
        x, y = (ours.embed(tokens).detach().requires_grad_() for tokens in (source, target))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = theirs(
                x,
                y,
                tgt_mask=causal,
                src_key_padding_mask=~source_mask,
                tgt_key_padding_mask=~mask,
                memory_key_padding_mask=~source_mask,
            )
        found = ours(target, mask=mask, source=source, source_mask=source_mask)
        torch.testing.assert_close(found[mask], expected[mask], **TOLERANCE)
    expected[mask].square().sum().backward()
    wanted = x.grad, y.grad
    x, y = (tensor.detach().requires_grad_() for tensor in (x, y))
    memory = ours.decoder.remember(ours.encoder(x, mask=source_mask), source_mask)
    ours.decoder(y, mask=mask, memory=memory)[mask].square().sum().backward()
    for gradient, other, real in zip((x.grad, y.grad), wanted, (source_mask, mask), strict=True):
        assert gradient is not None and other is not None
        torch.testing.assert_close(gradient[real], other[real], atol=1e-4, rtol=1e-5)


def test_the_original_in_float64_differs_by_rounding_alone() -> None:
    theirs, ours = original_pair(norm_first=False, final_norms=True, activation="relu")
    theirs.double(), ours.double()
    source, target = rows([9])[0][None], rows([6], seed=1)[0][None]
    causal = nn.Transformer.generate_square_subsequent_mask(6).isinf()
    expected = theirs(ours.embed(source), ours.embed(target), tgt_mask=causal)
    torch.testing.assert_close(ours(target, source=source), expected, atol=1e-12, rtol=0)


# ------------------------------------------------------------------------------- each sequence's own result


def call(model: Transformer, tokens: Tensor, mask: Tensor | None, source: Any = None) -> Tensor:
    """The model's output; `source`: tokens and mask, for an encoder-decoder."""
    if model.config.shape != "encoder-decoder":
        return model(tokens, mask=mask)
    return model(tokens, mask=mask, source=source[0], source_mask=source[1])


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_padding_changes_nothing(shape: str, positions: str, side: str) -> None:
    """Rows of lengths 9, 1 and 6, of sources 4, 11 and 2 tokens: the same numbers as each pair alone."""
    model = build(shape, positions=positions)
    targets, sources = rows([9, 1, 6]), rows([4, 11, 2], seed=1)
    tokens, mask = pad(targets, side)
    found = call(model, tokens, mask, pad(sources, side))
    assert found.isfinite().all()
    for row, (target, source) in enumerate(zip(targets, sources, strict=True)):
        alone = call(model, target[None], None, (source[None], None))[0]
        torch.testing.assert_close(found[row, mask[row]], alone, **TOLERANCE)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("positions", POSITIONS)
def test_0_5_or_50_source_pads_give_the_same_logits(positions: str, side: str) -> None:
    model = build("encoder-decoder", positions=positions)
    sources, target = rows([17, 8]), torch.stack(rows([6, 6], seed=1))
    results = []
    for extra in (0, 5, 50):
        source, mask = pad(sources, side, extra)
        results.append(model(target, source=source, source_mask=mask))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], **TOLERANCE)


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=4),
    st.sampled_from(["right", "left"]),
    st.sampled_from(PLACEMENTS),
    st.sampled_from(POSITIONS),
)
@settings(deadline=None, max_examples=25)
def test_any_lengths_in_any_arrangement(
    lengths: list[tuple[int, int]], side: str, placement: str, positions: str
) -> None:
    model = build("encoder-decoder", norm_placement=placement, positions=positions)
    sources, targets = (rows([pair[i] for pair in lengths], seed=i) for i in (0, 1))
    tokens, mask = pad(targets, side)
    found = call(model, tokens, mask, pad(sources, side))
    for row, (source, target) in enumerate(zip(sources, targets, strict=True)):
        alone = model(target[None], source=source[None])[0]
        torch.testing.assert_close(found[row, mask[row]], alone, **TOLERANCE)


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("positions", POSITIONS)
def test_documents_packed_in_an_encoder_do_not_see_each_other(positions: str, window: int | None) -> None:
    model = build("encoder", positions=positions, window=window)
    parts = rows([5, 1, 8])
    documents = torch.cat([torch.full((len(part),), number) for number, part in enumerate(parts)])[None]
    packed = model(torch.cat(parts)[None], documents=documents)[0]
    alone = torch.cat([model(part[None])[0] for part in parts])
    torch.testing.assert_close(packed, alone, **TOLERANCE)


@pytest.mark.parametrize("side", ["right", "left"])
def test_an_encoder_s_window_reaches_to_both_sides(side: str) -> None:
    """Changing a token changes what stands at most 3 x 2 places from it in a stack of 2 layers, window 3."""
    model = build("encoder", window=3)
    (sequence,) = rows([30])
    other = sequence.clone()
    other[15] = (other[15] + 1) % 47
    tokens, mask = pad([sequence, other], side, extra=4)
    before, after = model(tokens, mask=mask)
    moved = ((before - after).abs().amax(-1) > 0)[mask[0]].nonzero().flatten().tolist()
    assert moved == list(range(15 - 6, 15 + 6 + 1))


def test_an_encoder_sees_all_and_a_decoder_only_what_came_before() -> None:
    (sequence,) = rows([10])
    other = sequence.clone()
    other[6] = (other[6] + 1) % 47
    for shape, first_moved in (("encoder", 0), ("decoder", 6)):
        before, after = build(shape)(torch.stack([sequence, other]))
        moved = ((before - after).abs().amax(-1) > 0).nonzero().flatten().tolist()
        assert moved == list(range(first_moved, 10))


def test_without_positions_an_encoder_permutes_with_its_tokens() -> None:
    model, (sequence,) = build("encoder", positions="none"), rows([11])
    order = torch.randperm(11, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(model(sequence[order][None])[0], model(sequence[None])[0][order], **TOLERANCE)


def test_without_positions_the_order_of_a_source_does_not_matter() -> None:
    model, (source,), (target,) = build("encoder-decoder", positions="none"), rows([11]), rows([5], seed=1)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(2))
    logits = model(target[None], source=source[None])
    torch.testing.assert_close(model(target[None], source=source[order][None]), logits, **TOLERANCE)


# ------------------------------------------------------------------------------------------- memory and cache


@pytest.mark.parametrize("positions", POSITIONS)
def test_step_by_step_with_the_source_read_once_equals_the_whole_pass(positions: str) -> None:
    """Left-padded targets in chunks of 4, 1, 1 and 3, beside padded sources."""
    model = build("encoder-decoder", positions=positions)
    tokens, mask = pad(rows([9, 3]), "left")
    source, source_mask = pad(rows([4, 11], seed=1), "right")
    whole = model(tokens, mask=mask, source=source, source_mask=source_mask)
    memory, cache, steps = model.encode(source, source_mask), model.new_cache(2, 9), []
    for chunk in torch.arange(9).split([4, 1, 1, 3]):
        steps.append(model(tokens[:, chunk], mask=mask[:, chunk], memory=memory, cache=cache))
    torch.testing.assert_close(torch.cat(steps, 1)[mask], whole[mask], **TOLERANCE)


def test_keys_of_the_source_are_made_once() -> None:
    model = build("encoder-decoder")
    calls: list[str] = []
    for name, module in model.named_modules():
        if name.endswith(("cross.k", "cross.v")):
            module.register_forward_hook(lambda module, inputs, output, name=name: calls.append(name))
    memory, cache = model.encode(rows([7])[0][None]), model.new_cache(1, 5)
    for _ in range(5):
        model(torch.tensor([[3]]), memory=memory, cache=cache)
    assert sorted(calls) == [f"decoder.blocks.{layer}.cross.{part}" for layer in (0, 1) for part in "kv"]


def test_a_source_of_padding_alone_gives_finite_numbers_and_gradients() -> None:
    model = build("encoder-decoder").train()
    source, target = torch.stack(rows([6, 6])), torch.stack(rows([4, 4], seed=1))
    mask = torch.tensor([[True] * 6, [False] * 6])
    logits = model(target, source=source, source_mask=mask)
    logits.square().mean().backward()
    assert logits.isfinite().all()
    for name, weight in model.named_parameters():
        assert weight.grad is not None and weight.grad.isfinite().all(), name
    torch.testing.assert_close(logits[:1], model(target[:1], source=source[:1]), **TOLERANCE)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_weight_gets_a_gradient(shape: str) -> None:
    model = build(
        shape, positions="relative", norm="layer", qkv_bias=True, out_bias=True, ff_bias=True
    ).train()
    tokens, source = torch.stack(rows([9, 9])), pad(rows([12, 5], seed=1), "right")
    call(model, tokens, None, source).square().mean().backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None and weight.grad.isfinite().all(), name
        assert weight.grad.abs().max() > 0 or name.endswith(".k.bias"), name  # it shifts all scores alike


def test_an_encoder_of_other_sizes_follows_when_the_decoder_is_changed() -> None:
    config = ModelConfig(shape="encoder-decoder", d_model=48, n_layers=2, n_heads=4, d_ff=96)
    assert (config.n_encoder_layers, config.n_encoder_heads, config.encoder_d_ff) == (2, 4, 96)
    wider = config.replace(n_layers=5, d_ff=64)
    assert (wider.n_encoder_layers, wider.n_encoder_heads, wider.encoder_d_ff) == (5, 4, 64)
    part = config.replace(n_encoder_layers=7, n_encoder_heads=3).encoder_part()
    assert (part.shape, part.n_layers, part.n_heads, part.d_head) == ("encoder", 7, 3, 16)
    assert ModelConfig.from_dict(config.to_dict()) == config


# --------------------------------------------------------------------------------------------------- mistakes


def test_mistakes_are_named() -> None:
    tokens = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(
        ValueError, match="a source goes with shape='encoder-decoder'; this model is 'decoder'"
    ):
        build("decoder")(tokens, source=tokens)
    with pytest.raises(ValueError, match="reads first: give the source"):
        build("encoder-decoder")(tokens)
    with pytest.raises(ValueError, match="2 sources were read and 3 rows of tokens are given"):
        model = build("encoder-decoder")
        model(tokens[:1].expand(3, -1), memory=model.encode(tokens))
    with pytest.raises(ValueError, match="an encoder sees all its tokens at once"):
        build("encoder").new_cache(2)
    with pytest.raises(ValueError, match="n_encoder_layers=3 needs shape='encoder-decoder'"):
        ModelConfig(n_encoder_layers=3)
    with pytest.raises(ValueError, match="d_model=24 is not divisible by n_heads=5"):
        ModelConfig(shape="encoder-decoder", d_model=24, n_heads=4, n_encoder_heads=5)
    with pytest.raises(ValueError, match="no window, no rotary_layers and no latent"):
        ModelConfig(shape="encoder-decoder", window=3)
    with pytest.raises(ValueError, match="this model has none"):
        build("encoder")(tokens, types=tokens)
    stack = randomised(Stack(build("encoder-decoder").config, causal=True, cross=True))
    with pytest.raises(ValueError, match="attends to a memory"):
        stack(torch.randn(2, 3, 24))

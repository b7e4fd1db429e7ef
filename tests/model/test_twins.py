"""Equal logits with `transformers`: random tiny models of four kinds, weights renamed here by hand.

Every tensor is random and every size different, so that a forgotten bias, a swapped dimension or a gain that
stayed 1 shows. The reference runs its eager attention.
"""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from clearhead.model.config import ModelConfig
from clearhead.model.transformer import Transformer

TOLERANCE = {"atol": 1e-5, "rtol": 0}
SIZES = {"vocab_size": 99, "max_len": 40, "d_model": 36, "n_layers": 3, "n_heads": 6, "d_ff": 56}
THEIR_SIZES = {
    "vocab_size": 99, "hidden_size": 36, "intermediate_size": 56, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 40,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "attn_implementation": "eager",
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="session")
def transformers():
    """Importing it takes seconds: once for all."""
    return pytest.importorskip("transformers")


def fill(model: nn.Module) -> nn.Module:
    """Random numbers in every tensor: matrices that keep the size of what passes, gains around 1."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 2:
                parameter.copy_(noise / math.sqrt(min(parameter.shape)))
            else:
                parameter.copy_(0.3 * noise + ("norm" in name or "ln_" in name) * name.endswith("weight"))
    return model.eval()


def from_llama(state: dict[str, Tensor], **config) -> Transformer:
    """The names of Llama, Mistral and Qwen3 turned into ours, one by one."""
    names = {
        "model.embed_tokens.weight": "embed.weight",
        "model.norm.weight": "decoder.norm.weight",
        "lm_head.weight": "head.weight",
    }
    parts = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ff_norm",
        "self_attn.q_proj": "attn.q", "self_attn.k_proj": "attn.k", "self_attn.v_proj": "attn.v",
        "self_attn.o_proj": "attn.o", "self_attn.q_norm": "attn.q_norm", "self_attn.k_norm": "attn.k_norm",
        "mlp.gate_proj": "ff.gate", "mlp.up_proj": "ff.up", "mlp.down_proj": "ff.down",
    }  # fmt: skip
    for i in range(3):
        for theirs, ours in parts.items():
            names[f"model.layers.{i}.{theirs}.weight"] = f"decoder.blocks.{i}.{ours}.weight"
    ours = SIZES | {"n_kv_heads": 2, "d_head": 10, "rotary_theta": 5000.0, "norm_eps": 1e-6, "tied": False}
    model = Transformer(ModelConfig(**(ours | config))).eval()
    model.load_state_dict({names[name]: tensor for name, tensor in state.items()})
    return model


@pytest.fixture(scope="session")
def llama(transformers):
    theirs = fill(transformers.LlamaForCausalLM(transformers.LlamaConfig(**THEIR_SIZES)))
    return theirs, from_llama(theirs.state_dict())


@pytest.fixture(scope="session")
def qwen3(transformers):
    theirs = fill(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**THEIR_SIZES)))
    return theirs, from_llama(theirs.state_dict(), qk_norm="head")


@pytest.fixture(scope="session")
def mistral(transformers):
    config = transformers.MistralConfig(**THEIR_SIZES, sliding_window=5)
    theirs = fill(transformers.MistralForCausalLM(config))
    return theirs, from_llama(theirs.state_dict(), window=5)


@pytest.fixture(scope="session")
def gpt2(transformers):
    """Biases everywhere, learned positions, LayerNorm, a tied head; (in, out) matrices, q k v in one."""
    config = transformers.GPT2Config(
        vocab_size=99, n_embd=36, n_inner=56, n_layer=3, n_head=6, n_positions=40,
        attn_implementation="eager", bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    theirs = fill(transformers.GPT2LMHeadModel(config))
    state = theirs.state_dict()
    ours = {
        "embed.weight": state["transformer.wte.weight"],
        "decoder.positions.weight": state["transformer.wpe.weight"],
        "decoder.norm.weight": state["transformer.ln_f.weight"],
        "decoder.norm.bias": state["transformer.ln_f.bias"],
        "head.weight": state["transformer.wte.weight"],
    }
    outputs = {"attn.c_proj": "attn.o", "mlp.c_fc": "ff.up", "mlp.c_proj": "ff.down"}
    for i in range(3):
        layer, block = f"transformer.h.{i}", f"decoder.blocks.{i}"
        for kind in ("weight", "bias"):
            ours[f"{block}.attn_norm.{kind}"] = state[f"{layer}.ln_1.{kind}"]
            ours[f"{block}.ff_norm.{kind}"] = state[f"{layer}.ln_2.{kind}"]
            q, k, v = state[f"{layer}.attn.c_attn.{kind}"].chunk(3, dim=-1)
            linear = {"attn.q": q, "attn.k": k, "attn.v": v}
            linear |= {name: state[f"{layer}.{their_name}.{kind}"] for their_name, name in outputs.items()}
            for name, tensor in linear.items():
                ours[f"{block}.{name}.{kind}"] = tensor.mT if kind == "weight" else tensor
    config = ModelConfig(
        **SIZES, norm="layer", positions="learned", activation="gelu_tanh", gated=False,
        qkv_bias=True, out_bias=True, ff_bias=True, tied=True,
    )  # fmt: skip
    model = Transformer(config).eval()
    model.load_state_dict(ours)
    return theirs, model


@pytest.fixture(params=["llama", "qwen3", "mistral", "gpt2"])
def twins(request: pytest.FixtureRequest):
    """(theirs, ours) with the same weights."""
    return request.getfixturevalue(request.param)


def some_tokens(*shape: int) -> Tensor:
    return torch.randint(3, 99, shape)


def padded(side: str) -> Tensor:
    """Which of 3 x 17 tokens are real."""
    mask = torch.ones(3, 17, dtype=torch.bool)
    for row, n in enumerate((0, 3, 9)):
        if n:
            mask[row, slice(0, n) if side == "left" else slice(-n, None)] = False
    return mask


def their_logits(theirs, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """Positions are given, as `generate` does: a plain call does not count them from the mask."""
    with torch.no_grad():
        if mask is None:
            return theirs(tokens).logits
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        return theirs(tokens, attention_mask=mask.long(), position_ids=positions).logits


def test_plain(twins) -> None:
    theirs, ours = twins
    tokens = some_tokens(3, 24)
    expected = their_logits(theirs, tokens)
    assert expected.std() > 0.3  # no accident of small numbers
    torch.testing.assert_close(ours(tokens), expected, **TOLERANCE)


def test_length_exactly_at_the_limit(twins) -> None:
    theirs, ours = twins
    tokens = some_tokens(1, 40)
    torch.testing.assert_close(ours(tokens), their_logits(theirs, tokens), **TOLERANCE)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded(twins, side: str) -> None:
    """At real tokens; padding's own logits mean nothing."""
    theirs, ours = twins
    tokens, mask = some_tokens(3, 17), padded(side)
    expected = their_logits(theirs, tokens, mask)
    torch.testing.assert_close(ours(tokens, mask=mask)[mask], expected[mask], **TOLERANCE)


@pytest.mark.parametrize("cuts", [[5], [1, 2, 9], list(range(1, 17))], ids=["once", "chunks", "steps"])
@pytest.mark.parametrize("side", ["none", "left"])
def test_cached(twins, side: str, cuts: list[int]) -> None:
    """Step by step and in chunks, in a cache with room to spare, against their whole pass."""
    theirs, ours = twins
    tokens, mask = some_tokens(3, 17), padded(side) if side == "left" else torch.ones(3, 17).bool()
    expected = their_logits(theirs, tokens, mask)
    cache = ours.new_cache(3, 20)
    edges = [0, *cuts, 17]
    with torch.no_grad():
        logits = [
            ours(tokens[:, start:end], mask=mask[:, start:end], cache=cache)
            for start, end in itertools.pairwise(edges)
        ]
    torch.testing.assert_close(torch.cat(logits, 1)[mask], expected[mask], **TOLERANCE)


def test_right_padded_prompts_continued(twins) -> None:
    """After the padding the cache goes on counting where each prompt ended."""
    theirs, ours = twins
    tokens, mask, new = some_tokens(3, 17), padded("right"), some_tokens(3, 6)
    cache = ours.new_cache(3, 23)
    with torch.no_grad():
        ours(tokens, mask=mask, cache=cache)
        logits = torch.cat([ours(new[:, t : t + 1], cache=cache) for t in range(6)], dim=1)
    for row in range(3):
        whole = torch.cat([tokens[row][mask[row]], new[row]])[None]
        torch.testing.assert_close(logits[row], their_logits(theirs, whole)[0, -6:], **TOLERANCE)


def test_packed(twins) -> None:
    """Three documents in one window = their three runs."""
    theirs, ours = twins
    tokens = some_tokens(2, 24)
    documents = torch.tensor([[0] * 5 + [1] * 8 + [2] * 11, [4] * 10 + [7] * 1 + [9] * 13])
    packed = ours(tokens, documents=documents)
    for row in range(2):
        for number in documents[row].unique():
            inside = documents[row] == number
            expected = their_logits(theirs, tokens[row, inside][None])
            torch.testing.assert_close(packed[row, inside][None], expected, **TOLERANCE)


def test_gradients(llama) -> None:
    """The same loss gives the same gradient of every weight."""
    theirs, ours = llama
    tokens, targets = some_tokens(2, 12), some_tokens(2, 12)
    ours.zero_grad(), theirs.zero_grad()
    nn.functional.cross_entropy(ours(tokens).flatten(0, 1), targets.flatten()).backward()
    nn.functional.cross_entropy(theirs(tokens).logits.flatten(0, 1), targets.flatten()).backward()
    pairs = {
        "embed": "model.embed_tokens", "decoder.blocks.1.attn.k": "model.layers.1.self_attn.k_proj",
        "decoder.blocks.0.ff.gate": "model.layers.0.mlp.gate_proj", "decoder.norm": "model.norm",
        "decoder.blocks.2.attn_norm": "model.layers.2.input_layernorm", "head": "lm_head",
    }  # fmt: skip
    for name, their_name in pairs.items():
        mine, reference = ours.get_parameter(f"{name}.weight"), theirs.get_parameter(f"{their_name}.weight")
        torch.testing.assert_close(mine.grad, reference.grad, atol=1e-5, rtol=1e-4)

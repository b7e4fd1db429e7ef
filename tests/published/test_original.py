"""A state dict of PyTorch's translation tutorial loads to the model that trained it."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clearhead import ModelConfig, Transformer
from clearhead.published.mapping import pair_names
from clearhead.published.original import LESSONS, load_original_weights


class Tutorial(nn.Module):
    """torch.nn.Transformer between embeddings, sinusoids and an output layer, written for this test."""

    def __init__(self, norm_first: bool = False, activation: str = "relu") -> None:
        super().__init__()
        self.src_tok_emb, self.tgt_tok_emb = nn.Module(), nn.Module()
        self.src_tok_emb.embedding = nn.Embedding(37, 24)
        self.tgt_tok_emb.embedding = nn.Embedding(43, 24)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its nested tensors are a prototype, and not for pre-norm
            self.transformer = nn.Transformer(
                24, 4, 2, 3, 40, 0.0, activation, batch_first=True, norm_first=norm_first
            )
        self.generator = nn.Linear(24, 43)
        for name, weight in self.named_parameters():
            nn.init.normal_(weight, float("norm" in name and name.endswith("weight")), 0.2)

    def embed(self, tokens: Tensor, table: nn.Module) -> Tensor:
        angles = torch.arange(tokens.shape[1])[:, None] / 10_000 ** (torch.arange(0, 24, 2) / 24)
        places = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
        return table.embedding(tokens) * math.sqrt(24) + places

    def forward(self, source: Tensor, target: Tensor, source_pads: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1]).isinf()
        mixed = self.transformer(
            self.embed(source, self.src_tok_emb),
            self.embed(target, self.tgt_tok_emb),
            tgt_mask=causal,
            src_key_padding_mask=source_pads,
            memory_key_padding_mask=source_pads,
        )
        return self.generator(mixed)


@pytest.mark.parametrize("final_norms", [True, False])
@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"activation": "gelu"}], ids=str)
def test_the_logits_are_the_same(options: dict[str, Any], final_norms: bool) -> None:
    theirs = Tutorial(**options).eval()
    if not final_norms:
        theirs.transformer.encoder.norm = theirs.transformer.decoder.norm = None
    ours = load_original_weights(theirs.state_dict(), n_heads=4, **options).eval()
    source, target = torch.randint(37, (3, 9)), torch.randint(43, (3, 6))
    pads = torch.arange(9) >= torch.tensor([[9], [4], [7]])
    expected = theirs(source, target, pads)
    found = ours(target, source=source, source_mask=~pads)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_its_sinusoids_are_not_needed() -> None:
    state = Tutorial().state_dict() | {"positional_encoding.pos_embedding": torch.zeros(5000, 1, 24)}
    config = load_original_weights(state, n_heads=4, max_len=99).config
    assert (config.vocab_size, config.source_vocab_size, config.max_len) == (43, 37, 99)
    assert (config.n_layers, config.n_encoder_layers, config.d_ff, config.d_model) == (3, 2, 40, 24)


def test_the_model_owns_copies() -> None:
    state = Tutorial().state_dict()
    model = load_original_weights(state, n_heads=4)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    assert all(tensor.abs().max() > 0 for tensor in state.values())


def lessons_state() -> tuple[Transformer, dict[str, Tensor]]:
    """A random model with a table of positions, and its weights under the lessons' names."""
    given = {"shape": "encoder-decoder", "positions": "learned", "embed_scale": math.sqrt(24)}
    sizes = {
        "vocab_size": 43,
        "source_vocab_size": 37,
        "max_len": 11,
        "d_model": 24,
        "n_heads": 4,
        "d_ff": 40,
    }
    biases = {"qkv_bias": True, "out_bias": True, "ff_bias": True, "head_bias": True}
    plain = {"gated": False, "activation": "relu", "tied": False}
    norms = {"norm": "layer", "norm_placement": "post", "final_norm": False}
    depth = {"n_layers": 3, "n_encoder_layers": 2, "encoder_d_ff": 48}
    model = Transformer(ModelConfig.from_dict(given | sizes | biases | plain | norms | depth), seed=0).eval()
    ours = dict(model.named_parameters())
    pairs = pair_names(LESSONS, "Seq2Seq", ours)
    return model, {pair.theirs[0]: ours[pair.ours[0]].detach() for pair in pairs}


def test_the_lessons_names_and_their_table_of_positions() -> None:
    """Another set of names; the length is that of the table, and a table that is not there is missed."""
    model, state = lessons_state()
    assert "decoder.layers.2.encoder_attention.fc_q.bias" in state
    loaded = load_original_weights(state, n_heads=4)
    assert loaded.config == model.config
    source, target = torch.randint(37, (3, 11)), torch.randint(43, (3, 6))
    assert torch.equal(loaded(target, source=source), model(target, source=source))
    with pytest.raises(ValueError, match="max_len=12, but these weights have a table of 11 positions"):
        load_original_weights(state, n_heads=4, max_len=12)
    for name in (
        "decoder.pos_embedding.weight",
        "encoder.pos_embedding.weight",
        "encoder.tok_embedding.weight",
    ):
        rest = {other: tensor for other, tensor in state.items() if other != name}
        with pytest.raises(ValueError, match=f"missing: .*{name}"):
            load_original_weights(rest, n_heads=4)


def test_what_does_not_fit_is_named() -> None:
    state = Tutorial().state_dict()
    bias = state.pop("generator.bias")
    with pytest.raises(ValueError, match=r"missing: \['generator.bias'\]; left over: \['odd'\]"):
        load_original_weights(state | {"odd": bias}, n_heads=4)
    with pytest.raises(ValueError, match=r"neither tgt_tok_emb\.embedding\.weight nor decoder\.tok_emb"):
        load_original_weights({}, n_heads=4)
    wrong = {"generator.bias": bias, "transformer.decoder.layers.1.linear2.bias": bias}
    with pytest.raises(ValueError, match=r"linear2.bias has shape \(43,\); the others ask for \(24,\)"):
        load_original_weights(state | wrong, n_heads=4)

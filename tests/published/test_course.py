"""A state dict with the course's names loads to the model a learner wrote by hand."""

import pytest
import torch
from torch import Tensor

from clearhead.published.course import load_course_weights
from reference.course_model import CourseModel, random_course_weights


def weights(**changes: Tensor) -> dict[str, Tensor]:
    """Vocabulary 61, width 24, 3 layers, d_ff 40."""
    return random_course_weights(61, 24, 3, 40, torch.Generator().manual_seed(3)) | changes


def test_course_weights_give_the_logits_of_the_hand_written_model() -> None:
    state, tokens = weights(), torch.randint(61, (3, 20))
    ours = load_course_weights(state, n_heads=4, max_len=20, rotary_theta=500.0)
    theirs = CourseModel(state, n_heads=4, theta=500.0)
    torch.testing.assert_close(ours(tokens), theirs(tokens), atol=1e-5, rtol=0)


def test_sizes_are_read_from_the_tensors() -> None:
    config = load_course_weights(weights(), n_heads=4, max_len=20, rotary_theta=500.0).config
    assert (config.vocab_size, config.d_model, config.n_layers, config.d_ff) == (61, 24, 3, 40)
    assert (config.n_heads, config.n_kv_heads, config.d_head) == (4, 4, 6)
    assert (config.max_len, config.rotary_theta, config.rotary_layout, config.tied) == (
        20,
        500,
        "interleaved",
        False,
    )


def test_cached_steps_equal_the_hand_written_model() -> None:
    state, tokens = weights(), torch.randint(61, (2, 9))
    ours = load_course_weights(state, n_heads=4)
    cache = ours.new_cache(2, 9)
    with torch.no_grad():
        logits = torch.cat([ours(tokens[:, t : t + 1], cache=cache) for t in range(9)], dim=1)
    torch.testing.assert_close(logits, CourseModel(state, n_heads=4)(tokens), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_type_of_the_weights_is_kept(dtype: torch.dtype) -> None:
    state = {name: tensor.to(dtype) for name, tensor in weights().items()}
    model = load_course_weights(state, n_heads=4)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(model.embed.weight, state["token_embeddings.weight"])


def test_the_model_owns_copies() -> None:
    """Training it leaves the file's tensors alone, and a head that was the embedding becomes its own."""
    state = weights()
    state["lm_head.weight"] = state["token_embeddings.weight"]
    model = load_course_weights(state, n_heads=4)
    with torch.no_grad():
        model.embed.weight.zero_()
    assert state["token_embeddings.weight"].abs().max() > 0
    assert model.head.weight.abs().max() > 0


def test_missing_and_left_over_tensors_are_both_listed() -> None:
    state = weights()
    state["layers.1.attn.out_proj.weight"] = state.pop("layers.1.attn.output_proj.weight")
    state["rope.cos"] = torch.zeros(2)
    with pytest.raises(ValueError) as error:
        load_course_weights(state, n_heads=4)
    missing, left_over = str(error.value).split("left over")
    assert "'layers.1.attn.output_proj.weight'" in missing
    assert "'layers.1.attn.out_proj.weight'" in left_over and "'rope.cos'" in left_over


def test_a_missing_layer_and_an_empty_dict_are_refused() -> None:
    state = {name: tensor for name, tensor in weights().items() if not name.startswith("layers.1.")}
    with pytest.raises(ValueError, match=r"missing: \['layers.1.attn.k_proj.weight'"):
        load_course_weights(state, n_heads=4)
    with pytest.raises(ValueError, match="missing"):
        load_course_weights({}, n_heads=4)


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"layers.2.ffn.w2.weight has shape \(24, 41\).*\(24, 40\)"):
        load_course_weights(weights(**{"layers.2.ffn.w2.weight": torch.zeros(24, 41)}), n_heads=4)
    with pytest.raises(ValueError, match="d_model=24 is not divisible by n_heads=5"):
        load_course_weights(weights(), n_heads=5)

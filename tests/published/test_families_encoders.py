"""Encoders and encoder-decoders: tiny random models of every family give the numbers of `transformers`."""

from pathlib import Path
from typing import Any

import pytest
import torch

from clearhead import ModelConfig, Transformer, generate, load, save
from clearhead.published.mapping import differences
from clearhead.published.selfcheck import make_batch, randomise, run
from clearhead.published.twins import BOTH, ENCODER, T5, TWINS
from reference.parity import tiny
from reference.parity_encoders import PAD, batch, check_encoder, check_encoder_decoder

ROBERTA = ENCODER | {"layer_norm_eps": 1e-5, "type_vocab_size": 1, "max_position_embeddings": 26}
DISTILBERT = TWINS["distilbert"][1]
MODERNBERT = ENCODER | {
    "num_hidden_layers": 5,
    "local_attention": 10,
    "bos_token_id": 2,
    "cls_token_id": 2,
    "eos_token_id": 3,
    "sep_token_id": 3,
}
EVERY_BIAS = {
    "norm_bias": True,
    "attention_bias": True,
    "mlp_bias": True,
    "classifier_bias": True,
    "classifier_activation": "relu",
    "classifier_pooling": "mean",
}

ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert, bare": ("BertModel", ENCODER),
    "bert, masked": ("BertForMaskedLM", ENCODER | {"hidden_act": "relu"}),
    "bert, masked, untied": ("BertForMaskedLM", ENCODER | {"tie_word_embeddings": False}),
    "bert, sequence": ("BertForSequenceClassification", ENCODER | {"num_labels": 3}),
    "bert, token": ("BertForTokenClassification", ENCODER | {"num_labels": 5}),
    "bert, span": ("BertForQuestionAnswering", ENCODER),
    "roberta, bare": ("RobertaModel", ROBERTA),
    "roberta, masked": ("RobertaForMaskedLM", ROBERTA | {"hidden_act": "relu"}),
    "roberta, masked, untied": ("RobertaForMaskedLM", ROBERTA | {"tie_word_embeddings": False}),
    "roberta, sequence": ("RobertaForSequenceClassification", ROBERTA | {"num_labels": 3}),
    "roberta, token": ("RobertaForTokenClassification", ROBERTA | {"num_labels": 5}),
    "roberta, span": ("RobertaForQuestionAnswering", ROBERTA),
    "distilbert, bare": ("DistilBertModel", DISTILBERT | {"sinusoidal_pos_embds": True}),
    "distilbert, masked": ("DistilBertForMaskedLM", DISTILBERT | {"activation": "relu"}),
    "distilbert, sequence": ("DistilBertForSequenceClassification", DISTILBERT | {"num_labels": 3}),
    "distilbert, token": ("DistilBertForTokenClassification", DISTILBERT | {"num_labels": 5}),
    "distilbert, span": ("DistilBertForQuestionAnswering", DISTILBERT),
    "modernbert, bare": ("ModernBertModel", MODERNBERT),
    "modernbert, masked": ("ModernBertForMaskedLM", MODERNBERT),
    "modernbert, masked, every bias": ("ModernBertForMaskedLM", MODERNBERT | EVERY_BIAS),
    "modernbert, masked, no bias": ("ModernBertForMaskedLM", MODERNBERT | {"decoder_bias": False}),
    "modernbert, sequence": ("ModernBertForSequenceClassification", MODERNBERT | {"num_labels": 3}),
    "modernbert, sequence, mean": (
        "ModernBertForSequenceClassification",
        MODERNBERT | EVERY_BIAS | {"num_labels": 3},
    ),
    "modernbert, token": ("ModernBertForTokenClassification", MODERNBERT | {"num_labels": 5}),
    "modernbert, span": ("ModernBertForQuestionAnswering", MODERNBERT),
    "modernbert, other bases": (
        "ModernBertForMaskedLM",
        MODERNBERT
        | {
            "layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 2 + ["sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 300.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
}

BART = BOTH | {"bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
MARIAN = BART | {"decoder_start_token_id": PAD, "eos_token_id": 0, "forced_eos_token_id": 0}
TWO_TABLES = {"decoder_vocab_size": 67, "share_encoder_decoder_embeddings": False}
NEWER = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}

ENCODER_DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "marian": ("MarianMTModel", MARIAN | {"scale_embedding": True, "activation_function": "swish"}),
    "marian, two tables": ("MarianMTModel", MARIAN | TWO_TABLES),
    "marian, two tables, untied": (
        "MarianMTModel",
        MARIAN | TWO_TABLES | {"tie_word_embeddings": False, "scale_embedding": True},
    ),
    "bart": ("BartForConditionalGeneration", BART),
    "bart, scaled": ("BartForConditionalGeneration", BART | {"scale_embedding": True}),
    "bart, bare": ("BartModel", BART),
    "bart, span": ("BartForQuestionAnswering", BART | {"num_labels": 2}),
    "t5": ("T5ForConditionalGeneration", T5),
    "t5, bare": ("T5Model", T5 | {"num_decoder_layers": 2}),
    "t5 v1.1, one table": ("T5ForConditionalGeneration", T5 | NEWER),
    "t5, gated silu": ("T5ForConditionalGeneration", T5 | {"feed_forward_proj": "gated-silu"}),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_a_tiny_encoder_equals_its_twin(name: str, transformers: Any, tmp_path: Path) -> None:
    class_name, settings = ENCODERS[name]
    untied = settings.get("tie_word_embeddings") is False  # then a bias is saved twice, and one is not used
    check_encoder(tiny(transformers, class_name, **settings), tmp_path, same_files=not untied)


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_a_tiny_encoder_decoder_equals_its_twin(name: str, transformers: Any, tmp_path: Path) -> None:
    class_name, settings = ENCODER_DECODERS[name]
    atol = 2e-5 if "v1.1" in name else 1e-5
    check_encoder_decoder(tiny(transformers, class_name, **settings), tmp_path, atol=atol)


# ------------------------------------------------------------------------------------------ models of our own

OWN = {"vocab_size": 59, "max_len": 40, "d_model": 24, "n_layers": 2, "n_heads": 4, "d_ff": 56}
BIASED = {"norm": "layer", "gated": False, "qkv_bias": True, "out_bias": True, "ff_bias": True}
POST = BIASED | {"norm_placement": "post", "final_norm": False}
MASKED = {"head": "masked", "head_bias": True, "head_norm": True, "head_activation": "gelu"}
ENCODER_ONLY = {"shape": "encoder", "embed_norm": True, "activation": "gelu"} | MASKED
TWO_STACKS = {"shape": "encoder-decoder", "n_encoder_layers": 3, "n_encoder_heads": 3, "encoder_d_ff": 40}
OURS: dict[str, dict[str, Any]] = {
    "BertForMaskedLM": ENCODER_ONLY | POST | {"positions": "learned", "n_token_types": 2},
    "ModernBertForMaskedLM": ENCODER_ONLY
    | {"norm": "layer", "norm_bias": False, "first_attn_norm": False}
    | {"window": 5, "windowed_layers": (False, True)},
    "BartForConditionalGeneration": POST
    | TWO_STACKS
    | {"positions": "learned", "position_offset": 2, "embed_norm": True, "head_bias": True},
    "MarianMTModel": POST | TWO_STACKS | {"positions": "sinusoidal_concat", "head_bias": True},
    "T5ForConditionalGeneration": {"shape": "encoder-decoder", "n_encoder_layers": 3}
    | {"positions": "relative", "attn_scale": 1.0, "d_head": 5, "activation": "gelu_tanh", "norm_eps": 1e-6},
}


@pytest.mark.parametrize("class_name", OURS)
def test_their_library_loads_models_of_our_own(class_name: str, transformers: Any, tmp_path: Path) -> None:
    ours = Transformer(ModelConfig(**OWN | OURS[class_name])).eval()
    randomise(list(ours.parameters()))
    save(ours, None, tmp_path)
    model_class = getattr(transformers, class_name)
    theirs = model_class.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert theirs.config.architectures == [class_name]
    whole = make_batch(ours, "right", equal=True)
    again, _ = load(tmp_path)
    with torch.no_grad():
        found = run(ours, whole)
        torch.testing.assert_close(run(theirs, whole), found, atol=1e-5, rtol=0)
        assert torch.equal(run(again, whole), found)
    assert not differences(again.config, ours.config)


# ------------------------------------------------------------------------------------------------ generation

# What is chosen and how: ours and theirs.
CHOICES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({}, {"do_sample": False}),
    "penalised": ({"repetition_penalty": 1.3}, {"do_sample": False, "repetition_penalty": 1.3}),
    "sampled": (
        {"temperature": 1.3, "top_k": 30, "top_p": 0.95, "seed": 3},
        {"do_sample": True, "temperature": 1.3, "top_k": 30, "top_p": 0.95},
    ),
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", ["marian", "marian, two tables", "bart", "t5"])
def test_generation_equals_transformers_token_by_token(
    name: str, choice: str, transformers: Any, tmp_path: Path
) -> None:
    """Sources of different lengths; the ids come from the folder: start, end, forced end, banned padding."""
    class_name, settings = ENCODER_DECODERS[name]
    depth = {"num_decoder_layers": 2} if name == "t5" else {}  # others break their cache
    theirs = tiny(transformers, class_name, **settings | depth)
    theirs.generation_config.bad_words_ids = [[PAD]]
    theirs.save_pretrained(tmp_path)
    ours, _ = load(tmp_path)
    asked, asked_theirs = CHOICES[choice]
    source, mask = batch(59, (9, 24, 14), seed=6)
    torch.manual_seed(3)
    with torch.no_grad():
        found = theirs.generate(source, attention_mask=mask.long(), max_new_tokens=12, **asked_theirs)
    end = settings["eos_token_id"]
    expected = [row[: row.index(end) + 1] if end in row else row for row in found[:, 1:].tolist()]
    prompts = [row[real].tolist() for row, real in zip(source, mask, strict=True)]
    assert generate(ours, prompts, max_new_tokens=12, **asked) == expected

"""The families of published models as tables: encoders and encoder-decoders. The columns: mapping.py."""

import math

from clearhead.model.config import ModelConfig
from clearhead.published.mapping import FLAT, SPLIT, Class, Family, Json, Key, Part, Row, in_layers
from clearhead.published.quirks import ACTIVATIONS, layered_rope_part, windowed_layers

BIASES = {"qkv_bias": True, "out_bias": True, "ff_bias": True}
POST_NORM = {"norm": "layer", "norm_placement": "post", "final_norm": False, "gated": False} | BIASES

# The heads. `head_activation` of a masked head is the blocks' own unless a class says otherwise.
MASKED = {"head": "masked", "head_bias": True, "head_norm": True}
SEQUENCE = {"head": "sequence", "head_bias": True, "head_activation": "tanh"}
TOKEN = {"head": "token", "head_bias": True, "head_activation": None}
SPAN = {"head": "span", "head_bias": True, "head_activation": None, "n_labels": 2}
LM = {"head": "lm", "head_bias": True}
BARE = {"head": "none", "head_activation": None}
POOLED = {"head": "none", "head_activation": "tanh"}
LABELS = Row("classifier.*", "head.out.*")
SPANS = (Row("qa_outputs.*", "head.out.*"),)


def head_activation(key: Key) -> Part:
    """The dense layer before a head has the activation of the blocks."""
    return Part((), lambda settings: {"head_activation": key.read(settings)}, lambda config: {})


# ------------------------------------------------------------------------------------------------------- BERT

BERT_KEYS = {
    "vocab_size": Key("vocab_size"),
    "d_model": Key("hidden_size"),
    "n_layers": Key("num_hidden_layers"),
    "n_heads": Key("num_attention_heads"),
    "d_ff": Key("intermediate_size"),
    "n_token_types": Key("type_vocab_size", 2),
    "activation": Key("hidden_act", "gelu", ACTIVATIONS),
    "norm_eps": Key("layer_norm_eps", 1e-12),
    "tied": Key("tie_word_embeddings", True),
    "embed_dropout": Key("hidden_dropout_prob", 0.1),
    "residual_dropout": Key("hidden_dropout_prob", 0.1),
    "attn_dropout": Key("attention_probs_dropout_prob", 0.1),
}
BERT_FIXED = {"shape": "encoder", "positions": "learned", "embed_norm": True} | POST_NORM
BERT_ROWS = (
    Row("embeddings.word_embeddings.weight", "embed.weight"),
    Row("embeddings.position_embeddings.weight", "encoder.positions.weight"),
    Row("embeddings.token_type_embeddings.weight", "encoder.types.weight"),
    Row("embeddings.LayerNorm.*", "encoder.embed_norm.*"),
    *in_layers(
        "encoder.layer.{i}.",
        "encoder.blocks.{i}.",
        {
            "attention.self.query.*": "attn.q.*",
            "attention.self.key.*": "attn.k.*",
            "attention.self.value.*": "attn.v.*",
            "attention.output.dense.*": "attn.o.*",
            "attention.output.LayerNorm.*": "attn_post_norm.*",
            "intermediate.dense.*": "ff.up.*",
            "output.dense.*": "ff.down.*",
            "output.LayerNorm.*": "ff_post_norm.*",
        },
    ),
)
BERT_REFUSED = {
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "position_embedding_type": ("absolute",),
}
POOLER = Row("pooler.dense.*", "head.dense.*")

BERT_MASKED = (
    Row("cls.predictions.bias", "head.bias", unless="head.weight"),
    Row("cls.predictions.transform.dense.*", "head.dense.*"),
    Row("cls.predictions.transform.LayerNorm.*", "head.norm.*"),
    Row("cls.predictions.decoder.*", "head.*", given="head.weight"),  # untied
)
# Also MiniLM, bge, e5 and other sentence models.
BERT = Family(
    model_type="bert",
    keys=BERT_KEYS | {"max_len": Key("max_position_embeddings")},
    parts=(head_activation(BERT_KEYS["activation"]),),
    fixed=BERT_FIXED,
    refused=BERT_REFUSED,
    rows=BERT_ROWS,
    classes={
        "BertModel": Class(POOLED, (POOLER,)),
        "BertModel without pooler": Class(BARE),
        "BertForMaskedLM": Class(MASKED, BERT_MASKED, "bert."),
        "BertForPreTraining": Class(MASKED, BERT_MASKED, "bert."),  # saved as the class above
        "BertForSequenceClassification": Class(
            SEQUENCE, (Row("bert.pooler.dense.*", "head.dense.*"), LABELS), "bert."
        ),
        "BertForTokenClassification": Class(TOKEN, (LABELS,), "bert."),
        "BertForQuestionAnswering": Class(SPAN, SPANS, "bert."),
    },
    ignored=(
        r"(bert\.)?embeddings\.position_ids",
        r"(bert\.)?pooler\.dense\.(weight|bias)",
        r"cls\.predictions\.(decoder\.)?(weight|bias)",
        r"cls\.seq_relationship\.(weight|bias)",
    ),
    older_names={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
)


# ---------------------------------------------------------------------------------------------------- RoBERTa


def _read_counted_positions(settings: Json) -> Json:
    first = 1 + Key("pad_token_id", 1).read(settings)
    return {"position_offset": first, "max_len": Key("max_position_embeddings").read(settings) - first}


# Positions count from behind the padding's id, which is the position of padding.
COUNTED_POSITIONS = Part(
    ("max_position_embeddings", "pad_token_id"),
    _read_counted_positions,
    lambda config: {
        "max_position_embeddings": config.max_len + config.position_offset,
        "pad_token_id": config.position_offset - 1,
    },
)
ROBERTA = Family(
    model_type="roberta",
    keys=BERT_KEYS,
    parts=(COUNTED_POSITIONS,),
    fixed=BERT_FIXED,
    refused=BERT_REFUSED,
    rows=BERT_ROWS,
    classes={
        "RobertaModel": Class(POOLED, (POOLER,)),
        "RobertaModel without pooler": Class(BARE),
        "RobertaForMaskedLM": Class(
            MASKED | {"head_activation": "gelu"},
            (
                Row("lm_head.bias", "head.bias", unless="head.weight"),
                Row("lm_head.dense.*", "head.dense.*"),
                Row("lm_head.layer_norm.*", "head.norm.*"),
                Row("lm_head.decoder.*", "head.*", given="head.weight"),  # untied
            ),
            "roberta.",
        ),
        "RobertaForSequenceClassification": Class(
            SEQUENCE,
            (Row("classifier.dense.*", "head.dense.*"), Row("classifier.out_proj.*", "head.out.*")),
            "roberta.",
        ),
        "RobertaForTokenClassification": Class(TOKEN, (LABELS,), "roberta."),
        "RobertaForQuestionAnswering": Class(SPAN, SPANS, "roberta."),
    },
    ignored=(
        r"(roberta\.)?embeddings\.position_ids",
        r"(roberta\.)?pooler\.dense\.(weight|bias)",
        r"lm_head\.(decoder\.)?(weight|bias)",
    ),
)

# ------------------------------------------------------------------------------------------------- DistilBERT

DISTILBERT_ACTIVATION = Key("activation", "gelu", ACTIVATIONS)
DISTILBERT = Family(
    model_type="distilbert",
    keys={
        "vocab_size": Key("vocab_size"),
        "max_len": Key("max_position_embeddings"),
        "d_model": Key("dim"),
        "n_layers": Key("n_layers"),
        "n_heads": Key("n_heads"),
        "d_ff": Key("hidden_dim"),
        "activation": DISTILBERT_ACTIVATION,
        "tied": Key("tie_word_embeddings", True),
        "embed_dropout": Key("dropout", 0.1),
        "residual_dropout": Key("dropout", 0.1),
        "attn_dropout": Key("attention_dropout", 0.1),
    },
    parts=(head_activation(DISTILBERT_ACTIVATION),),
    fixed=BERT_FIXED | {"norm_eps": 1e-12},
    rows=(
        Row("embeddings.word_embeddings.weight", "embed.weight"),
        Row("embeddings.position_embeddings.weight", "encoder.positions.weight"),  # sinusoids also are stored
        Row("embeddings.LayerNorm.*", "encoder.embed_norm.*"),
        *in_layers(
            "transformer.layer.{i}.",
            "encoder.blocks.{i}.",
            {
                "attention.q_lin.*": "attn.q.*",
                "attention.k_lin.*": "attn.k.*",
                "attention.v_lin.*": "attn.v.*",
                "attention.out_lin.*": "attn.o.*",
                "sa_layer_norm.*": "attn_post_norm.*",
                "ffn.lin1.*": "ff.up.*",
                "ffn.lin2.*": "ff.down.*",
                "output_layer_norm.*": "ff_post_norm.*",
            },
        ),
    ),
    classes={
        "DistilBertModel": Class(BARE),
        "DistilBertForMaskedLM": Class(
            MASKED,
            (
                Row("vocab_transform.*", "head.dense.*"),
                Row("vocab_layer_norm.*", "head.norm.*"),
                Row("vocab_projector.bias", "head.bias"),
                Row("vocab_projector.weight", "head.weight"),
            ),
            "distilbert.",
        ),
        "DistilBertForSequenceClassification": Class(
            SEQUENCE | {"head_activation": "relu"},
            (Row("pre_classifier.*", "head.dense.*"), LABELS),
            "distilbert.",
        ),
        "DistilBertForTokenClassification": Class(TOKEN, (LABELS,), "distilbert."),
        "DistilBertForQuestionAnswering": Class(SPAN, SPANS, "distilbert."),
    },
    ignored=(r"vocab_projector\.weight",),
)

# ------------------------------------------------------------------------------------------------- ModernBERT


def _read_local_layers(settings: Json) -> Json:
    """A window in all layers but every third."""
    every = settings.get("global_attn_every_n_layers") or 3
    layers = windowed_layers(settings, lambda _, n: [layer % every != 0 for layer in range(n)])
    return {"window": (settings.get("local_attention") or 128) // 2} | layers


def _write_local_layers(config: ModelConfig) -> Json:
    kinds = [config.has_window(layer) for layer in range(config.n_layers)]
    made: Json = {"layer_types": ["sliding_attention" if window else "full_attention" for window in kinds]}
    return made if config.window is None else made | {"local_attention": 2 * config.window}


LOCAL_LAYERS = Part(
    ("layer_types", "local_attention", "global_attn_every_n_layers"), _read_local_layers, _write_local_layers
)
TWO_THETAS = layered_rope_part(160_000.0, 10_000.0, older="local_rope_theta", older_full="global_rope_theta")


def one_bias(key: str, *names: str) -> Part:
    """Several of our biases under one key."""

    def read(settings: Json) -> Json:
        return dict.fromkeys(names, settings.get(key) or False)

    return Part((key,), read, lambda config: {key: getattr(config, names[0])})


# Only the masked head has a choice.
DECODER_BIAS = Part(
    (),
    lambda settings: {"head_bias": settings.get("decoder_bias") is not False},
    lambda config: {"decoder_bias": config.head_bias} if config.head == "masked" else {},
)
MODERNBERT_HEAD = (Row("head.dense.*", "head.dense.*"), Row("head.norm.*", "head.norm.*"))
MODERNBERT_LABELS = (*MODERNBERT_HEAD, LABELS)
MODERNBERT = Family(
    model_type="modernbert",
    keys={
        "vocab_size": Key("vocab_size"),
        "max_len": Key("max_position_embeddings"),
        "d_model": Key("hidden_size"),
        "n_layers": Key("num_hidden_layers"),
        "n_heads": Key("num_attention_heads"),
        "d_ff": Key("intermediate_size"),
        "activation": Key("hidden_activation", "gelu", ACTIVATIONS),
        "norm_eps": Key("norm_eps", 1e-5),
        "norm_bias": Key("norm_bias", False),
        "head_dense_bias": Key("classifier_bias", False),
        "head_activation": Key("classifier_activation", "gelu", ACTIVATIONS),
        "pool": Key("classifier_pooling", "cls", {"cls": "first", "mean": "mean"}),
        "tied": Key("tie_word_embeddings", True),
        "embed_dropout": Key("embedding_dropout", 0.0),
        "residual_dropout": Key("mlp_dropout", 0.0),
        "attn_dropout": Key("attention_dropout", 0.0),
    },
    parts=(
        LOCAL_LAYERS,
        TWO_THETAS,
        one_bias("attention_bias", "qkv_bias", "out_bias"),
        one_bias("mlp_bias", "ff_bias"),
        DECODER_BIAS,
    ),
    fixed={
        "shape": "encoder",
        "norm": "layer",
        "gated": True,
        "positions": "rotary",
        "embed_norm": True,
        "first_attn_norm": False,
        "head_norm": True,
    },
    rows=(
        Row("embeddings.tok_embeddings.weight", "embed.weight"),
        Row("embeddings.norm.*", "encoder.embed_norm.*"),
        *in_layers(
            "layers.{i}.",
            "encoder.blocks.{i}.",
            {
                "attn_norm.*": "attn_norm.*",
                "attn.Wqkv.*": ("attn.q.* attn.k.* attn.v.*", SPLIT),
                "attn.Wo.*": "attn.o.*",
                "mlp_norm.*": "ff_norm.*",
                "mlp.Wi.*": ("ff.gate.* ff.up.*", SPLIT),
                "mlp.Wo.*": "ff.down.*",
            },
        ),
        Row("final_norm.*", "encoder.norm.*"),
    ),
    classes={
        "ModernBertModel": Class(BARE | {"head_norm": False}),
        "ModernBertForMaskedLM": Class(
            {"head": "masked"}, (*MODERNBERT_HEAD, Row("decoder.*", "head.*")), "model."
        ),
        "ModernBertForSequenceClassification": Class(
            {"head": "sequence", "head_bias": True}, MODERNBERT_LABELS, "model."
        ),
        "ModernBertForTokenClassification": Class(
            {"head": "token", "head_bias": True}, MODERNBERT_LABELS, "model."
        ),
        "ModernBertForQuestionAnswering": Class(
            {"head": "span", "head_bias": True, "n_labels": 2}, MODERNBERT_LABELS, "model."
        ),
    },
    ignored=(r"decoder\.weight",),
)

# ------------------------------------------------------------------------------------------- BART and Marian

SCALED_EMBEDDING = Part(
    ("scale_embedding",),
    lambda settings: {
        "embed_scale": math.sqrt(Key("d_model").read(settings)) if settings.get("scale_embedding") else 1.0
    },
    lambda config: {"scale_embedding": config.embed_scale != 1.0},
)
BART_KEYS = {
    "max_len": Key("max_position_embeddings"),
    "d_model": Key("d_model"),
    "n_layers": Key("decoder_layers"),
    "n_encoder_layers": Key("encoder_layers"),
    "n_heads": Key("decoder_attention_heads"),
    "n_encoder_heads": Key("encoder_attention_heads"),
    "d_ff": Key("decoder_ffn_dim"),
    "encoder_d_ff": Key("encoder_ffn_dim"),
    "activation": Key("activation_function", "gelu", ACTIVATIONS),
    "tied": Key("tie_word_embeddings", True),
    "embed_dropout": Key("dropout", 0.1),
    "residual_dropout": Key("dropout", 0.1),
    "attn_dropout": Key("attention_dropout", 0.0),
    "ff_dropout": Key("activation_dropout", 0.0),
}
BART_LAYER = {
    "self_attn.q_proj.*": "attn.q.*",
    "self_attn.k_proj.*": "attn.k.*",
    "self_attn.v_proj.*": "attn.v.*",
    "self_attn.out_proj.*": "attn.o.*",
    "self_attn_layer_norm.*": "attn_post_norm.*",
    "encoder_attn.q_proj.*": "cross.q.*",
    "encoder_attn.k_proj.*": "cross.k.*",
    "encoder_attn.v_proj.*": "cross.v.*",
    "encoder_attn.out_proj.*": "cross.o.*",
    "encoder_attn_layer_norm.*": "cross_post_norm.*",
    "fc1.*": "ff.up.*",
    "fc2.*": "ff.down.*",
    "final_layer_norm.*": "ff_post_norm.*",
}
BART_LAYERS = (
    *in_layers("encoder.layers.{i}.", "encoder.blocks.{i}.", BART_LAYER),
    *in_layers("decoder.layers.{i}.", "decoder.blocks.{i}.", BART_LAYER),
)
BART_LM = (Row("final_logits_bias", "head.bias", FLAT), Row("lm_head.weight", "head.weight"))
BART_IGNORED = (
    r"(model\.)?(encoder|decoder)\.embed_tokens\.weight",
    r"(model\.)?(encoder|decoder)\.version",
    r"lm_head\.weight",
)
BART = Family(
    model_type="bart",
    keys={"vocab_size": Key("vocab_size")} | BART_KEYS,
    parts=(SCALED_EMBEDDING,),
    fixed={
        "shape": "encoder-decoder",
        "positions": "learned",
        "position_offset": 2,
        "embed_norm": True,
        "norm_eps": 1e-5,
    }
    | POST_NORM,
    rows=(
        Row("shared.weight", "embed.weight"),
        Row("encoder.embed_positions.weight", "encoder.positions.weight"),
        Row("decoder.embed_positions.weight", "decoder.positions.weight"),
        Row("encoder.layernorm_embedding.*", "encoder.embed_norm.*"),
        Row("decoder.layernorm_embedding.*", "decoder.embed_norm.*"),
        *BART_LAYERS,
    ),
    classes={
        "BartForConditionalGeneration": Class(LM, BART_LM, "model."),
        "BartModel": Class(BARE),
        "BartForSequenceClassification": Class(
            SEQUENCE | {"pool": "last"},
            (
                Row("classification_head.dense.*", "head.dense.*"),
                Row("classification_head.out_proj.*", "head.out.*"),
            ),
            "model.",
        ),
        "BartForQuestionAnswering": Class(SPAN, SPANS, "model."),
    },
    ignored=BART_IGNORED,
)


def _read_vocabularies(settings: Json) -> Json:
    """One table of embeddings for source and target, or two."""
    source = Key("vocab_size").read(settings)
    if settings.get("share_encoder_decoder_embeddings") is not False:
        return {"vocab_size": source}
    return {"vocab_size": settings.get("decoder_vocab_size") or source, "source_vocab_size": source}


def _write_vocabularies(config: ModelConfig) -> Json:
    source = config.source_vocab_size
    return {
        "vocab_size": config.vocab_size if source is None else source,
        "decoder_vocab_size": config.vocab_size,
        "share_encoder_decoder_embeddings": source is None,
    }


VOCABULARIES = Part(
    ("vocab_size", "decoder_vocab_size", "share_encoder_decoder_embeddings"),
    _read_vocabularies,
    _write_vocabularies,
)
MARIAN = Family(
    model_type="marian",
    keys=BART_KEYS,
    parts=(VOCABULARIES, SCALED_EMBEDDING),
    fixed={"shape": "encoder-decoder", "positions": "sinusoidal_concat", "norm_eps": 1e-5} | POST_NORM,
    rows=(
        Row("shared.weight", "embed.weight", unless="source_embed.weight"),
        Row("encoder.embed_tokens.weight", "source_embed.weight"),
        Row("decoder.embed_tokens.weight", "embed.weight", given="source_embed.weight"),
        *BART_LAYERS,
    ),
    classes={"MarianMTModel": Class(LM, BART_LM, "model."), "MarianModel": Class(BARE)},
    ignored=(*BART_IGNORED, r"(model\.)?(encoder|decoder)\.embed_positions\.weight"),
)

# --------------------------------------------------------------------------------------------------------- T5


def _read_feed_forward(settings: Json) -> Json:
    """ "relu", "gated-silu" ... but a gated gelu is always the tanh form."""
    spelled = settings.get("feed_forward_proj") or "relu"
    *gated, name = str(spelled).split("-")
    if gated not in ([], ["gated"]) or name not in ACTIVATIONS:
        raise ValueError(f"feed_forward_proj={spelled!r:.80} is unknown")
    tanh = gated and name == "gelu"
    return {"gated": bool(gated), "activation": "gelu_tanh" if tanh else ACTIVATIONS[name]}


def _write_feed_forward(config: ModelConfig) -> Json:
    name = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == config.activation)
    if config.gated and config.activation == "gelu_tanh":
        name = "gelu"
    return {"feed_forward_proj": f"gated-{name}" if config.gated else name}


def _read_output(settings: Json) -> Json:
    """Older files say with `tie_word_embeddings: false` also that the outputs are not scaled."""
    tied = settings.get("tie_word_embeddings") is not False
    scaled = settings.get("scale_decoder_outputs")
    scaled = tied if scaled is None else scaled
    return {"tied": tied, "logit_scale": Key("d_model").read(settings) ** -0.5 if scaled else 1.0}


FEED_FORWARD = Part(
    ("feed_forward_proj", "dense_act_fn", "is_gated_act"), _read_feed_forward, _write_feed_forward
)
OUTPUT = Part(
    ("tie_word_embeddings", "scale_decoder_outputs"),
    _read_output,
    lambda config: {
        "tie_word_embeddings": config.tied,
        "scale_decoder_outputs": config.logit_scale != 1.0,
    },
)
T5_ATTENTION = {f"{name}.weight": f"{name}.weight" for name in "qkvo"}


def t5_feed_forward(theirs: str, ours: str) -> tuple[Row, ...]:
    """One matrix before the activation, or two."""
    gate, up = f"{ours}gate.weight", f"{ours}up.weight"
    return (
        Row(f"{theirs}wi.weight", up, unless=gate),
        Row(f"{theirs}wi_0.weight", gate),
        Row(f"{theirs}wi_1.weight", up, given=gate),
        Row(f"{theirs}wo.weight", f"{ours}down.weight"),
    )


def t5_stack(stack: str, ff: int) -> tuple[Row, ...]:
    """The rows of the encoder or the decoder; `ff`: the number of the feed-forward sub-layer."""
    block, theirs = f"{stack}.blocks.{{i}}.", f"{stack}.block.{{i}}.layer."
    return (
        Row(
            f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            f"{stack}.relative.weight",
        ),
        *in_layers(f"{theirs}0.SelfAttention.", f"{block}attn.", T5_ATTENTION),
        Row(f"{theirs}0.layer_norm.weight", f"{block}attn_norm.weight"),
        *in_layers(f"{theirs}1.EncDecAttention.", f"{block}cross.", T5_ATTENTION),
        Row(f"{theirs}1.layer_norm.weight", f"{block}cross_norm.weight"),
        *t5_feed_forward(f"{theirs}{ff}.DenseReluDense.", f"{block}ff."),
        Row(f"{theirs}{ff}.layer_norm.weight", f"{block}ff_norm.weight"),
        Row(f"{stack}.final_layer_norm.weight", f"{stack}.norm.weight"),
    )


T5 = Family(
    model_type="t5",
    keys={
        "vocab_size": Key("vocab_size"),
        "max_len": Key("n_positions", 512),  # no limit of the model, only what it was trained with
        "d_model": Key("d_model"),
        "n_layers": Key("num_decoder_layers", older=("num_layers",)),
        "n_encoder_layers": Key("num_layers"),
        "n_heads": Key("num_heads"),
        "d_head": Key("d_kv"),
        "d_ff": Key("d_ff"),
        "norm_eps": Key("layer_norm_epsilon", 1e-6),
        "relative_buckets": Key("relative_attention_num_buckets", 32),
        "relative_max_distance": Key("relative_attention_max_distance", 128),
        **dict.fromkeys(
            ("embed_dropout", "attn_dropout", "residual_dropout", "ff_dropout"), Key("dropout_rate", 0.1)
        ),
    },
    parts=(FEED_FORWARD, OUTPUT),
    fixed={"shape": "encoder-decoder", "norm": "rms", "positions": "relative", "attn_scale": 1.0},
    rows=(Row("shared.weight", "embed.weight"), *t5_stack("encoder", ff=1), *t5_stack("decoder", ff=2)),
    classes={
        "T5ForConditionalGeneration": Class({"head": "lm"}, (Row("lm_head.weight", "head.weight"),)),
        "T5Model": Class({"head": "none"}),
    },
    ignored=(
        r"(encoder|decoder)\.embed_tokens\.weight",
        r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
        r"lm_head\.weight",
    ),
)

FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (BERT, ROBERTA, DISTILBERT, MODERNBERT, MARIAN, BART, T5)
}

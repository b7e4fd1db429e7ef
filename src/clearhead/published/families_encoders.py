"""The families of published models as tables: encoders. The columns: mapping.py."""

from clearhead.model.config import ModelConfig
from clearhead.published.mapping import SPLIT, Class, Family, Json, Key, Part, Row, in_layers
from clearhead.published.quirks import ACTIVATIONS, layered_rope_part, windowed_layers

BIASES = {"qkv_bias": True, "out_bias": True, "ff_bias": True}
POST_NORM = {"norm": "layer", "norm_placement": "post", "final_norm": False, "gated": False} | BIASES

# The heads. `head_activation` of a masked head is the blocks' own unless a class says otherwise.
MASKED = {"head": "masked", "head_bias": True, "head_norm": True}
SEQUENCE = {"head": "sequence", "head_bias": True, "head_activation": "tanh"}
TOKEN = {"head": "token", "head_bias": True, "head_activation": None}
SPAN = {"head": "span", "head_bias": True, "head_activation": None, "n_labels": 2}
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


FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (BERT, ROBERTA, DISTILBERT, MODERNBERT)
}

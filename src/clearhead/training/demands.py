"""What each objective demands of the model and of the recipe's other settings.

    objective        the model                     learns from            a target is
    next_token       decoder, lm                   running text, chats    the token that follows
    masked           encoder, masked               running text           a token that was hidden
    translation      encoder-decoder, lm           pairs of texts         the next token of the second text
    classes          encoder or decoder, sequence  labelled texts         the text's one label
    several_labels   encoder or decoder, sequence  labelled texts         whether a label applies, for each
    regression       encoder or decoder, sequence  labelled texts         the text's number
    token_labels     encoder or decoder, token     tagged words           the word's tag
    span             encoder or decoder, span      questions and texts    where the answer starts, and ends
    contrastive      encoder or decoder, embedding pairs of texts         the text's own other text

The head follows from the objective, as `n_labels` and `vocab_size` follow from the data: a recipe may leave
them away.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from clearhead.model.config import Head, ModelConfig, Shape

Objective = Literal[
    "next_token",
    "masked",
    "translation",
    "classes",
    "several_labels",
    "regression",
    "token_labels",
    "span",
    "contrastive",
]


class Demand(NamedTuple):
    """The shapes of model that can learn something, the head it needs, and what it learns from."""

    shapes: tuple[Shape, ...]
    head: Head
    examples: str
    targets: str
    """What its targets are called, several of them."""
    rows: str | None = None
    """What people count instead, one for each row of a batch; None: the targets."""


ONE_STACK: tuple[Shape, ...] = ("encoder", "decoder")
DEMANDS: dict[Objective, Demand] = {
    "next_token": Demand(("decoder",), "lm", "text", "tokens"),
    "masked": Demand(("encoder",), "masked", "text", "hidden tokens"),
    "translation": Demand(("encoder-decoder",), "lm", "pairs", "target tokens"),
    "classes": Demand(ONE_STACK, "sequence", "labelled texts", "labels", "examples"),
    "several_labels": Demand(ONE_STACK, "sequence", "labelled texts", "decisions", "examples"),
    "regression": Demand(ONE_STACK, "sequence", "labelled texts", "numbers", "examples"),
    "token_labels": Demand(ONE_STACK, "token", "tagged words", "words"),
    "span": Demand(ONE_STACK, "span", "questions", "starts and ends", "windows"),
    "contrastive": Demand(ONE_STACK, "embedding", "pairs", "pairs", "pairs"),
}

_RUNNING: tuple[Objective, ...] = ("next_token", "masked")
_PAIRS: tuple[Objective, ...] = ("translation", "contrastive")
_LABELLED: tuple[Objective, ...] = ("classes", "several_labels", "regression")

# Settings that only some objectives look at.
SERVES: dict[str, tuple[Objective, ...]] = {
    "data.form": ("next_token",),
    "data.field": (*_RUNNING, *_PAIRS, *_LABELLED),
    "data.document_separator": _RUNNING,
    "data.strict": _RUNNING,
    "data.target": _PAIRS,
    "data.validation_target": _PAIRS,
    "data.target_field": _PAIRS,
    "data.start_token": ("translation",),
    "data.label_field": _LABELLED,
    "data.second_field": _LABELLED,
    "data.word_column": ("token_labels",),
    "data.tag_column": ("token_labels",),
    "train.document_mask": _RUNNING,
    "train.label_smoothing": ("next_token", "masked", "translation", "classes", "token_labels"),
    "train.mask_share": ("masked",),
    "train.contrastive_scale": ("contrastive",),
    "train.contrastive_both": ("contrastive",),
    "train.sample_every": ("next_token", "translation"),
    "train.sample_prompt": ("next_token",),
    "train.sample_tokens": ("next_token",),
}

# Settings that look at running text, and not at conversations.
NOT_FOR_CHATS = (
    *("data.document_separator", "data.strict", "train.document_mask"),
    *("train.sample_every", "train.sample_prompt", "train.sample_tokens"),
)


def check_demands(objective: Objective, model: ModelConfig, given: Mapping[str, Any]) -> None:
    """Raise ValueError for a model that cannot learn this objective, or a setting that does nothing for it.

    given: the settings that are not at their defaults, as {"train.mask_share": 0.3}.
    """
    demand = DEMANDS[objective]
    asked = f"train.objective={objective!r}"
    if model.shape not in demand.shapes:
        shapes = " or ".join(f"{shape!r}" for shape in demand.shapes)
        raise ValueError(f"{asked} needs model.shape={shapes}, not {model.shape!r}")
    if model.head not in (demand.head, "lm"):
        raise ValueError(
            f"{asked} needs model.head={demand.head!r}, not {model.head!r}; leave model.head away, it follows"
        )
    if model.shape == "decoder" and demand.head in ("sequence", "embedding") and model.pool == "first":
        raise ValueError(
            f"{asked} reads the whole text, and a decoder's first position sees only itself; "
            "choose model.pool='last' or 'mean'"
        )
    for name, value in given.items():
        if name in SERVES and objective not in SERVES[name]:
            raise ValueError(
                f"{name}={value!r} has no effect with {asked}; it serves {', '.join(SERVES[name])}"
            )
        if name in NOT_FOR_CHATS and given.get("data.form") == "chat":
            raise ValueError(f"{name}={value!r} has no effect with data.form='chat'; leave one of them away")
    if objective == "contrastive" and given.get("train.batch_size") == 1:
        raise ValueError(f"{asked} tells the pairs of a batch apart; train.batch_size=1 must be at least 2")
    if "data.validation_target" in given and "data.validation" not in given:
        raise ValueError("data.validation_target has no effect without data.validation; give both or neither")
    if demand.examples != "text" and "data.source" not in given:
        raise ValueError(f"{asked} learns from {demand.examples}: give their file as data.source")


def fit_head(model: ModelConfig, objective: Objective, n_labels: int = 0) -> ModelConfig:
    """The config with the head that the objective needs. ValueError when it names another number of labels.

    >>> fit_head(ModelConfig(shape="encoder"), "classes", 3).n_labels
    3
    """
    head = DEMANDS[objective].head
    if head not in ("sequence", "token"):
        return model.replace(head=head)
    if model.n_labels not in (0, 1, n_labels):  # 1: a head that waits for its data
        raise ValueError(
            f"model.n_labels={model.n_labels}, but the training examples have {n_labels}; "
            "leave model.n_labels away, it follows from them"
        )
    return model.replace(head=head, n_labels=n_labels)

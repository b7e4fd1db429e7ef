"""A decoder as the evaluation harness `lm-eval` wants it, so that its hundreds of tasks can be run:

    import lm_eval
    from clearhead.training.harness import for_lm_eval

    lm_eval.simple_evaluate(model=for_lm_eval("runs/demo"), tasks=["lambada_openai"])

    loglikelihood           log p(continuation | context), and whether it is the greedy one
    loglikelihood_rolling   log p(text): every token once, in windows as long as the model reads
    generate_until          the continuation of a context, up to a stop string

The harness asks with objects whose `args` hold the texts (Gao et al., EleutherAI/lm-evaluation-harness,
version 0.4). It is imported only by `for_lm_eval`.
"""

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.generation.decode import stream
from clearhead.generation.special_ids import published_ids
from clearhead.model.transformer import Transformer
from clearhead.published.models import load
from clearhead.published.similarity import pad_right
from clearhead.text.chat import ChatTemplate
from clearhead.text.foreign import AnyTokenizer
from clearhead.text.frame import end_of_text
from clearhead.training.machine import find_device
from clearhead.training.run_folder import RunFolder, load_run

LOGITS = 64_000_000  # numbers in the logits of a batch, at most
SAMPLING = ("temperature", "top_k", "top_p")


@runtime_checkable
class Request(Protocol):
    """What the harness asks: texts and options in `args`."""

    @property
    def args(self) -> tuple[Any, ...]:
        """The texts and options."""
        ...


class Scored(NamedTuple):
    """A sequence to score: all its ids, and how many at its end count."""

    ids: list[int]
    n_counted: int


class Scorer:
    """Log-probabilities and continuations of texts, by the three questions that the harness has."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: AnyTokenizer,
        batch_size: int = 16,
        max_new_tokens: int = 256,
    ) -> None:
        if model.config.shape != "decoder" or model.config.head != "lm":
            raise ValueError(
                f"lm-eval asks for next tokens, of a decoder with the head 'lm'; this model is "
                f"{model.config.shape!r} with the head {model.config.head!r}"
            )
        if batch_size < 1 or max_new_tokens < 1:
            raise ValueError(
                f"batch_size={batch_size} and max_new_tokens={max_new_tokens} must be at least 1"
            )
        self.model, self.text_ids = model.eval(), tokenizer
        self.rows, self.max_new_tokens = batch_size, max_new_tokens
        self.first = first_id(model, tokenizer)

    def loglikelihood(self, requests: Sequence[Request], **options: Any) -> list[tuple[float, bool]]:
        """For each (context, continuation): log p of the continuation in nats, and whether it is greedy.

        A context that does not fit loses its beginning. An empty one is the token that begins a text.
        """
        return self._score([self._cut(*self._split(*request.args)) for request in requests])

    def loglikelihood_rolling(self, requests: Sequence[Request], **options: Any) -> list[float]:
        """For each (text,): log p of the whole text in nats, the first token after the one that begins it."""
        totals = []
        for request in requests:
            ids = self.text_ids.encode(request.args[0])
            windows = list(rolling_windows(ids, self.first, self.model.config.max_len))
            totals.append(sum(total for total, _ in self._score(windows)))
        return totals

    def generate_until(self, requests: Sequence[Request], **options: Any) -> list[str]:
        """For each (context, options): the text that follows, up to one of the stop strings `until`."""
        return [self._continue(*request.args) for request in requests]

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as the model's chat template spells it."""
        template = ChatTemplate.of(self.text_ids)
        return template.render(chat_history, add_generation_prompt=add_generation_prompt)

    @property
    def tokenizer_name(self) -> str:
        """What the harness keeps its prepared requests under."""
        return self.text_ids.fingerprint

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The model's chat template, or "" where none is asked for."""
        return (self.text_ids.usage.template() or "") if chat_template else ""

    # ---------------------------------------------------------------------------------------------- scoring

    def _split(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of a context and of what follows it, cut as the joined text is; blanks at the border go to the
        latter.
        """
        bare = context.rstrip()
        whole = self.text_ids.encode(context + continuation)
        before = self.text_ids.encode(bare) if bare else []
        return before, whole[len(before) :]

    def _cut(self, before: list[int], after: list[int]) -> Scored:
        """What the model reads, as far as it fits: the last ids, the first of them not predicted."""
        longest = self.model.config.max_len + 1
        return Scored([*(before or [self.first]), *after][-longest:], min(len(after), longest - 1))

    @torch.inference_mode()
    def _score(self, rows: Sequence[Scored]) -> list[tuple[float, bool]]:
        """Sum of log p of the counted ids of each row, and whether each of them is the likeliest."""
        order = sorted(range(len(rows)), key=lambda number: -len(rows[number].ids))
        found: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        start = 0
        while start < len(order):
            width = len(rows[order[start]].ids)
            size = max(1, min(self.rows, LOGITS // (width * self.model.config.vocab_size)))
            chosen = order[start : start + size]
            tokens, mask = pad_right([rows[number].ids for number in chosen], self.model.embed.weight.device)
            logits = self.model(tokens[:, :-1], mask=mask[:, :-1])
            for number, said, ids in zip(chosen, logits, tokens, strict=True):
                end, n = len(rows[number].ids) - 1, rows[number].n_counted
                found[number] = log_probability(said[end - n : end], ids[end - n + 1 : end + 1])
            start += size
        return found

    def _continue(self, context: str, options: Mapping[str, Any]) -> str:
        """One continuation. Options the harness names and that mean nothing here are a ValueError."""
        wanted = dict(options)
        until = wanted.pop("until", None) or []
        longest = int(wanted.pop("max_gen_toks", wanted.pop("max_new_tokens", self.max_new_tokens)))
        sampling: dict[str, Any] = {name: wanted.pop(name) for name in SAMPLING if name in wanted}
        if not wanted.pop("do_sample", False):
            sampling = {"temperature": 0.0}
        if wanted:
            raise ValueError(f"generate_until: unknown options {', '.join(sorted(wanted))}")
        room = self.model.config.max_len - longest
        if room < 1:
            raise ValueError(
                f"max_gen_toks={longest} leaves no room for a context in the model's "
                f"{self.model.config.max_len} positions (max_len)"
            )
        ids = (self.text_ids.encode(context) or [self.first])[-room:]
        stop = [until] if isinstance(until, str) else [text for text in until if text]
        pieces = stream(
            self.model, ids, tokenizer=self.text_ids, max_new_tokens=longest, stop=stop, **sampling
        )
        return "".join(pieces)


def log_probability(logits: Float[Tensor, "T V"], ids: Int[Tensor, " T"]) -> tuple[float, bool]:
    """Sum of log p(id) in nats, in float32 or wider, and whether each id is the likeliest one."""
    scores = logits.float().log_softmax(-1)
    chosen = scores.gather(-1, ids[:, None]).double().sum().item()
    return chosen, bool((logits.argmax(-1) == ids).all())


def rolling_windows(ids: Sequence[int], first: int, longest: int) -> Iterator[Scored]:
    """Windows of at most `longest` positions in which each id is predicted once, with all context there is.

    The last one reads ids that the one before has scored already.

    >>> [tuple(window) for window in rolling_windows([1, 2, 3, 4, 5], first=9, longest=2)]
    [([9, 1, 2], 2), ([2, 3, 4], 2), ([3, 4, 5], 1)]
    """
    whole = [first, *ids]
    for begin in range(0, len(ids), longest):
        end = min(begin + longest, len(ids))
        yield Scored(whole[max(0, end - longest) : end + 1], end - begin)


def first_id(model: Transformer, tokenizer: AnyTokenizer) -> int:
    """What stands before the first token of a text: what the tokenizer puts there, else the end of the text
    before. A model that knows neither is a ValueError.
    """
    before, _ = tokenizer.around
    ends = published_ids(model).ends or ()
    candidates = [*before[:1], end_of_text(tokenizer), *ends]
    found = next((token for token in candidates if token is not None), None)
    if found is None:
        raise ValueError("the tokenizer has no special token that stands before a text; lm-eval needs one")
    return found


def for_lm_eval(
    place: str | Path,
    *,
    batch_size: int = 16,
    max_new_tokens: int = 256,
    device: str = "auto",
    dtype: torch.dtype | None = None,
) -> Any:
    """The model of a run or of a published folder as an object of `lm_eval.api.model.LM`.

    `max_new_tokens`: of a generated answer, where a task does not say. Raises ValueError if lm-eval is not
    installed, or for a model that says no next token.
    """
    try:
        base: Any = import_module("lm_eval.api.model").LM
    except ImportError:
        raise ValueError("this needs the evaluation harness: pip install lm-eval") from None
    if RunFolder(place).exists():
        model, tokenizer = load_run(place, find_device(device))
        model = model if dtype is None else model.to(dtype)
    else:
        model, found = load(place, dtype=dtype, device=find_device(device))
        if found is None:
            raise ValueError(f"{place} holds no tokenizer, which turns text into the model's tokens")
        tokenizer = found

    class HarnessModel(Scorer, base):
        """Our answers, the harness's bookkeeping."""

        def __init__(self) -> None:
            base.__init__(self)
            Scorer.__init__(self, model, tokenizer, batch_size, max_new_tokens)

    return HarnessModel()

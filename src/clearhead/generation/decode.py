"""From a prompt to its continuation: read the prompt once, then one token at a time.

    read     the whole prompt in one pass fills the cache and gives the first logits
    choose   the next token of every row (sample.py); each row's `Reply` hears it
    extend   the model reads that token and gives the next logits; back to choose

A row ends at `max_new_tokens`, at an end token, or when its text holds a stop string. `Decoding` is the only
loop: `generate` runs it to its end, `stream` hands out text between its steps.

The prompt of an encoder-decoder is what it reads, once; what it says begins at its start id.

A compiled model works as it is, `generate(torch.compile(model), prompt)`: one graph reads prompts of any
length, one makes a step.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import index
from typing import Any, Literal, TypeVar, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead.generation.reply import Reply
from clearhead.generation.sample import Generators, Sampling, check_finite, choose, seen_tokens
from clearhead.generation.special_ids import SpecialIds, as_ids, leave_only, leave_out, published_ids
from clearhead.generation.window import Window, pad_left
from clearhead.model.transformer import Transformer
from clearhead.text.foreign import AnyTokenizer

END_OF_TEXT = "<|endoftext|>"  # the special token that ends a document, in our tokenizers and in many others

Overflow = Literal["error", "slide"]
Prompts = TypeVar("Prompts", str, list[str], list[int], list[list[int]], Int[Tensor, "*batch _"])


def generate(
    model: Transformer,
    prompts: Prompts,
    *,
    tokenizer: AnyTokenizer | None = None,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    generators: Sequence[torch.Generator] | None = None,
    stop: str | Sequence[str] = (),
    eos_id: int | Sequence[int] | None = None,
    pad_id: int | None = None,
    start_id: int | None = None,
    overflow: Overflow = "error",
) -> Prompts:
    """Continue one prompt or many; the answer has the form of the prompts and holds the new part only.

    Text (needs `tokenizer`) gives text, a list of ids a list of new ids, a tensor (B, T) of prompts of one
    length a tensor (B, N), filled up with `pad_id` (default: the published model's, else the first end id,
    else 0) behind rows that ended early. Prompts of different lengths are padded on the left.

    `max_new_tokens` are made, fewer only when a row ends: with `eos_id`, which is the last of the new ids and
    no part of the text (one id, several, or () for none; by default what a published model names, else the
    tokenizer's <|endoftext|>), or when its text holds one of the `stop` strings (needs `tokenizer`): the text
    is cut before the earliest one, the new ids include the token that completed it.

    The choice of a token is described at `Sampling`; by default it is greedy. `seed` starts one generator
    whose stream all rows share, as in `transformers`; with `generators`, one per row, a row's tokens do not
    depend on its neighbours. `start_id` begins what an encoder-decoder says, by default the id a published
    model names; what such a model's folder forces or bans is forced and banned.

    The prompt and the new tokens together must fit into the model's `max_len`. With overflow="slide" they
    need not: when the window is full the older half of its tokens is forgotten and the rest read anew, from
    position 0; a longer prompt loses its beginning in the same way. Raises ValueError for an empty prompt, an
    id outside the vocabulary, an overflow, an option out of range, or logits that are not finite.

    >>> from clearhead import ModelConfig
    >>> model = Transformer(ModelConfig(vocab_size=50, d_model=32, n_layers=2, n_heads=4))
    >>> len(generate(model, [3, 1, 4], max_new_tokens=5))
    5
    """
    decoding = Decoding(
        model,
        read_prompts(prompts, tokenizer, framed=expects_frame(model)),
        Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed),
        tokenizer=tokenizer,
        max_new_tokens=max_new_tokens,
        generators=generators,
        stop=stop,
        eos_id=eos_id,
        pad_id=pad_id,
        start_id=start_id,
        overflow=overflow,
    )
    return _run(decoding, prompts)


def stream(
    model: Transformer,
    prompt: str | list[int],
    *,
    tokenizer: AnyTokenizer,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    stop: str | Sequence[str] = (),
    eos_id: int | Sequence[int] | None = None,
    start_id: int | None = None,
    overflow: Overflow = "error",
) -> Iterator[str]:
    """Continue one prompt and hand out the text piece by piece; the options are those of `generate`.

    The pieces joined are the text `generate` returns. A piece ends on a whole character, and text that may be
    the beginning of a stop string waits until that is decided. Mistakes raise here, not at the first piece.
    """
    decoding = Decoding(
        model,
        read_prompts([prompt] if isinstance(prompt, str) else prompt, tokenizer, expects_frame(model)),
        Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed),
        tokenizer=tokenizer,
        max_new_tokens=max_new_tokens,
        stop=stop,
        eos_id=eos_id,
        start_id=start_id,
        overflow=overflow,
    )
    return _pieces(decoding)


def _pieces(decoding: "Decoding") -> Iterator[str]:
    for _ in decoding:
        if piece := decoding.replies[0].take():
            yield piece


class Decoding:
    """Rows of ids being continued. Iterating makes the tokens: one list, an id per row, for each step.

    `replies[i]` holds what row i has said so far. The options are those of `generate`. A row that has ended
    runs along until all have; what is chosen for it is not heard. `go_on` is told before each step whether a
    row here needs it, and may let all run along for rows elsewhere.
    """

    def __init__(
        self,
        model: Transformer,
        rows: list[list[int]],
        sampling: Sampling,
        *,
        tokenizer: AnyTokenizer | None = None,
        max_new_tokens: int = 64,
        generators: Sequence[torch.Generator] | None = None,
        stop: str | Sequence[str] = (),
        eos_id: int | Sequence[int] | None = None,
        pad_id: int | None = None,
        start_id: int | None = None,
        overflow: Overflow = "error",
        go_on: Callable[[bool], bool] = bool,
    ) -> None:
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 0")
        if model.config.shape == "encoder" or model.config.head != "lm":
            shape, head = model.config.shape, model.config.head
            raise ValueError(
                f"this model ({shape}, head {head!r}) says no next token; give a decoder or an "
                "encoder-decoder with the head 'lm'"
            )
        stops = _stop_strings(stop, tokenizer)
        self.special = special = _special_ids(model, tokenizer, start_id, eos_id, pad_id)
        self.pad_id, ends = special.pad or 0, special.ends or ()
        named = {"start_id": [special.start or 0], "eos_id": ends, "pad_id": [self.pad_id]}
        config = model.config
        _check_ids(named, config.vocab_size)
        prompts = {f"prompts[{number}]": row for number, row in enumerate(rows)}
        _check_ids(prompts, config.source_vocab_size or config.vocab_size)
        sources, self.rows = _begin(model, rows, special, max_new_tokens, overflow)
        _check_room(max(map(len, self.rows)), max_new_tokens, config.max_len, overflow)
        self.sampling, self.max_new_tokens, self.go_on = sampling, max_new_tokens, go_on
        self.window = Window(model, self.rows, max_new_tokens, self.pad_id, sources)
        self.generators = _generators(generators, len(rows), sampling, self.window.device)
        self.replies = [Reply(max_new_tokens, ends, tokenizer, stops) for _ in rows]
        self._made = 0  # steps so far
        self._tokens: Int[Tensor, " B"] | None = None  # chosen in the last one
        self._seen: Bool[Tensor, "B V"] | None = None  # for the repetition penalty

    def __iter__(self) -> Iterator[list[int]]:
        while self.go_on(not all(reply.done for reply in self.replies)):
            yield self._step()

    @torch.inference_mode()
    def _step(self) -> list[int]:
        """One more token for every row. The first step reads the prompts, the others the token before."""
        if self._tokens is None:
            logits = self.window.read()
            self._seen = self._seen_in_prompts(logits.shape[-1])
        else:
            logits = self.window.extend(self._tokens, [reply.done for reply in self.replies])
        self._made += 1
        check_finite(logits, self._made)
        self._tokens = choose(self._force(logits), self.sampling, self._seen, self.generators)
        if self._seen is not None:
            self._seen.scatter_(1, self._tokens[:, None], True)
        ids = self._tokens.tolist()
        for reply, token in zip(self.replies, ids, strict=True):
            reply.hear(token)
        return ids

    def _force(self, logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        """What the model's folder forbids or demands at this step."""
        if self._made == self.max_new_tokens and self.special.last is not None:
            return leave_only(logits, self.special.last)
        if self._made == 1 and self.special.first is not None:
            return leave_only(logits, self.special.first)
        return leave_out(logits, self.special.banned)

    def _seen_in_prompts(self, vocab_size: int) -> Bool[Tensor, "B V"] | None:
        """The tokens of the rows so far, for the repetition penalty; None without one."""
        if self.sampling.repetition_penalty == 1:
            return None
        return seen_tokens(*pad_left(self.rows, self.pad_id, self.window.device), vocab_size)


def read_prompts(
    prompts: str | list[str] | list[int] | list[list[int]] | Int[Tensor, "*batch _"],
    tokenizer: AnyTokenizer | None,
    framed: bool = False,
) -> list[list[int]]:
    """Prompts in any of the forms `generate` takes, as rows of ids. Raises ValueError for an empty one.

    `framed`: text gets the tokens around it that the tokenizer puts around a sentence.
    """
    if isinstance(prompts, Tensor) and prompts.dim() not in (1, 2):
        raise ValueError(f"prompts of shape {tuple(prompts.shape)} are neither (B, T) nor (T)")
    batch: Any = prompts.tolist() if isinstance(prompts, Tensor) else prompts
    rows = [_read_prompt(row, tokenizer, framed) for row in (batch if _is_batch(batch) else [batch])]
    for number, row in enumerate(rows):
        if not row:
            name = "the prompt" if len(rows) == 1 else f"prompts[{number}]"
            raise ValueError(f"{name} is empty; give at least one token ({END_OF_TEXT} asks for a new text)")
    return rows


def expects_frame(model: Transformer) -> bool:
    """Whether a text is given to this model as a sentence: published models and encoders expect it so."""
    return model.config.shape == "encoder-decoder" or getattr(model, "origin", None) is not None


def _read_prompt(prompt: str | list[int], tokenizer: AnyTokenizer | None, framed: bool) -> list[int]:
    if not isinstance(prompt, str):
        return [index(token) for token in prompt]
    if tokenizer is None:
        raise ValueError("a prompt that is text needs the tokenizer; give tokenizer=..., or token ids")
    return tokenizer.encode_sentence(prompt) if framed else tokenizer.encode(prompt)


def _is_batch(prompts: object) -> bool:
    return isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], str | list)


def _run(decoding: Decoding, prompts: Prompts) -> Prompts:
    """Let all rows come to their end; what they said, in the form in which the prompts were given."""
    for _ in decoding:
        pass
    replies = decoding.replies
    if isinstance(prompts, Tensor):
        longest = max(len(reply.ids) for reply in replies)
        ids = [reply.ids + [decoding.pad_id] * (longest - len(reply.ids)) for reply in replies]
        answer = torch.tensor(ids, dtype=torch.long, device=prompts.device).reshape(*prompts.shape[:-1], -1)
    elif isinstance(prompts, str):
        answer = replies[0].take()
    elif not _is_batch(prompts):
        answer = replies[0].ids
    elif isinstance(prompts[0], str):
        answer = [reply.take() for reply in replies]
    else:
        answer = [reply.ids for reply in replies]
    return cast(Prompts, answer)


def _stop_strings(stop: str | Sequence[str], tokenizer: AnyTokenizer | None) -> list[str]:
    stops = [stop] if isinstance(stop, str) else list(stop)
    if "" in stops:
        raise ValueError("a stop string is empty; give stop=() for none")
    if stops and tokenizer is None:
        raise ValueError(f"stop={stops} is matched on text, which needs the tokenizer; give tokenizer=...")
    return stops


def _special_ids(
    model: Transformer,
    tokenizer: AnyTokenizer | None,
    start_id: int | None,
    eos_id: int | Sequence[int] | None,
    pad_id: int | None,
) -> SpecialIds:
    """The ids asked for, else those of the published model, else the tokenizer's."""
    if start_id is not None and model.config.shape != "encoder-decoder":
        raise ValueError(f"start_id={start_id} is for encoder-decoders; a decoder begins with its prompt")
    special = published_ids(model)
    if eos_id is not None:
        ends = as_ids(eos_id)
        special = replace(special, ends=ends, last=special.last if special.last in ends else None)
    elif special.ends is None:
        specials = {} if tokenizer is None else tokenizer.special_tokens
        special = replace(special, ends=as_ids(specials.get(END_OF_TEXT)))
    if pad_id is None:
        pad_id = special.pad if special.pad is not None else next(iter(special.ends or ()), 0)
    return replace(special, pad=pad_id, start=special.start if start_id is None else start_id)


def _begin(
    model: Transformer,
    rows: list[list[int]],
    special: SpecialIds,
    max_new_tokens: int,
    overflow: Overflow,
) -> tuple[list[list[int]] | None, list[list[int]]]:
    """What an encoder reads (None without one), and with what the rows begin."""
    if model.config.shape != "encoder-decoder":
        return None, rows
    if special.start is None:
        raise ValueError("an encoder-decoder begins with a token of its own; give start_id=...")
    if overflow == "slide":
        raise ValueError("overflow='slide' is for decoders; an encoder-decoder reads its prompt as a whole")
    room = model.config.max_len - 1
    if max_new_tokens > room:
        raise ValueError(
            f"max_new_tokens={max_new_tokens} and the start exceed the model's {room + 1} positions "
            f"(max_len): max_new_tokens of at most {room} fits"
        )
    return rows, [[special.start] for _ in rows]


def _generators(
    own: Sequence[torch.Generator] | None, n_rows: int, sampling: Sampling, device: torch.device
) -> Generators:
    """One generator per row if given, else one with the seed for all, else torch's global one."""
    if own is None:
        return sampling.generator(device)
    if sampling.seed is not None:
        raise ValueError(f"seed={sampling.seed} and generators were both given; give one of them")
    if len(own) != n_rows:
        raise ValueError(f"{len(own)} generators were given for {n_rows} prompts; each needs its own")
    return own


def _check_ids(named: Mapping[str, Sequence[int]], vocab_size: int) -> None:
    for name, ids in named.items():
        for token in ids:
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"{name}: token id {token} is outside the model's vocabulary 0..{vocab_size - 1}"
                )


def _check_room(longest: int, max_new_tokens: int, max_len: int, overflow: Overflow) -> None:
    if overflow not in ("error", "slide"):
        raise ValueError(f"overflow={overflow!r} is unknown; choose 'error' or 'slide'")
    if overflow == "slide" or longest + max_new_tokens <= max_len:
        return
    room = max_len - longest
    cure = f"max_new_tokens of at most {room} fits" if room > 0 else "shorten the prompt"
    raise ValueError(
        f"a prompt of {longest} tokens and max_new_tokens={max_new_tokens} exceed the model's {max_len} "
        f"positions (max_len): {cure}, or overflow='slide' forgets the oldest tokens"
    )

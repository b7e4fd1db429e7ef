"""A conversation with a chat model: what was said so far, and the next answer, as it comes.

    talk = Conversation(model, tokenizer)
    "".join(talk.say("What is the capital of France?"))
    "".join(talk.say("And of Italy?"))

Each turn gives the model the whole conversation through its chat template. One that outgrows the model loses
its oldest turns, never the system's words.
"""

from collections.abc import Iterator
from typing import Any

from clearhead.generation.decode import stream
from clearhead.model.transformer import Transformer
from clearhead.text.chat import ChatTemplate
from clearhead.text.foreign import AnyTokenizer


class Conversation:
    """The messages so far. `system`: what the model is told before all else; `template`: its own if None.

    `forgotten` counts the messages that no longer fit. A model without a chat template is a ValueError.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: AnyTokenizer,
        system: str | None = None,
        template: ChatTemplate | None = None,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.template = ChatTemplate.of(tokenizer) if template is None else template
        self.messages: list[dict[str, Any]] = []
        self.forgotten = 0
        if system is not None:
            self.messages.append({"role": "system", "content": system})

    def say(self, text: str, *, max_new_tokens: int = 512, **options: Any) -> Iterator[str]:
        """Say something and yield the answer piece by piece; the options are those of `stream`.

        When the last piece has come, both belong to the conversation; an answer that is broken off is
        forgotten together with the question. A message that does not fit the model is a ValueError.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        prompt, kept = self._fit(asked, max_new_tokens)
        pieces = stream(
            self.model, prompt, tokenizer=self.tokenizer, max_new_tokens=max_new_tokens, **options
        )
        return self._answer(kept, len(asked) - len(kept), pieces)

    def _answer(self, kept: list[dict[str, Any]], dropped: int, pieces: Iterator[str]) -> Iterator[str]:
        answer = ""
        for piece in pieces:
            shown = piece if answer else piece.lstrip()
            answer += shown
            if shown:
                yield shown
        self.forgotten += dropped
        self.messages = [*kept, {"role": "assistant", "content": answer.rstrip()}]

    def _fit(
        self, messages: list[dict[str, Any]], max_new_tokens: int
    ) -> tuple[list[int], list[dict[str, Any]]]:
        """The ids of the latest messages that leave room for the answer, and these messages."""
        limit = self.model.config.max_len - max_new_tokens
        first = int(messages[0]["role"] == "system")
        kept = messages
        while True:
            prompt = self.template.encode(kept, self.tokenizer)
            if len(prompt) <= limit:
                return prompt, kept
            rest = kept[first:]
            if len(rest) == 1:
                raise ValueError(
                    f"the message takes {len(prompt)} tokens and the answer up to {max_new_tokens}; "
                    f"the model has room for {self.model.config.max_len}"
                )
            kept = kept[:first] + rest[2:]  # a question goes together with its answer

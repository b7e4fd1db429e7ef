"""Text in pieces: read it chunk by chunk as if it had come at once, and show it token by token.

The end of a chunk may be the middle of anything: of a UTF-16 pair, of a special token, of an accented letter,
of a word. Each part here holds back the end that a continuation could still change and lets go of everything
before it, so what is held never grows beyond the longest pre-token (times a small constant).
"""

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import SupportsIndex

from clearhead.text.normalise import normalise, settled_prefix
from clearhead.text.pretokenize import compile_splitter, mend_surrogates, settled_length, special_pattern


def mended(chunks: Iterable[str]) -> Iterator[str]:
    """Yield the chunks without surrogates; a pair that two chunks share becomes its one character."""
    held = ""
    for chunk in chunks:
        text = held + chunk
        complete = len(text) - ("\ud800" <= text[-1:] <= "\udbff")
        held = text[complete:]
        yield mend_surrogates(text[:complete])
    yield mend_surrogates(held)


class SpecialCutter:
    """Cuts special tokens out of a text that comes in chunks, leftmost first, the longest there."""

    def __init__(self, special_tokens: Sequence[str]):
        self._pattern = special_pattern(tuple(special_tokens)) if special_tokens else None
        self._beginnings = {token[:i] for token in special_tokens for i in range(1, len(token))}
        self._reach = max(map(len, special_tokens), default=1) - 1
        self._held = ""

    def feed(self, chunk: str, last: bool = False) -> Iterator[tuple[str, str | None]]:
        """Yield (ordinary text, the special token after it or None), as far as that is certain."""
        text, start = self._held + chunk, 0
        while True:
            open_end = len(text) if last else self._open_end(text, start)
            found = self._pattern.search(text, start) if self._pattern else None
            if found is None or found.start() >= open_end:
                break
            yield text[start : found.start()], found[0]
            start = found.end()
        self._held = text[open_end:]
        yield text[start:open_end], None

    def _open_end(self, text: str, start: int) -> int:
        """Where the text's end starts to look like the beginning of a special token."""
        for i in range(max(start, len(text) - self._reach), len(text)):
            if text[i:] in self._beginnings:
                return i
        return len(text)


class _Held:
    """Text that waits for its continuation; looked at again only once it has doubled, for linear time."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._length = self._wanted = 0

    def add(self, text: str) -> str | None:
        """Return all that is held if it is time to look at it."""
        self._parts.append(text)
        self._length += len(text)
        return self.take() if self._length >= self._wanted else None

    def take(self) -> str:
        text = "".join(self._parts)
        self._parts, self._length, self._wanted = [], 0, 0
        return text

    def keep(self, text: str) -> None:
        self._parts, self._length, self._wanted = [text], len(text), 2 * len(text)


class PieceFeed:
    """Normalises and splits a text that comes in chunks: the pieces are those of the whole text."""

    def __init__(self, splitter: str, steps: Sequence[str] = ()):
        self._splitter, self._split, self._steps = splitter, compile_splitter(splitter), steps
        self._raw, self._normal = _Held(), _Held()

    def feed(self, chunk: str) -> list[str]:
        """Return the pieces that are certain by now.

        >>> feed = PieceFeed("gpt2")
        >>> feed.feed("We w"), feed.feed("on't."), feed.feed(" Go"), feed.close()
        ([], ['We', ' won'], ["'t", '.'], [' Go'])
        """
        if self._steps:
            raw = self._raw.add(chunk)
            if raw is None:
                return []
            settled = settled_prefix(raw)
            self._raw.keep(raw[settled:])
            chunk = normalise(raw[:settled], self._steps)
        text = self._normal.add(chunk)
        if text is None:
            return []
        settled, end, pieces = settled_length(self._splitter, text), 0, []
        for piece in self._split(text) if settled else []:
            if end + len(piece) > settled:
                break
            end += len(piece)
            pieces.append(piece)
        self._normal.keep(text[end:])
        return pieces

    def close(self) -> list[str]:
        """Return the pieces that were held back: the text ends here."""
        rest = normalise(self._raw.take(), self._steps)
        return self._split(self._normal.take() + rest)


class TextStream:
    """Turns token ids into text as they come; joined, the parts are what `decode` gives for all ids.

    A token may end inside a character. Its bytes wait here until the character is complete, or until it is
    certain that it never will be.
    """

    def __init__(self, token_bytes: Callable[[SupportsIndex], bytes]):
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: SupportsIndex) -> str:
        """Return the text that `token_id` completes; often a word, "" inside a character."""
        return self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        """Return what is left when no more ids come: "" or U+FFFD for a character that stayed incomplete."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest

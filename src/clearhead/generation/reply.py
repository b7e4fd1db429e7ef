"""What one row has said so far, as ids and as text, and whether it has ended.

A stop string is a matter of text, not of tokens: it may begin inside one token and end inside another. So
text is held back while its end may still become a stop string, and is certain once it cannot:

    stops = ["END"]      "well, E" -> certain "well, ", held "E"
                         "+ RR"    -> certain "well, ERR"
                         "+ ND"    -> the row has ended; its text is "well, "
"""

from collections.abc import Collection, Iterable, Sequence

from clearhead.text.foreign import AnyTokenizer


class Reply:
    """What one row has said: its new ids and, with a tokenizer, its text up to the first stop string.

    Text that may turn out to be the beginning of a stop string is held back; `take` gives what is certain.
    """

    def __init__(
        self,
        max_new_tokens: int,
        ends: Collection[int] = (),
        tokenizer: AnyTokenizer | None = None,
        stops: Sequence[str] = (),
    ) -> None:
        self.ids: list[int] = []
        self.done = max_new_tokens == 0
        self._budget, self._ends, self._stops = max_new_tokens, ends, stops
        self._decoder = None if tokenizer is None else tokenizer.stream()
        self._certain: list[str] = []
        self._held = ""

    def hear(self, token: int) -> None:
        """Take in the next token of the row; one that comes after its end is ignored."""
        if self.done:
            return
        self.ids.append(token)
        ended = token in self._ends
        if self._decoder is not None and not ended:
            self._read(self._decoder.feed(token))
        if not self.done and (ended or len(self.ids) == self._budget):
            self.done = True
            if self._decoder is not None:
                self._read(self._decoder.flush(), last=True)

    def take(self) -> str:
        """The text that has become certain since the last call; all of it, when the row is done."""
        text = "".join(self._certain)
        self._certain.clear()
        return text

    def _read(self, piece: str, last: bool = False) -> None:
        text = self._held + piece
        stop = find_stop(text, self._stops)
        undecided = len(text) if last else find_beginning(text, self._stops)
        # a stop string that may have begun earlier than the one found decides where to cut
        if stop is not None and stop <= undecided:
            self.done = True
            self._certain.append(text[:stop])
            return
        self._certain.append(text[:undecided])
        self._held = text[undecided:]


def find_stop(text: str, stops: Iterable[str]) -> int | None:
    """Where the earliest stop string in `text` begins; None if there is none.

    >>> find_stop("one, two", ["two", ", "])
    3
    """
    places = [text.find(stop) for stop in stops]
    return min((place for place in places if place >= 0), default=None)


def find_beginning(text: str, stops: Iterable[str]) -> int:
    """Where the longest end of `text` begins that more text could complete to a stop string; else its length.

    >>> find_beginning("well, E", ["END"]), find_beginning("well", ["END"])
    (6, 4)
    """
    stops = list(stops)
    first = max(0, len(text) - max(map(len, stops), default=0) + 1)
    for place in range(first, len(text)):
        end = text[place:]
        if any(stop != end and stop.startswith(end) for stop in stops):
            return place
    return len(text)

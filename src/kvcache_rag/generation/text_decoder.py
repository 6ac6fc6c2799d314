"""Token ids to text, piece by piece."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


class TextDecoder:
    """Turns token ids into text piece by piece; the pieces join to the text of all ids.

    A piece is held back while it may still change: an incomplete character, or the beginning of a
    stop string.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), skip: bool = True) -> None:
        """Decode with `tokenizer`; end the text before the first of the `stop` strings.

        Args:
            tokenizer: Of the model.
            stop: Not empty, each.
            skip: Whether control tokens are left out.
        """
        self._tokenizer, self._skip = tokenizer, skip
        self._stop = tuple(stop)
        self._openings = [_Opening(string) for string in self._stop]
        self._ids: list[int] = []
        self._given = 0
        self.text = ""
        self.stopped = False

    def push(self, ids: Sequence[int]) -> str:
        """Take further ids and return the text that has become certain."""
        if self.stopped:
            return ""
        self._ids.extend(ids)
        whole = self._decode()
        cut = min((whole.find(stop) for stop in self._stop if stop in whole), default=-1)
        if cut >= 0:
            self.stopped = True
            return self._give(whole[:cut])
        certain = whole.rstrip("\ufffd")
        return self._give(certain[: len(certain) - self._open(certain)])

    def finish(self) -> str:
        """The rest of the text, when no further ids come."""
        return "" if self.stopped else self._give(self._decode())

    def _decode(self) -> str:
        text: str = self._tokenizer.decode(
            self._ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False
        )
        return text

    def _give(self, text: str) -> str:
        piece = text[self._given :]
        if piece:
            self._given = len(text)
            self.text += piece
        return piece

    def _open(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        return max((opening.length(text) for opening in self._openings), default=0)


class _Opening:
    """How much of a string the end of a growing text is (Knuth, Morris and Pratt).

    Every character of the text is looked at once, however long the string is.
    """

    def __init__(self, string: str) -> None:
        """Look for the beginning of `string`, which is not empty and not yet in the text."""
        self._string = string
        self._borders = [0]  # of each beginning, its longest end that begins the string too
        self._text, self._length = "", 0

    def length(self, text: str) -> int:
        """Length of the longest end of `text` that begins the string."""
        if not text.startswith(self._text):
            self._length, self._text = 0, ""  # what came last has changed what came before
        for character in text[len(self._text) :]:
            self._length = self._after(self._length, character)
        self._text = text
        return self._length

    def _after(self, length: int, character: str) -> int:
        while length and (length == len(self._string) or self._string[length] != character):
            length = self._border(length)
        return length + (self._string[length] == character)

    def _border(self, length: int) -> int:
        while len(self._borders) < length:
            self._borders.append(self._after(self._borders[-1], self._string[len(self._borders)]))
        return self._borders[length - 1]

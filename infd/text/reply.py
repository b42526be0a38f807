"""Turn one choice's token ids into text: detokenize, truncate at a stop string, parse thoughts and tool calls.

The engine feeds committed ids; the HTTP handler takes the text when it can send.
Text that may begin a stop string is held back until the match completes or fails,
so no part of a stop string is ever sent; with `StopStrings.included`, no text is held
back. Stop strings are matched against all generated text, thoughts and calls
included, before parsing.
"""

from __future__ import annotations

from copy import copy
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infd.text.detokenize import Detokenizer
    from infd.text.markup import Reading
    from infd.text.stops import StopSearch, StopStrings
    from infd.text.tokenizer import Tokenizer


class Reply:
    """The text of one choice; a `Watcher` of the engine's stream.

    reading      parses the text; None: all text is content
    stop_reason  the stop string that ended the choice; None: no stop string has ended the choice
    """

    __slots__ = (
        "_detokenizer",
        "_held",
        "_include_stop",
        "_mark_tokens",
        "_marks",
        "_min_tokens",
        "_ready",
        "_search",
        "_tokens",
        "reading",
        "stop_reason",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: StopStrings | None = None,
        *,
        skip_special_tokens: bool = True,
        preceding: Sequence[int] = (),
        reading: Reading | None = None,
        mark_ids: frozenset[int] = frozenset(),
        mark_tokens: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """Start a choice.

        preceding    last tokens of the text that the choice continues: many decoders drop the space before a first word
        mark_ids     special ids that are never skipped, because `reading` parses their text
        mark_tokens  id -> mark that `reading` accepts only as a token
        """
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens, mark_ids=mark_ids)
        if preceding:
            self._detokenizer.feed(preceding)
            self._detokenizer.flush()  # an incomplete character belongs to the continued text
        self._search = stops.search() if stops else None
        self._include_stop = stops is not None and stops.included
        self.reading = reading
        self._min_tokens = stops.min_tokens if stops is not None else 0
        self._tokens = 0
        self._ready = ""  # text that may be sent
        self._held = ""  # the text after _ready, which may begin a stop string
        self._mark_tokens = {} if reading is None else mark_tokens
        self._marks: list[tuple[int, int, str]] = []  # beginning and end in the text not yet released, of mark tokens
        self.stop_reason: str | None = None

    def feed(self, token_ids: list[int]) -> int | None:
        """Append tokens. Returns the number of tokens up to the end of the first stop string; None without one."""
        if self._search is None and self.reading is None:
            self._ready += self._detokenizer.feed(token_ids)
            return None
        for used, token_id in enumerate(token_ids, 1):
            self._tokens += 1
            text = self._detokenizer.feed((token_id,))
            if token_id in self._mark_tokens:
                start = len(self._held)
                self._marks.append((start, start + len(text), self._mark_tokens[token_id]))
            ended = self._add(text)
            if self.reading is not None:
                self.reading.count()
            if ended:
                return used
        return None

    def fork(self) -> tuple[Detokenizer, StopSearch | None]:
        """Return copies of the detokenizer and of the search for stop strings, for one of several continuations."""
        return copy(self._detokenizer), copy(self._search)

    def take(self) -> str:
        """Return the text that may be sent and that no earlier call has returned."""
        text, self._ready = self._ready, ""
        return text

    def finish(self) -> str:
        """End the text; return the rest of the text, truncated at a stop string that completes in the rest."""
        if self.stop_reason is None:
            self._add(self._detokenizer.flush())
            self._release(self._held)
            self._held = ""
        if self.reading is not None:
            self._ready += self.reading.finish()
        return self.take()

    def _add(self, text: str) -> bool:
        """Append text to `_ready` and `_held`. Returns True if a stop string completes in `text`."""
        search = self._search
        if search is None:
            self._release(text)
            return False
        end = search.feed(text, ignore=self._tokens <= self._min_tokens)
        if end is not None:
            assert search.found is not None
            self.stop_reason = search.found
            text = self._held + text[:end]
            self._release(text if self._include_stop else text[: len(text) - len(search.found)])
            self._held = ""
            return True
        text = self._held + text
        safe = len(text) - (0 if self._include_stop else search.held)
        self._release(text[:safe])
        self._held = text[safe:]
        return False

    def _release(self, text: str) -> None:
        """Parse text that need not be held back, and append its content to `_ready`."""
        reading = self.reading
        if reading is None:
            self._ready += text
            return
        if self._marks:
            at, marks = 0, self._marks
            self._marks = [(start - len(text), end - len(text), mark) for start, end, mark in marks if end > len(text)]
            for start, end, mark in marks:
                if end <= len(text):
                    begin = max(start, 0)  # negative if the beginning of the mark's text was released earlier
                    self._ready += reading.feed(text[at:begin]) + reading.feed_token(text[begin:end], mark)
                    at = end
            text = text[at:]
        self._ready += reading.feed(text)

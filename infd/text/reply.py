"""One choice's answer: ids in, text out, ended by stop strings, its markup taken apart.

The engine feeds ids the moment they are committed, the handler takes text when
it gets round to it. Text that may turn out to begin a stop string is held back
until that is decided, so nothing of a stop string is ever sent. Stop strings
are looked for in the text as the model writes it, thoughts and calls included;
only then is it read for these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infd.text.markup import Reading
    from infd.text.stops import StopStrings
    from infd.text.tokenizer import Tokenizer


class Reply:
    """What one choice says. An engine's Watcher, by its `feed`.

    reading      keeps what it takes out of the text; None: all of it is content
    stop_reason  the stop string that ended it, None so far or otherwise
    """

    __slots__ = (
        "_detokenizer",
        "_held",
        "_include_stop",
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
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        after: Sequence[int] = (),
        reading: Reading | None = None,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """Begin an answer. A stop string that is complete within the first `min_tokens` tokens does not count.

        after    the last tokens of the text that it goes on with: many tokenizers write no space before a first word
        reading  takes the markup out of the text
        shown    special ids that it needs to see
        """
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens, shown=shown)
        if after:
            self._detokenizer.feed(after)
            self._detokenizer.flush()  # a character that it leaves unfinished belongs to what came before
        self._search = stops.search() if stops else None
        self._include_stop = include_stop_str_in_output
        self.reading = reading
        self._min_tokens = min_tokens
        self._tokens = 0
        self._ready = ""  # may be sent
        self._held = ""  # follows it, and may begin a stop string
        self.stop_reason: str | None = None

    def feed(self, token_ids: list[int]) -> int | None:
        """Add tokens; return how many of them were needed to complete a stop string, or None to go on."""
        if self._search is None and self.reading is None:
            self._ready += self._detokenizer.feed(token_ids)
            return None
        for used, token_id in enumerate(token_ids, 1):
            self._tokens += 1
            ended = self._add(self._detokenizer.feed((token_id,)))
            if self.reading is not None:
                self.reading.count()
            if ended:
                return used
        return None

    def take(self) -> str:
        """Return the text that is safe to send and was not taken before."""
        text, self._ready = self._ready, ""
        return text

    def finish(self) -> str:
        """Return all that remains, now that nothing follows; a stop string may still complete and cut it."""
        if self.stop_reason is None:
            self._add(self._detokenizer.flush())
            self._release(self._held)
            self._held = ""
        if self.reading is not None:
            self._ready += self.reading.finish()
        return self.take()

    def _add(self, text: str) -> bool:
        """Sort new text into ready and held. Return True if a stop string ends the answer in it."""
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
        """Let go of text in which no stop string can begin any more."""
        self._ready += text if self.reading is None else self.reading.feed(text)

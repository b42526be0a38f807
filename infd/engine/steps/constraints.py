"""Mask the tokens that the grammars of constrained choices do not allow.

The mask of a step depends on all earlier tokens of the constrained choices. The
step's forward pass does not need the mask, so it is issued at once. While the
forward pass runs, a thread fills the mask, once the earlier steps are committed.
A matcher also reads a step's drafts, for the masks of the positions behind them,
and is rolled back to the committed tokens: a copy would take several times as
long, because it computes anew what the matcher has kept.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from infd.drafting.forced import ForcedDrafter
from infd.errors import InfdError, RequestFailed
from infd.grammar.forcing import WRITTEN, allows, narrow
from infd.grammar.outline import Place
from infd.grammar.protocol import Forced
from infd.rounding import ceil_div

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator
    from collections.abc import Sequence as Many

    import numpy as np
    import numpy.typing as npt

    from infd.engine.telemetry import Telemetry
    from infd.grammar.protocol import Grammar, Grammars, Matcher
    from infd.scheduler.scheduler import Scheduled
    from infd.scheduler.sequence import Sequence

log = logging.getLogger("infd.engine")

ENOUGH: Final = 3  # forced tokens known to follow a position from which on no more are sought there


class Ended(Struct, frozen=True):
    """A choice whose grammar is complete, or whose matcher failed with `failure`."""

    seq: Sequence
    failure: InfdError | None


class Filled(Struct, frozen=True):
    """The mask of a step.

    mask    int32 [sampled positions, ceil(vocab / 32)], one bit per token: whether it is allowed; None: all are. A row
            without a bit ends the span's samples: the token before it completes the grammar, or is a draft that the
            grammar does not allow
    ended   choices that need no further token; their rows allow all tokens
    fill_s  seconds that matchers took to read tokens and to fill rows
    sought  positions where forced tokens are sought, of choices whose forced tokens are drafted
    """

    mask: npt.NDArray[Any] | None
    ended: list[Ended]
    fill_s: float
    sought: list[Sought]


class Sought(Struct, frozen=True):
    """A position where forced tokens are sought.

    read    number of tokens that the choice's matcher has read
    drafts  the tokens from there to the position; they may turn out to be wrong
    start   number of the choice's tokens before the position
    known   the last tokens of the answer before the position
    row     the mask at the position
    ahead   whether, if no token is forced, tokens are sought behind each token that may end a free part of the answer
    """

    choice: ConstrainedChoice
    read: int
    drafts: list[int]
    start: int
    known: list[int]
    row: npt.NDArray[np.int32]
    ahead: bool


class Found(Struct, frozen=True):
    """Forced tokens.

    forced  at the position
    behind  behind each token of Grammars.closing, if that was sought
    """

    at: Sought
    forced: Forced
    behind: dict[int, list[int]] | None


class ConstrainedChoice:
    """A choice in flight, its matcher, and the number of tokens that the matcher has read.

    matcher   created by the first `advance`, on the thread for masks: for a large grammar creation takes milliseconds
    unmasked  see Matcher.unmasked; copied here to be read on the event loop
    complete  whether no further token of the answer may follow
    failure   why the matcher failed; a failed matcher reads no more tokens
    drafter   learns the tokens that the grammar forces; None: they are not drafted
    drafted   whether the matcher has read drafts, and was rolled back
    """

    __slots__ = ("_grammar", "complete", "drafted", "drafter", "failure", "matcher", "read", "seq", "unmasked")

    def __init__(self, seq: Sequence, grammar: Grammar) -> None:
        self.seq = seq
        self.drafter = seq.drafter if isinstance(seq.drafter, ForcedDrafter) else None
        self.matcher: Matcher | None = None
        self.drafted = False
        self.read = 0
        self.unmasked = grammar.unmasked
        self.complete = False
        self.failure: InfdError | None = None
        self._grammar = grammar

    @property
    def over(self) -> bool:
        """Whether the choice needs no further token."""
        return self.complete or self.failure is not None

    def renew(self) -> None:
        """Create the matcher anew, with the tokens that it has read. What it kept of drafts can then fail nothing."""
        known, self.read = self.read, 0
        self.matcher, self.drafted = None, False
        self.advance(known)

    def advance(self, known: int) -> None:
        """Pass the generated tokens up to number `known` to the matcher."""
        first = self.seq.prompt_tokens
        tokens = self.seq.tokens[first + self.read : first + known]
        self.read = known
        if self.failure is None:
            try:
                if self.matcher is None:
                    self.matcher = self._grammar.matcher()
                if tokens:
                    self.matcher.advance(tokens)
                self.complete = self.matcher.stopped
                self.unmasked = self.matcher.unmasked
            except Exception as error:
                self.fail(error)

    def fail(self, error: Exception) -> None:
        """Let the choice fail; but if drafts may be the reason, create the matcher anew, and let that fail."""
        if self.drafted:
            self.renew()
        else:
            self.failure = _failure(error)


class Sampled(Struct, frozen=True):
    """A constrained choice that a step samples.

    row     of the mask, for the first of its positions
    known   number of its committed tokens
    drafts  behind these tokens; each has a position behind it
    """

    row: int
    choice: ConstrainedChoice
    known: int
    drafts: list[int]


class Constraints:
    """The matchers of the constrained choices in flight; len() counts the choices."""

    def __init__(
        self,
        vocab_size: int,
        grammars: Grammars | None,
        telemetry: Telemetry,
        most_drafts: int = 0,
        seeks: Callable[[int], bool] = bool,
    ) -> None:
        """Set up.

        grammars     fill the masks; None: no choice is constrained
        most_drafts  most drafts that a step verifies for a choice
        seeks        whether forced tokens are sought in steps of a number of sequences, see Speculation.pays_alone
        """
        self._seeks = seeks
        self._most_drafts = most_drafts
        self._words = ceil_div(vocab_size, 32)
        self._grammars = grammars
        self._telemetry = telemetry
        self._constrained: dict[Sequence, ConstrainedChoice] = {}

    def __len__(self) -> int:
        return len(self._constrained)

    def add(self, seq: Sequence, grammar: Grammar) -> None:
        """Constrain a choice that has generated no token yet."""
        choice = self._constrained[seq] = ConstrainedChoice(seq, grammar)
        assert self._grammars is not None
        if choice.drafter is not None and (outline := self._grammars.outline(seq.request.constraint)) is not None:
            choice.drafter.follow(partial(Place, outline), seq.prompt_tokens)

    def remove(self, seq: Sequence) -> None:
        """Remove the matcher of a choice that has ended. Does nothing if the choice has no matcher."""
        self._constrained.pop(seq, None)

    def applies_to(self, step: Scheduled) -> bool:
        """Return whether the step, with all earlier steps in flight, may sample a choice that needs a mask."""
        if not self._constrained:
            return False
        return any(
            each.unmasked < seq.generated + seq.in_flight
            for seq, span in zip(step.sequences, step.plan.spans, strict=True)
            if span.samples and (each := self._constrained.get(seq)) is not None
        )

    def fill(self, step: Scheduled) -> asyncio.Future[Filled]:
        """Fill the mask of `step`, the first step in flight, on the thread for masks. The future never raises."""
        work = [each for each in self._sampled(step) if each.choice.unmasked <= each.known + len(each.drafts)]
        assert self._grammars is not None
        rows, seeking = sum(span.samples for span in step.plan.spans), self._seeks(len(step.sequences))
        filling = self._grammars.run(self.fill_now, self._grammars, work, rows, seeking)
        filling.add_done_callback(self._observe)
        return filling

    def _observe(self, done: asyncio.Future[Filled]) -> None:
        if done.cancelled():
            return
        filled = done.result()
        self._telemetry.metrics.grammar_masks.observe(filled.fill_s)
        if filled.sought and self._grammars is not None:  # behind the mask, which its step waits for
            self._grammars.run(force, self._grammars, filled.sought, self._most_drafts).add_done_callback(_tell)

    def _sampled(self, step: Scheduled) -> Iterator[Sampled]:
        """Iterate over the constrained choices that a step samples, once all earlier steps are committed."""
        row, drafts = 0, {draft.row: draft for draft in step.plan.drafts}
        for seq, span in zip(step.sequences, step.plan.spans, strict=True):
            if span.samples and (constrained := self._constrained.get(seq)) is not None:
                guess = [] if (draft := drafts.get(span.row)) is None else draft.tokens[len(seq.tokens) - draft.start :]
                yield Sampled(row, constrained, seq.generated, guess[: span.drafts])
            row += span.samples

    def fill_now(self, grammars: Grammars, work: list[Sampled], rows: int, seeking: bool) -> Filled:
        """Pass each choice's tokens to its matcher, and fill the rows of its positions. Runs on the thread for masks.

        rows     number of rows of the mask
        seeking  whether positions where tokens may be forced are returned
        """
        # Imported on first use, to shorten the start of a daemon that does not load torch; torch imports numpy.
        import numpy as np

        began = self._telemetry.now()
        mask = np.full((rows, self._words), -1, dtype=np.int32)
        for each in work:
            each.choice.advance(each.known)
        going = [each for each in work if not each.choice.over]
        masked = [each for each in going if each.choice.unmasked <= each.known]
        filled = np.empty((len(masked), self._words), dtype=np.int32)
        _fill_first(grammars, filled, [each.choice for each in masked])
        for each, bits in zip(masked, filled, strict=True):
            mask[each.row] = bits
        for each in going:
            # Reads `stopped` again: a mask that allows end ids only ends the choice, even below min_tokens.
            each.choice.advance(each.known)
            if each.choice.over:
                mask[each.row] = -1
            elif each.drafts:
                _fill_behind(grammars, each, mask[each.row + 1 : each.row + 1 + len(each.drafts)])
        ended = [Ended(each.choice.seq, each.choice.failure) for each in work if each.choice.over]
        found = _seek(work, mask, grammars.closing) if seeking else []
        return Filled(mask if going else None, ended, self._telemetry.now() - began, found)


def _fill_first(grammars: Grammars, rows: npt.NDArray[np.int32], choices: list[ConstrainedChoice]) -> None:
    """Fill the row of each choice's first position. A choice whose matcher fails has failed."""
    failures: Many[Exception | None]
    try:
        failures = grammars.fill([_matcher(each) for each in choices], rows) if choices else []
    except Exception as error:
        if len(choices) > 1:  # fill each row alone, to find the choice that fails
            for i, each in enumerate(choices):
                _fill_first(grammars, rows[i : i + 1], [each])
            return
        failures = [error]
    for i, (each, failure) in enumerate(zip(choices, failures, strict=True)):
        if failure is None:
            continue
        again = each.drafted
        each.fail(failure)
        if again and not each.over:
            _fill_first(grammars, rows[i : i + 1], [each])


def _fill_behind(grammars: Grammars, each: Sampled, rows: npt.NDArray[np.int32]) -> None:
    """Fill the rows of the positions behind a choice's drafts, up to the first that may follow no draft before it."""
    choice, matcher, read, place = each.choice, _matcher(each.choice), 0, 0
    choice.drafted = True
    try:
        allowed = matcher.validate(each.drafts)
        for place, draft in enumerate(each.drafts[:allowed]):
            matcher.advance([draft])
            read += 1
            if matcher.unmasked <= each.known + read:
                (failure,) = grammars.fill([matcher], rows[place : place + 1])
                if failure is not None:
                    raise failure
                if matcher.stopped:
                    break
        else:
            place = allowed
        matcher.rollback(read)
    except Exception:  # the choice fails only if its answer comes to contain this draft
        log.debug("a draft's mask", exc_info=True)
        choice.renew()
    rows[place:] = 0


def _matcher(choice: ConstrainedChoice) -> Matcher:
    assert choice.matcher is not None
    return choice.matcher


def _seek(work: list[Sampled], mask: npt.NDArray[np.int32], closing: Many[int]) -> list[Sought]:
    """Return the positions where tokens may be forced: of each choice the first, and the one behind forced drafts.

    Behind other drafts too few searches serve a step to be worth their time.

    closing  see Grammars
    """
    found = []
    for each in work:
        choice, drafter, row = each.choice, each.choice.drafter, mask[each.row]
        if drafter is None or drafter.foretold or choice.over or choice.unmasked > each.known:
            continue
        tokens = choice.seq.tokens
        forced = drafter.forced(tokens)[0]
        ahead = not drafter.expects(tokens) and any(allows(row, token) for token in closing)
        if (ahead or narrow(row)) and len(forced) < ENOUGH:
            found.append(_sought(each, [], row, ahead=ahead))
        row, count = mask[each.row + len(each.drafts)], len(each.drafts)
        if each.drafts and forced[:count] == each.drafts and len(forced) < count + ENOUGH and row.any() and narrow(row):
            found.append(_sought(each, each.drafts, row, ahead=False))
    return found


def _sought(each: Sampled, drafts: list[int], row: npt.NDArray[np.int32], *, ahead: bool) -> Sought:
    seq = each.choice.seq
    tokens = [*seq.tokens[max(seq.prompt_tokens, len(seq.tokens) - WRITTEN) :], *drafts]
    return Sought(each.choice, each.known, drafts, len(seq.tokens) + len(drafts), tokens, row, ahead)


def force(grammars: Grammars, positions: list[Sought], most: int) -> list[Found]:
    """Return the tokens that grammars force at positions.

    Runs on the thread for masks. The choices' own matchers are used, because they keep what they compute: a name that
    is sought is probably written soon, and its masks are then filled faster.
    """
    found = []
    for each in positions:
        choice = each.choice
        if choice.over or choice.read != each.read:
            continue
        matcher, choice.drafted = _matcher(choice), True
        try:  # the token sampled there is known by now, and is the first of these
            matcher.advance(each.drafts)
            forced, behind = Forced([], sure=False), None
            if narrow(each.row):
                forced = grammars.forced(matcher, each.row, most + 1, each.known, exact=not each.drafts)
            if each.ahead and not forced.tokens:
                behind = grammars.behind(matcher, each.row, 2 * most, each.known)
            matcher.rollback(len(each.drafts))
            found.append(Found(each, forced, behind))
        except Exception:  # the matcher's next mask fails the choice, if its answer comes so far
            log.debug("no forced tokens", exc_info=True)
            choice.renew()
    return found


def _tell(done: asyncio.Future[list[Found]]) -> None:
    if done.cancelled():
        return
    for each in done.result():
        drafter, start = each.at.choice.drafter, each.at.start
        if drafter is None:
            continue
        if each.behind is not None:
            drafter.expect(start, each.behind)
        elif len(each.forced.tokens) > 1:
            drafter.force(start, each.forced.tokens, sure=each.forced.sure)


def _failure(error: Exception) -> InfdError:
    if isinstance(error, InfdError):
        return error
    log.error("a grammar failed", exc_info=error)
    return RequestFailed("this request failed")

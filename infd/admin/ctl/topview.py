"""The view of `infdctl top`: its lines, and the effects of keys. No terminal, no socket, no clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable

    from infd.admin.items import Frame
    from infd.admin.protocol import RequestRow
    from infd.telemetry.window import Spread

WIDE = 150  # columns from which the figures are in two blocks, side by side
LABEL = 12  # columns of the figures' names
FIGURES = 85  # columns of the left block
LEAST_ID = 16
MINOR = 4  # least `_Column.dropped` of columns that go before an id is cut
STATE_COLORS = {"ready": "green", "failed": "red"}  # others yellow

KEYS = (
    ("q", "quit"),
    ("h ?", "show or hide this help"),
    ("s S", "sort by the next or the previous column"),
    ("r", "reverse the order"),
    ("j k, arrows", "select a request"),
    ("a", "abort the selected request"),
    ("p space", "freeze the view, or continue; the daemon goes on"),
    ("P", "pause the daemon, or resume it"),
)
FOOTER = "q quit  h help  s sort  r reverse  j/k select  a abort  p freeze  P pause daemon"


class Action(Struct, frozen=True):
    """An action that a key asks of the caller. `id`: the request to abort."""

    kind: Literal["quit", "abort", "pause", "resume"]
    id: str = ""


class _Column(Struct, frozen=True):
    """A column of the requests.

    value    sort key of a row; numbers begin with the largest, and are aligned to the right
    dropped  columns with larger numbers are left out first where the terminal is narrow; 0: never
    """

    name: str
    value: Callable[[RequestRow], Any]
    dropped: int
    text: Callable[[RequestRow], str] | None = None
    number: bool = False

    def cell(self, row: RequestRow) -> str:
        return printable(self.text(row) if self.text is not None else str(self.value(row)))


COLUMNS = (
    _Column("ID", lambda row: row.id, 0),
    _Column("STATE", lambda row: row.state, 0),
    _Column("CLIENT", lambda row: row.client or "-", 1),
    _Column("TENANT", lambda row: row.tenant or "-", 3),
    _Column("ADAPTER", lambda row: row.adapter or "-", 3),
    _Column("PRIO", lambda row: row.priority, 5, number=True),
    _Column("CHOICES", lambda row: row.choices, 4, number=True),
    _Column("PROMPT", lambda row: row.prompt_tokens, 0, number=True),
    _Column("CACHED", lambda row: row.cached_tokens, 2, number=True),
    _Column("GENERATED", lambda row: row.generated_tokens, 0, number=True),
    _Column("AGE", lambda row: row.age_s, 0, lambda row: duration(row.age_s), number=True),
)


class View:
    """The state of the view.

    lost    why no frames arrive; "": they do
    note    answer to the last key, shown instead of the keys
    sorted  column by which the requests are sorted
    """

    def __init__(self) -> None:
        self.lost = ""
        self.note = ""
        self.sorted = len(COLUMNS) - 1
        self.reverse = False
        self.frozen = False
        self.help = False
        self.selected: str | None = None
        self._frame: Frame | None = None
        self._latest: Frame | None = None
        self._asked: Action | None = None

    def show(self, frame: Frame) -> None:
        """Show a frame, or keep it until the view is not frozen any more."""
        self.lost = ""
        self._latest = frame
        if not self.frozen:
            self._frame = frame

    @property
    def rows(self) -> list[RequestRow]:
        """The requests in the order shown."""
        if self._frame is None:
            return []
        column = COLUMNS[self.sorted]
        return sorted(self._frame.requests, key=column.value, reverse=column.number != self.reverse)

    def press(self, key: str) -> Action | None:
        """Change the view as `key` says. Return the action that the caller must perform, if any."""
        self.note = ""
        asked, self._asked = self._asked, None
        if asked is not None:
            return asked if key in ("y", "Y") else None
        match key:
            case "q":
                return Action("quit")
            case "h" | "?":
                self.help = not self.help
            case "s" | ">":
                self.sorted = (self.sorted + 1) % len(COLUMNS)
            case "S" | "<":
                self.sorted = (self.sorted - 1) % len(COLUMNS)
            case "r":
                self.reverse = not self.reverse
            case "j" | "down":
                self._select(1)
            case "k" | "up":
                self._select(-1)
            case "p" | " ":
                self.frozen = not self.frozen
                if not self.frozen:
                    self._frame = self._latest
            case "a":
                self._ask_abort()
            case "P":
                self._ask_pause()
        return None

    def _select(self, by: int) -> None:
        ids = [row.id for row in self.rows]
        if self.selected in ids:
            self.selected = ids[min(max(ids.index(self.selected) + by, 0), len(ids) - 1)]
        else:
            self.selected = ids[0 if by > 0 else -1] if ids else None

    def _ask_abort(self) -> None:
        if self.selected not in [row.id for row in self.rows]:
            ended = self.selected is not None
            self.note = f"{self.selected} has ended" if ended else "select a request first, with j and k"
            return
        self._ask(Action("abort", str(self.selected)), f"abort {self.selected}?")

    def _ask_pause(self) -> None:
        if self._frame is None:
            return
        if self._frame.status.state == "paused":
            self._ask(Action("resume"), "resume the daemon?")
        else:
            self._ask(Action("pause"), "pause the daemon? It finishes its requests and holds new ones.")

    def _ask(self, action: Action, question: str) -> None:
        self._asked = action
        self.note = f"{question} y: yes, any other key: no"

    def draw(self, width: int, height: int | None = None) -> list[Text]:
        """Return the lines of the view, each at most `width` columns; `height`: their number, None: all rows."""
        lines = self._head(width)
        if self.help:
            lines += [Text.assemble((f"{keys:<{LABEL}}", "cyan"), told) for keys, told in KEYS]
        else:
            room = None if height is None else max(0, height - len(lines) - 3)
            lines += [self._shown(room), *self._table(width, room)]
        if height is not None:
            lines = lines[: height - 1] + [Text()] * (height - 1 - len(lines)) + [self._foot()]
        for line in lines:
            line.truncate(width)
        return lines

    def _shown(self, room: int | None) -> Text:
        """Return how many requests the table leaves out; empty if none."""
        frame = self._frame
        if frame is None:
            return Text()
        shown = len(frame.requests) if room is None else min(room, len(frame.requests))
        left_out = frame.requests_total - shown
        return Text(f"{shown} of {frame.requests_total} requests" if left_out > 0 else "", style="dim")

    def _foot(self) -> Text:
        if self.lost:
            return Text(printable(self.lost), style="bold red")
        if self.note:
            return Text(printable(self.note), style="bold")
        return Text(f"FROZEN, p continues  {FOOTER}" if self.frozen else FOOTER, style="dim")

    def _head(self, width: int) -> list[Text]:
        if self._frame is None:
            return [Text("waiting for the daemon")]
        left, right = _load(self._frame), _resources(self._frame)
        if width < WIDE:
            return [_title(self._frame), *left, *right]
        lines = [_title(self._frame)]
        for number in range(max(len(left), len(right))):
            line = left[number] if number < len(left) else Text()
            line.truncate(FIGURES - 2)
            line.pad_right(FIGURES - line.cell_len)
            lines.append(line.append_text(right[number]) if number < len(right) else line)
        return lines

    def _table(self, width: int, room: int | None) -> list[Text]:
        """Return the table of requests: its head and at most `room` rows, the selected one among them."""
        rows = self.rows
        cells = {column.name: [column.cell(row) for row in rows] for column in COLUMNS}
        # Without keys, as in `top --once`, the order cannot be changed, so no heading has its mark.
        heads = {column.name: column.name if room is None else self._heading(column) for column in COLUMNS}
        widths = {name: max(map(len, [heads[name], *each])) for name, each in cells.items()}
        empty = {name for name, each in cells.items() if set(each) <= {"-"}}
        if cells["TENANT"] == cells["CLIENT"]:  # no key shares a tenant
            empty.add("TENANT")
        columns = _fitting(widths, empty, width)
        head = Text("  ".join(_aligned(column, heads[column.name], widths) for column in columns), style="bold")
        first = 0
        if room is not None:
            at = next((number for number, row in enumerate(rows) if row.id == self.selected), 0)
            first = min(max(0, at - room + 1), max(0, len(rows) - room))
        lines = [head]
        for number, row in list(enumerate(rows))[first : None if room is None else first + room]:
            line = "  ".join(_aligned(column, cells[column.name][number], widths) for column in columns)
            lines.append(Text(line, style="reverse" if row.id == self.selected else ""))
        return lines

    def _heading(self, column: _Column) -> str:
        if column is not COLUMNS[self.sorted]:
            return column.name
        return column.name + ("v" if column.number != self.reverse else "^")


def _fitting(widths: dict[str, int], empty: set[str], width: int) -> list[_Column]:
    """Return the columns that fit into `width`, and shorten the ids in `widths` if need be.

    Empty and minor columns are left out before ids are shortened, other columns afterwards.
    """
    columns = list(COLUMNS)
    whole, least = widths["ID"], min(widths["ID"], LEAST_ID)

    def needed(id_width: int) -> int:
        return sum(widths[column.name] for column in columns) - whole + id_width + 2 * (len(columns) - 1)

    optional = sorted((column for column in COLUMNS if column.dropped), key=lambda column: -column.dropped)
    for column in sorted(optional, key=lambda column: column.name not in empty):
        spared = column.dropped < MINOR and column.name not in empty
        if needed(least if spared else whole) > width:
            columns.remove(column)
    widths["ID"] = min(whole, max(least, width - needed(0)))
    return columns


def _aligned(column: _Column, cell: str, widths: dict[str, int]) -> str:
    width = widths[column.name]
    cut = cell if len(cell) <= width else cell[: width - 1] + "~"
    return cut.rjust(width) if column.number else cut.ljust(width)


def _title(frame: Frame) -> Text:
    now = frame.status
    since = duration(max(0.0, frame.time - now.since))
    state = f"{now.state} ({printable(now.reason)})" if now.reason else now.state
    color = STATE_COLORS.get(now.state, "yellow")
    computing = f"  {now.device} {now.dtype}" if now.device else ""
    return Text.assemble(
        (printable(now.model), "bold"),
        "  ",
        (state, f"bold {color}"),
        f" {since}  up {duration(frame.uptime_s)}{computing}  pid {now.pid}  infd {now.version}",
    )


def _load(frame: Frame) -> list[Text]:
    now, recent = frame.status, frame.recent
    oldest = "" if frame.oldest_waiting_s is None else f", oldest {duration(frame.oldest_waiting_s)}"
    held = f"{now.held} held" if now.held else ""
    mean = "" if recent.tokens_a_step is None else f"{recent.tokens_a_step:,.1f} tokens a step"
    waiting = f"{now.waiting} waiting ({now.waiting_tokens:,} tokens{oldest})"
    return [
        _figure("requests", f"{now.running} running", waiting, held, f"{recent.ended_s:,.1f}/s end"),
        _figure(
            "tokens/s",
            f"{recent.generated_tokens_s:,.1f} generated",
            f"{recent.prompt_tokens_s:,.1f} prompt",
            f"{recent.computed_tokens_s:,.1f} computed",
        ),
        _figure("step", *_spread(recent.step), f"{recent.steps_s:,.1f}/s"),
        _figure("batch", f"{now.running} of {now.rows} sequences", mean),
        _figure("first token", *_spread(recent.ttft), _counted(recent.ttft, recent.window_s)),
        _figure("token gap", *_spread(recent.inter_token), _counted(recent.inter_token, recent.window_s)),
    ]


def _resources(frame: Frame) -> list[Text]:
    now, recent, process = frame.status, frame.recent, frame.process
    free = now.pages - now.pages_referenced - now.pages_cached
    used = f" ({now.pages_referenced / now.pages:.0%})" if now.pages else ""
    ever = f"{now.prefix_hits / now.prefix_queries:.0%} since start" if now.prefix_queries else ""
    lately = "-" if recent.hit_rate is None else f"{recent.hit_rate:.0%}"
    window = f"in {recent.window_s:.0f} s"
    loras = (f"{printable(row.name)} {row.requests}" for row in frame.loras)
    refused = (f"{printable(code)} {count:,}" for code, count in frame.rejected.items())
    return [
        _figure(
            "cache pages", f"{now.pages_referenced:,} used{used}", f"{now.pages_cached:,} cached", f"{free:,} free"
        ),
        _figure("prefix hits", f"{lately} {window}", ever),
        _figure("preempted", f"{recent.preemptions:,} {window}", f"{now.preemptions:,} since start"),
        _figure(
            "process",
            f"{process.memory_bytes / 2**20:,.0f} MiB",
            f"{process.files:,} of {process.most_files:,} fds",
            f"{process.connections:,} connections",
        ),
        _figure("loop lag", *_spread(recent.loop_lag)),
        _figure("rejected", *(list(refused) or ["none"])),
        _figure("adapters", *(list(loras) or ["none"])),
        *_drafts(frame),
    ]


def _drafts(frame: Frame) -> list[Text]:
    """Return the line of speculation, once drafts were verified."""
    now, kept = frame.status, frame.recent.drafts_kept
    if not now.drafts:
        return []
    ever = f"{1 + sum(now.accepted_drafts) / now.drafts:.2f} since start"
    return [_figure("drafts", "-" if kept is None else f"{1 + kept:.2f} tokens a step", ever)]


def _figure(label: str, *figures: str) -> Text:
    return Text.assemble((f"{label:<{LABEL}}", "cyan"), "  ".join(filter(None, figures)))


def _spread(spread: Spread) -> tuple[str, str]:
    return f"p50 {_seconds(spread.p50)}", f"p99 {_seconds(spread.p99)}"


def _counted(spread: Spread, window_s: float) -> str:
    return f"of {spread.count:,} in {window_s:.0f} s"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    milliseconds = seconds * 1000
    if milliseconds >= 10_000:
        return f"{seconds:.1f} s"
    return f"{milliseconds:.{2 if milliseconds < 10 else 1 if milliseconds < 100 else 0}f} ms"


def duration(seconds: float) -> str:
    """Return a duration such as 1.2s, 3m 02s, 1h 05m or 2d 03h."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    for size, unit, smaller, below in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if seconds >= size:
            return f"{int(seconds // size)}{unit} {int(seconds % size // smaller):02}{below}"
    raise AssertionError


def printable(text: str) -> str:
    """Return text that moves no cursor: clients choose names of requests."""
    return "".join(character if character.isprintable() else "?" for character in text)

"""Fill the blanks of phrases: names, cities, times, numbers and made-up words.

A model that is trained on only forty cities memorizes their names. Many blanks are
therefore filled with names of random syllables, which the model has to copy.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from zlib import crc32

import msgspec

from infd.embedded.recipe.conversation import HELD_OUT_SHARE, Phrases, Pool, part

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from random import Random

Kind = TypeVar("Kind")

HERE: Final = Path(__file__).parent
MADE_UP_SHARE: Final = 0.35  # fraction of made-up names among the results of `name`

_ONSETS: Final = (
    "b",
    "d",
    "f",
    "g",
    "h",
    "j",
    "k",
    "l",
    "m",
    "n",
    "p",
    "r",
    "s",
    "t",
    "v",
    "w",
    "z",
    "br",
    "dr",
    "gr",
    "kl",
    "pl",
    "st",
    "tr",
    "sh",
    "th",
    "qu",
)
_VOWELS: Final = ("a", "e", "i", "o", "u", "a", "e", "i", "o", "ai", "ea", "ou", "y")
_ENDS: Final = ("", "", "", "n", "r", "l", "s", "m", "x", "nd", "rt", "ck", "sk", "th")


def read(name: str) -> dict[str, Any]:
    """Return the content of NAME.toml, with the additional phrases of phrasings.toml in its lists of phrases."""
    written: dict[str, Any] = _joined(_content(name), _content("phrasings").get(name, {}))
    return written


def _content(name: str) -> dict[str, Any]:
    return tomllib.loads((HERE / f"{name}.toml").read_text(encoding="utf-8"))


def _joined(written: Any, more: Any) -> Any:
    if isinstance(written, dict):
        assert more.keys() <= written.keys(), f"phrasings.toml extends unknown lists: {more.keys() - written.keys()}"
        return {key: _joined(value, more[key]) if key in more else value for key, value in written.items()}
    if isinstance(written[0], dict):
        ids = {one["id"] for one in written}
        assert more.keys() <= ids, f"phrasings.toml names unknown entries: {more.keys() - ids}"
        return [_joined(one, more.get(one["id"], {})) for one in written]
    return Phrases(written, more)


def converted(content: Any, kind: type[Kind]) -> Kind:
    """Convert TOML content to `kind`, preserving Phrases."""
    return msgspec.convert(content, kind, dec_hook=lambda _, phrases: Phrases(phrases, getattr(phrases, "more", ())))


def _lists() -> dict[str, tuple[str, ...]]:
    """Read words.toml. Each word is kept only in the shortest list that contains it, so that it belongs to one pool."""
    lists = {name: words.split() if isinstance(words, str) else words for name, words in read("words").items()}
    taken: set[str] = set()
    kept = {}
    for name in sorted(lists, key=lambda name: len(lists[name])):
        kept[name] = tuple(word for word in dict.fromkeys(lists[name]) if word not in taken)
        taken.update(kept[name])
    return kept


LISTS: Final[Mapping[str, tuple[str, ...]]] = _lists()


_PARTS: Final = {(name, pool): tuple(part(words, pool)) for name, words in LISTS.items() for pool in Pool}


def belongs(key: str, pool: Pool, *, one_in: int = HELD_OUT_SHARE) -> bool:
    """Return whether `key` belongs to a pool; by its hash, one key in `one_in` is held out."""
    return (crc32(key.encode()) % one_in == 0) == (pool is Pool.HELD_OUT)


def listed(rng: Random, name: str, pool: Pool) -> str:
    """Draw a word from list `name` of words.toml."""
    return rng.choice(_PARTS[name, pool])


def made_up(rng: Random, pool: Pool, *, syllables: int | None = None) -> str:
    """Draw a name of random syllables, in lower case."""
    while True:
        count = syllables or rng.choice((2, 2, 3))
        body = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(count))
        if belongs(name := body + rng.choice(_ENDS), pool):
            return name


def code(rng: Random, pool: Pool) -> str:
    """Draw an identifier such as AX-4821."""
    letters = "ABCDEFGHJKLMNPQRSTUVWXYZ"
    while True:
        head = "".join(rng.choice(letters) for _ in range(rng.choice((1, 2, 2, 3))))
        tail = "".join(rng.choice("0123456789") for _ in range(rng.randint(2, 5)))
        if belongs(name := head + rng.choice(("-", "-", "")) + tail, pool):
            return name


def name(rng: Random, pool: Pool, of: str) -> str:
    """Draw a name from list `of` of words.toml, or a made-up name."""
    return made_up(rng, pool).capitalize() if rng.random() < MADE_UP_SHARE else listed(rng, of, pool)


def full_name(rng: Random, pool: Pool) -> str:
    return f"{name(rng, pool, 'people')} {name(rng, pool, 'families')}"


def clock(rng: Random, pool: Pool) -> str:
    hour, minute = rng.randint(0, 23), rng.choice((0, 0, 15, 30, 45, rng.randint(0, 59)))
    return rng.choice((f"{hour}:{minute:02}", f"{hour:02}:{minute:02}", f"{hour % 12 + 1} {rng.choice(('am', 'pm'))}"))


def date(rng: Random, pool: Pool) -> str:
    return f"{rng.randint(2019, 2031)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


def day(rng: Random, pool: Pool) -> str:
    return rng.choice(LISTS["days"]) if rng.random() < 0.6 else date(rng, pool)


def title(rng: Random, pool: Pool) -> str:
    """Draw a title of one to four words, for a song, a note or a book."""
    words = [listed(rng, "words", pool).capitalize() for _ in range(rng.choice((1, 2, 2, 3)))]
    if rng.random() < 0.25:
        words[-1] = made_up(rng, pool).capitalize()
    return " ".join(["The", *words] if rng.random() < 0.25 else words)


def phrase(rng: Random, pool: Pool) -> str:
    """Draw two to four words in lower case, like a search query."""
    return " ".join(listed(rng, "words", pool) for _ in range(rng.randint(2, 4)))


def query(rng: Random, pool: Pool) -> str:
    return listed(rng, "topics", pool) if rng.random() < 0.5 else phrase(rng, pool)


def message(rng: Random, pool: Pool) -> str:
    if rng.random() < 0.6:
        return listed(rng, "messages", pool)
    return rng.choice(
        (
            f"{name(rng, pool, 'people')} will come at {clock(rng, pool)}",
            f"order {code(rng, pool)} is ready",
            f"meet me in {name(rng, pool, 'cities')}",
            f"I need {rng.randint(2, 40)} {rng.choice(LISTS['things'])}",
            f"the code is {rng.randint(1000, 9999)}",
        )
    )


def errand(rng: Random, pool: Pool) -> str:
    if rng.random() < 0.7:
        return listed(rng, "errands", pool)
    return rng.choice((f"call {name(rng, pool, 'people')}", f"buy {rng.choice(LISTS['things'])}"))


def mail(rng: Random, pool: Pool) -> str:
    host = rng.choice(("example.com", "example.org", "mail.test", made_up(rng, pool) + ".com"))
    return f"{name(rng, pool, 'people').lower()}@{host}"


def file(rng: Random, pool: Pool) -> str:
    return (
        f"{listed(rng, 'words', pool)}{rng.choice(('', '_2', '_old'))}.{rng.choice(('txt', 'csv', 'pdf', 'md', 'log'))}"
    )


def path(rng: Random, pool: Pool) -> str:
    root = rng.choice(("/home", "/srv", "/var/data", "/tmp", "docs"))  # noqa: S108 (only text)
    return f"{root}/{listed(rng, 'words', pool)}/{file(rng, pool)}"


def folder(rng: Random, pool: Pool) -> str:
    root = rng.choice(("/home", "/srv", "/var/data", "~", "docs"))
    return f"{root}/{listed(rng, 'words', pool)}"


def street(rng: Random, pool: Pool) -> str:
    return f"{rng.randint(1, 180)} {name(rng, pool, 'families')} {rng.choice(('Street', 'Road', 'Lane', 'Avenue'))}"


def sum_(rng: Random, pool: Pool) -> str:
    return f"{rng.randint(100, 9999)} {rng.choice('+-*/')} {rng.randint(11, 999)}"


def gibberish(rng: Random, pool: Pool) -> str:
    return " ".join(made_up(rng, pool) for _ in range(rng.randint(1, 3)))


def address(rng: Random, pool: Pool) -> str:
    return f"https://{made_up(rng, pool)}.{rng.choice(('com', 'org', 'net'))}/{listed(rng, 'words', pool)}"


def host(rng: Random, pool: Pool) -> str:
    return rng.choice((f"{listed(rng, 'words', pool)}-{rng.randint(1, 40)}", f"{made_up(rng, pool)}.local"))


def ticker(rng: Random, pool: Pool) -> str:
    while True:
        letters = "".join(rng.choice("ABCDEFGHIKLMNOPRSTUVX") for _ in range(rng.choice((3, 4))))
        if belongs(letters, pool):
            return letters


def phone(rng: Random, pool: Pool) -> str:
    return f"{rng.randint(100, 999)}-{rng.randint(1000, 9999)}"


def decimal(rng: Random, pool: Pool) -> float:
    return rng.randint(1, 9999) / rng.choice((10, 100))


KINDS: Final[Mapping[str, Callable[[Random, Pool], str | int | float]]] = {
    "person": lambda rng, pool: name(rng, pool, "people"),
    "full_name": full_name,
    "city": lambda rng, pool: name(rng, pool, "cities"),
    "country": lambda rng, pool: listed(rng, "countries", pool),
    "language": lambda rng, pool: listed(rng, "languages", pool),
    "room": lambda rng, pool: listed(rng, "rooms", pool),
    "currency": lambda rng, pool: listed(rng, "currencies", pool),
    "genre": lambda rng, pool: listed(rng, "genres", pool),
    "food": lambda rng, pool: listed(rng, "foods", pool),
    "company": lambda rng, pool: name(rng, pool, "companies"),
    "product": lambda rng, pool: listed(rng, "products", pool),
    "things": lambda rng, pool: listed(rng, "things", pool),
    "event": lambda rng, pool: listed(rng, "events", pool),
    "word": lambda rng, pool: listed(rng, "words", pool),
    "made_up": lambda rng, pool: made_up(rng, pool).capitalize(),
    "clock": clock,
    "date": date,
    "day": day,
    "title": title,
    "phrase": phrase,
    "query": query,
    "message": message,
    "errand": errand,
    "mail": mail,
    "file": file,
    "folder": folder,
    "street": street,
    "sum": sum_,
    "gibberish": gibberish,
    "path": path,
    "url": address,
    "host": host,
    "ticker": ticker,
    "phone": phone,
    "code": code,
    "decimal": decimal,
}


def fill(rng: Random, kind: str, pool: Pool) -> Any:
    """Draw a value of a kind: a name of KINDS, "int:low:high", "bool", or alternatives such as "low|high"."""
    if "|" in kind:
        return rng.choice(kind.split("|"))
    if kind == "bool":
        return rng.random() < 0.5
    if kind.startswith("int:"):
        _, low, high = kind.split(":")
        return rng.randint(int(low), int(high))
    return KINDS[kind](rng, pool)


def opening(rng: Random, pool: Pool) -> list[dict[str, Any]]:
    """Return a list that contains a generic system message with probability 0.1, and is empty otherwise."""
    return [{"role": "system", "content": listed(rng, "systems", pool)}] if rng.random() < 0.1 else []

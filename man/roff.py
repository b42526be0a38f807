"""Text of man pages: escapes, and the first lines of a page."""

from __future__ import annotations

# No hyphenation, so that options and paths can be copied; left-aligned, for even spacing.
UNBROKEN = (".nh", ".ad l")


def escaped(text: str) -> str:
    """Escape roff's control characters, and keep ASCII hyphens so that options can be copied."""
    text = text.replace("\\", r"\e").replace("-", r"\-").replace("…", "...")
    return r"\&" + text if text.startswith((".", "'")) else text


def start(name: str, section: int, summary: str) -> list[str]:
    """Return the first lines of a page: its title, and the section NAME."""
    return [
        f'.TH {name.upper()} {section} "" "infd" "infd"',
        *UNBROKEN,
        ".SH NAME",
        f"{escaped(name)} \\- {escaped(summary)}",
    ]

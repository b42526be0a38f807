"""infd/weights/FORMATS.md is current."""

import pytest

from tests.weights import format_page


@pytest.mark.exhaustive
@pytest.mark.usefixtures("built")
def test_the_page_is_current() -> None:
    assert format_page.FILE.read_text(encoding="utf-8") == format_page.page(), (
        "run `python -m tests.weights.format_page`"
    )

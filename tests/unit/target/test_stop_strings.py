"""Stop strings are found at the same place however the text is cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.target.stop_strings import StopStringScanner

_TEXT = st.text(alphabet="abc", max_size=24)


def _first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return end - len(stop), stop
    return None


@given(pieces=st.lists(_TEXT, max_size=8), stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3))
def test_output_does_not_depend_on_the_pieces(pieces: list[str], stops: list[str]) -> None:
    scanner = StopStringScanner(stops)
    shown = "".join([scanner.push(piece) for piece in pieces]) + scanner.finish()
    text = "".join(pieces)
    expected = _first_stop(text, stops)
    assert shown == (text if expected is None else text[: expected[0]])
    assert scanner.matched == (None if expected is None else expected[1])


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    scanner = StopStringScanner(["END"])
    assert [scanner.push("oneE"), scanner.push("N"), scanner.push("x"), scanner.finish()] == ["one", "", "ENx", ""]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStringScanner([""])

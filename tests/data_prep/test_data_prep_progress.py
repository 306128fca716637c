"""How far a preparation is can be seen without a terminal, too."""

from __future__ import annotations

import pytest
from preparation.progress import shown_progress


def test_without_a_terminal_progress_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    with shown_progress(line_every_s=0.0) as stage:
        advance = stage("reading", 12)
        advance(5)
        advance(7)
        stage("comparing", None)(3)
    assert capsys.readouterr().err.splitlines() == [
        "reading: 5 of 12 rows",
        "reading: 12 of 12 rows",
        "comparing: 3 rows",
    ]
    with shown_progress() as stage:
        stage("reading", 12)(5)
    assert capsys.readouterr().err == "", "a short run says nothing"

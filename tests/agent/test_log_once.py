"""`log_once`."""

import logging

import pytest

from strands_rollout.log_once import log_once

LOGGER = logging.getLogger("strands_rollout.test")


def test_log_once_logs_once_per_key(caplog: pytest.LogCaptureFixture) -> None:
    told = [log_once(LOGGER, logging.WARNING, "got %s of %d", name, 3) for name in ("a", "b", "a")]
    assert told == [True, True, False]
    assert [log_once(LOGGER, logging.WARNING, "at %d", second, key="line") for second in (1, 2)] == [True, False]
    assert caplog.messages == ["got a of 3", "got b of 3", "at 1"]
    assert {record.filename for record in caplog.records} == {"test_log_once.py"}


def test_log_once_caps_texts_that_always_differ(caplog: pytest.LogCaptureFixture) -> None:
    for number in range(1000):
        log_once(LOGGER, logging.WARNING, "failed: %s", ValueError(number))
    assert log_once(LOGGER, logging.WARNING, "another: %s", ValueError(0))
    assert len(caplog.messages) == 51

"""`KnownVersions`; staleness of samples and spans, within one version numbering and across a restart."""

import pytest

from strands_rollout.record.weight_versions import (
    NOT_COMPARABLE,
    KnownVersions,
    LastWeights,
    WeightSpan,
    sample_staleness,
    stale_spans,
)


def known_to(numbering: str, *versions: object) -> KnownVersions:
    known = KnownVersions()
    known.use_numbering(numbering)
    for version in versions:
        known.note(version)
    return known


@pytest.mark.parametrize(
    ("versions", "newest"),
    [([], None), (["default", None, "v7", ""], None), (["3", "default", "2"], 3), ([3, "12"], 12)],
)
def test_known_versions_remember_the_largest_number(versions: list[object], newest: int | None) -> None:
    assert known_to("now", *versions).newest == newest


def test_known_versions_call_on_newer_only_for_newer_versions() -> None:
    known, seen = known_to("now"), list[int | None]()
    known.on_newer = lambda: seen.append(known.newest)
    for version in ("2", "default", "2", "1", "5", None):
        known.note(version)
    assert seen == [2, 5]


def test_known_versions_numbering_is_shared_by_the_driver() -> None:
    known = KnownVersions()
    assert known.numbering == known.numbering != KnownVersions().numbering
    known.use_numbering("driver")
    assert known.numbering == "driver"


@pytest.mark.parametrize(
    ("seen", "samples", "expected"),
    [
        (["9"], [(["7"], ["now"]), (["9"], ["now"])], [2, 0]),
        (["9"], [(["7"], None), (["default"], None), ([None], None), ([], None)], [2, None, None, None]),
        # only the last weights of a sample count, even if earlier ones were newer
        (["9"], [(["8", "9", "6"], ["now"]), (["9", "7", "default"], ["now"])], [3, 2]),
        (["1"], [(["41", "1", "1"], ["before", "now"]), (["1"], ["now"]), (["2"], ["now"])], [1, 1, 0]),
        (["2"], [(["41"], ["before"]), (["1"], ["before"]), (["2"], ["now"])], [NOT_COMPARABLE, NOT_COMPARABLE, 0]),
        ([], [(["41"], ["before"]), (["2"], ["now"])], [NOT_COMPARABLE, 0]),
        # the samples were saved, and this process has sent no request to an engine
        ([], [(["41"], ["before"]), (["40"], ["before"]), (["3"], ["long before"])], [0, 1, 0]),
    ],
)
def test_sample_staleness_counts_the_last_weights(seen, samples, expected) -> None:
    assert sample_staleness([LastWeights.of(*one) for one in samples], known_to("now", *seen)) == expected


@pytest.mark.parametrize(
    ("spans", "max_staleness", "stale"),
    [
        ([("7", "now"), ("8", "now"), ("9", "now")], 1, [0]),
        ([("9", "now"), ("7", "now"), ("8", "now")], 0, [1]),
        ([("default", "now"), ("1", "now"), ("2", "now")], 1, [0]),
        ([("41", "before"), ("1", "now"), ("2", "now")], 1, [0]),
        ([("1", "before"), ("1", "now")], 5, [0]),
        ([("3", "long before"), ("4", "before"), ("default", "now"), ("1", "now")], 1, [0, 1]),
        ([], 0, []),
    ],
)
def test_stale_spans_are_too_old_or_of_another_numbering(spans, max_staleness, stale) -> None:
    given = [WeightSpan(version, at, at + 1, numbering) for at, (version, numbering) in enumerate(spans)]
    assert [span.start for span in stale_spans(given, max_staleness)] == stale

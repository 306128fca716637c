"""Private names of Strands: the newest version has all of them, and what one lacks is said."""

import pytest
from harness import ANSWER, run
from packaging.version import Version

from strands_rollout.agent import strands_names
from strands_rollout.agent.loop import IMPORT_FAULT
from strands_rollout.agent.strands_names import LOOP_LOST, find_losses, report_losses, strands_version
from strands_rollout.diagnostics import DoctorOptions
from strands_rollout.diagnostics.doctor import check_strands


@pytest.mark.skipif(Version(strands_version()) < Version("1.62"), reason="its own loop runs")
def test_losses_of_the_installed_strands_are_none() -> None:
    """Fails where a new Strands has renamed something; the differential tests of the loop are then to be looked at."""
    assert (IMPORT_FAULT, find_losses(IMPORT_FAULT)) == ("", {})


@pytest.mark.skipif(bool(IMPORT_FAULT), reason="this Strands lacks names already")
async def test_an_episode_on_a_strands_that_lacks_a_name_runs_in_its_loop_and_says_so_once(
    shipped_tokenizer, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(strands_names, "LOOP_NAMES", ("_renamed",))
    report_losses.cache_clear()
    try:
        for _ in range(2):
            played = await run(shipped_tokenizer, [ANSWER])
            assert played.sample.status.value == "completed"
    finally:
        report_losses.cache_clear()
    [words] = [one.getMessage() for one in caplog.records if "strands_names_missing" in one.getMessage()]
    assert f"strands={strands_version()} _renamed: {LOOP_LOST}" in words


@pytest.mark.parametrize("names", [None, ("_renamed",)])
def test_the_doctor_says_what_the_installed_strands_lacks(monkeypatch, tmp_path, names) -> None:
    if names is not None:
        monkeypatch.setattr(strands_names, "LOOP_NAMES", names)
    [found] = check_strands(DoctorOptions({}, tmp_path))
    has_all = names is None and not find_losses(IMPORT_FAULT)
    assert strands_version() in found.found
    assert ("lacks" in found.found) == (not has_all)

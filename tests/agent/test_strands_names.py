"""Strands' private names: the installed version has all of them, and missing ones are reported."""

import subprocess
import sys

import pytest
from harness import ANSWER, run
from packaging.version import Version

from strands_rollout.agent import strands_names
from strands_rollout.agent.loop import IMPORT_FAULT
from strands_rollout.agent.strands_names import LOOP_LOST, find_missing_names, report_missing_names, strands_version
from strands_rollout.diagnostics import DoctorOptions
from strands_rollout.diagnostics.doctor import check_strands


@pytest.mark.skipif(Version(strands_version()) < Version("1.62"), reason="Strands before 1.62 runs its own loop")
def test_find_missing_names_none_in_the_installed_strands() -> None:
    """A failure means that a new Strands renamed something: review the differential tests in `test_loop.py` as well."""
    assert (IMPORT_FAULT, find_missing_names(IMPORT_FAULT)) == ("", {})


@pytest.mark.skipif(bool(IMPORT_FAULT), reason="this Strands lacks names already")
@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("strands.middleware._agent_stream", "AgentStreamStage"),
        ("strands.tools._validator", "validate_and_prepare_tools"),
        ("strands.event_loop.event_loop", "_estimate_input_tokens"),
    ],
    ids=["loop", "invocation", "observed_invocation"],
)
def test_loop_imports_without_a_private_name(module: str, name: str) -> None:
    program = (
        f"import strands, {module} as module; del module.{name}; "
        "from strands_rollout.agent import episode, loop; print(loop.HAS_MIDDLEWARE, loop.IMPORT_FAULT)"
    )
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert child.stdout.startswith(f"False cannot import name '{name}' from '{module}'")


@pytest.mark.skipif(bool(IMPORT_FAULT), reason="this Strands lacks names already")
async def test_report_missing_names_warns_once_and_uses_strands_loop(shipped_tokenizer, monkeypatch, caplog) -> None:
    monkeypatch.setattr(strands_names, "LOOP_NAMES", ("_renamed",))
    report_missing_names.cache_clear()
    try:
        for _ in range(2):
            played = await run(shipped_tokenizer, [ANSWER])
            assert played.sample.status.value == "completed"
    finally:
        report_missing_names.cache_clear()
    [words] = [one.getMessage() for one in caplog.records if "strands_names_missing" in one.getMessage()]
    assert f"strands={strands_version()} _renamed: {LOOP_LOST}" in words


@pytest.mark.parametrize("names", [None, ("_renamed",)])
def test_check_strands_reports_missing_names(monkeypatch, tmp_path, names) -> None:
    if names is not None:
        monkeypatch.setattr(strands_names, "LOOP_NAMES", names)
    [found] = check_strands(DoctorOptions({}, tmp_path))
    has_all = names is None and not find_missing_names(IMPORT_FAULT)
    assert strands_version() in found.found
    assert ("lacks" in found.found) == (not has_all)

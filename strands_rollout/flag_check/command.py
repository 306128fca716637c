"""The report on the flags of a script, as `strands-rollout doctor --flags` shows it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console

from strands_rollout.errors import ConfigError
from strands_rollout.flag_check.dry_run import read_script
from strands_rollout.flag_check.findings import Findings
from strands_rollout.flag_check.flag_table import FlagTable
from strands_rollout.flag_check.judgement import judge_reading
from strands_rollout.flag_check.launch_text import Reading, read_text
from strands_rollout.flag_check.real_parsers import find_slime, table_of


def report_flags(
    script: Path, *, as_json: bool, slime_dir: Path | None = None, megatron_dir: Path | None = None
) -> bool:
    """Judge the flags of a launch script and print what was found.

    Args:
        script: The script, or "-" for a command on stdin.
        as_json: Print one line of JSON instead.
        slime_dir: slime's checkout; otherwise SLIME_DIR's, or that of the importable slime.
        megatron_dir: Megatron-LM's; otherwise MEGATRON_DIR's, the one beside slime's, or the importable one.

    Returns:
        Whether there was no error.

    Raises:
        ConfigError: The script can't be read or names no flags, its dry run fails, or there is no slime in `slime_dir`.
    """
    slime = find_slime(slime_dir)
    reading = read_text(sys.stdin.read(), None, slime) if str(script) == "-" else read_script(script, slime)
    with Console(stderr=True).status("asking the parsers of slime, Megatron-LM and SGLang ..."):
        table = table_of(slime, megatron_dir)
    findings = judge_reading(reading, table)
    if findings.flags == 0:
        raise ConfigError(
            f"nothing was judged: found no flag in {script}; "
            "expected a command with train.py or train_async.py, or arrays of its flags"
        )
    if as_json:
        sys.stdout.write(json.dumps(as_values(script, reading, table, findings)) + "\n")
    else:
        _show(script, reading, table, findings)
    return findings.ok


def as_values(script: Path, reading: Reading, table: FlagTable, findings: Findings) -> dict[str, object]:
    """The report as values of JSON."""
    return {
        "ok": findings.ok,
        "script": str(script),
        "how": reading.how,
        "sources": [source.line() for source in table.sources],
        "flags": findings.flags,
        "findings": findings.rows(),
        "notes": list(reading.notes),
    }


def _show(script: Path, reading: Reading, table: FlagTable, findings: Findings) -> None:
    console = Console(markup=False, highlight=False, soft_wrap=True)
    console.print(f"flags of {script}: {findings.flags} ({reading.how})")
    for source in table.sources:
        console.print(f"  {source.line()}")
    for note in reading.notes:
        console.print(f"note: {note}")
    for finding in findings.findings:
        console.print(finding.line(), style="red" if finding.severity == "error" else "yellow")
    errors = sum(finding.severity == "error" for finding in findings.findings)
    console.print(f"{errors} errors, {len(findings.findings) - errors} warnings" if findings.findings else "all known")

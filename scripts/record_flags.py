"""Record the flags of slime, Megatron-LM, SGLang and its router: `python scripts/record_flags.py --help`.

`strands-rollout doctor --flags` reads this record for packages that can't be imported.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from strands_rollout.cli.options import run_command
from strands_rollout.diagnostics.flag_check import RECORD, TITLES, Flag, probe_flags
from strands_rollout.files.json_codec import Json

PYPI_NOTE: Final = ", PyPI's build (slime's image has its own)"


def commit_of(checkout: Path) -> str:
    """Return the commit of a checkout."""
    return subprocess.run(  # noqa: S603
        ["git", "-C", str(checkout), "rev-parse", "HEAD"],  # noqa: S607
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip


def format_record(record: dict[str, Json]) -> str:
    """Return the record as JSON with a line per flag, so that diffs are readable."""
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in record.items() if key != "flags"]
    flags = ",\n".join(json.dumps(row) for row in record["flags"])
    return "{\n" + ",\n".join(lines) + ',\n"flags": [\n' + flags + "\n]\n}\n"


def sources_of(answer: Json, slime: Path, megatron: Path, patches: str | None) -> dict[str, Json]:
    """Return the origin and version of each package whose flags were read."""
    patched = f" with {patches}" if patches else ""
    router = answer["versions"]["router"]
    return {
        "slime": {"repository": "THUDM/slime", "version": f"commit {commit_of(slime)}"},
        "megatron": {"repository": "NVIDIA/Megatron-LM", "version": f"commit {commit_of(megatron)}{patched}"},
        "sglang": {"package": "sglang", "version": f"{answer['versions']['sglang']}{patched}"},
        "router": {"package": "sglang-router", "version": router if "slime" in router else router + PYPI_NOTE},
    }


def sorted_flags(answer: Json) -> list[Json]:
    """Return the flags in the order of the record."""
    systems = list(TITLES)
    flags = sorted(map(Flag.model_validate, answer["flags"]), key=lambda flag: (systems.index(flag.system), flag.names))
    return [flag.model_dump(mode="json", exclude_defaults=True) for flag in flags]


def main(
    slime: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Checkout of THUDM/slime.")],
    megatron: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="Checkout of NVIDIA/Megatron-LM, at slime's commit.")
    ],
    sglang_python: Annotated[
        str, typer.Option(help="Python that can import sglang, sglang_router and what Megatron-LM imports.")
    ] = sys.executable,
    patches: Annotated[
        str | None, typer.Option(help="Patches applied to Megatron-LM and SGLang; recorded with their versions.")
    ] = None,
    out: Annotated[Path, typer.Option(help="File to write.", show_default="the package's own")] = RECORD,
) -> None:
    """Record the flags of slime, Megatron-LM, SGLang and its router; PYTHONPATH applies to --sglang-python, too.

    Example, in slime's image: python scripts/record_flags.py --slime /root/slime --megatron /root/Megatron-LM
    --patches "slime's docker/patch/latest"
    """
    answer = probe_flags(slime.resolve(), megatron.resolve(), python=sglang_python)
    if answer["failed"]:
        typer.echo(f"error: can't read the flags of {answer['failed']}, so nothing was written", err=True)
        raise typer.Exit(1)
    flags = sorted_flags(answer)
    record = {
        "format": 1,
        "command": "python scripts/record_flags.py",
        "sources": sources_of(answer, slime, megatron, patches),
        "abbreviating": answer["abbreviating"],
        "left_out": answer["left_out"],
        "flags": flags,
    }
    out.write_text(format_record(record), encoding="utf-8")
    typer.echo(f"{len(flags)} flags -> {out}")


if __name__ == "__main__":
    run_command(main, "python scripts/record_flags.py")

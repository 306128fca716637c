"""`load_flag_table`: importable parsers are read in a child process; other systems' flags come from the record.

Small checkouts hold the argument files of slime, SGLang and Megatron-LM in their real places and forms.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
from flag_stage import findings_of, write

from strands_rollout.diagnostics.flag_check import RECORD, Flag, FlagTable, load_flag_table, probe_flags

MAIN = "slime/utils/arguments.py"
FILES = {
    MAIN: """
        import argparse
        import a_package_that_is_not_installed

        def get_slime_extra_args_provider(add_custom_arguments=None):
            def add_slime_arguments(parser):
                parser.add_argument("--rollout-batch-size", type=int, required=True)
                parser.add_argument("--num-rollout", type=int)
                parser.add_argument("--newest-of-slime", choices=["a", "b"])
                if "--lr" not in parser._option_string_actions:
                    parser.add_argument("--lr", type=float)
                return parser
            return add_slime_arguments

        def _pre_parse_mode() -> "a_package_that_is_not_installed.Mode":
            parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
            parser.add_argument("--debug-train-only", action="store_true")
            return parser.parse_known_args()[0]
        """,
    "slime/backends/sglang_utils/arguments.py": """
        import argparse
        from sglang.srt.server_args import ServerArgs
        from sglang_router.launch_router import RouterArgs

        def sglang_parse_args():
            parser = argparse.ArgumentParser(add_help=False)
            parser.add_argument("--sglang-router-ip")
            RouterArgs.add_cli_args(parser, use_router_prefix=True)
            original = parser.add_argument
            def renamed(*names, **options):
                if "--tp-size" not in names:
                    original(*[f"--sglang-{name.lstrip('-')}" for name in names], **options)
            parser.add_argument = renamed
            ServerArgs.add_cli_args(parser)
            return parser.parse_known_args()[0]
        """,
}
SGLANG = {
    "sglang/__init__.py": "print('a package may print when it is imported'); __version__ = '9.9'",
    "sglang/srt/__init__.py": "",
    "sglang/srt/server_args.py": """
        class ServerArgs:
            @staticmethod
            def add_cli_args(parser):
                parser.add_argument("--tp-size", type=int)
                parser.add_argument("--newest-of-sglang", type=float)
        """,
}
ROUTER = {
    "sglang_router/__init__.py": "__version__ = '8.8'",
    "sglang_router/launch_router.py": """
        class RouterArgs:
            @staticmethod
            def add_cli_args(parser, use_router_prefix=False):
                parser.add_argument("--router-newest" if use_router_prefix else "--newest", action="append")
        """,
}
MEGATRON = {
    "megatron/training/arguments.py": """
        import argparse
        import enum

        Kind = enum.Enum("Kind", ["flash", "local"])

        def parse_args(extra_args_provider=None, ignore_unknown_args=False):
            parser = argparse.ArgumentParser(allow_abbrev=False)
            parser.add_argument("--lr", type=float)
            parser.add_argument("--newest-of-megatron", nargs="+", type=int)
            parser.add_argument("--kind", type=lambda name: Kind[name], choices=list(Kind))
            return extra_args_provider(parser).parse_known_args()[0]
        """
}
NEVER_IMPORTED = {"megatron/training/arguments.py": "import time\ntime.sleep(600)"}


ALL = {**FILES, **SGLANG, **ROUTER, **MEGATRON}
WHOLE = ["--rollout-batch-size", "4", "--num-rollout", "10"]


@pytest.fixture(autouse=True)
def _no_checkouts_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLIME_DIR", "MEGATRON_DIR", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)


def source_kinds(table: FlagTable) -> list[str]:
    """Return how each system's flags became known: "parser" or "record"."""
    return ["parser" if ": read from its parser, " in line else "record" for line in table.sources]


def test_load_flag_table_asks_all_four_parsers(tmp_path: Path) -> None:
    table = load_flag_table(write(tmp_path, ALL))
    assert source_kinds(table) == ["parser"] * 4
    assert [line.rpartition(" ")[2] for line in table.sources][2:] == ["9.9", "8.8"]
    assert {flag.names[0]: flag.system for flag in table.flags} == {
        **dict.fromkeys(("-h", "--lr", "--newest-of-megatron", "--kind"), "megatron"),
        **dict.fromkeys(("--rollout-batch-size", "--num-rollout", "--newest-of-slime", "--debug-train-only"), "slime"),
        "--sglang-router-ip": "slime",
        "--sglang-newest-of-sglang": "sglang",
        "--router-newest": "router",
    }
    assert (table.left_out, table.abbreviating) == ({"--sglang-tp-size"}, {"sglang"})
    fine = "--newest-of-megatron 1 2 --router-newest a --router-newest b --kind flash"
    assert findings_of([*WHOLE, *fine.split()], table).findings == ()
    refused = ["--newest-of-slime a b", "--use-tis", "--sglang-tp-size 2"]
    assert not any(findings_of([*WHOLE, *words.split()], table).ok for words in refused)


def test_load_flag_table_uses_the_record_for_missing_packages(tmp_path: Path) -> None:
    table = load_flag_table(write(tmp_path, {**FILES, **SGLANG}))
    assert source_kinds(table) == ["parser", "record", "parser", "record"]
    assert "No module named 'megatron'" in table.sources[1]
    assert findings_of([*WHOLE, "--newest-of-slime", "a", "--tensor-model-parallel-size", "2"], table).ok
    assert not findings_of([*WHOLE, "--sglang-mem-fraction-static", "0.7"], table).ok
    assert [flag.system for flag in table.find("--lr")] == ["megatron"]


@pytest.mark.parametrize(
    ("files", "timeout_s", "note"),
    [
        ({**FILES, **NEVER_IMPORTED}, 0.5, "could not be read within 0.5 s"),
        ({**FILES, MAIN: "raise RuntimeError('half written')"}, 60.0, "half written"),
        ({}, 60.0, "no checkout of slime was found"),
    ],
    ids=["too slow", "half written", "no slime"],
)
def test_load_flag_table_uses_the_record_when_parsers_fail(files, timeout_s, note, tmp_path):
    table = load_flag_table(write(tmp_path, files) if files else None, timeout_s=timeout_s)
    assert source_kinds(table) == ["record"] * 4
    assert all(note in line for line in table.sources)


@pytest.mark.slime
def test_flag_record_equals_slimes_checkout() -> None:
    slime_dir = Path(os.environ.get("SLIME_PATH") or pytest.skip("needs THUDM/slime: set SLIME_PATH to a checkout"))
    head = subprocess.run(["git", "-C", slime_dir, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    record = json.loads(RECORD.read_text())
    if (head or "unknown") not in record["sources"]["slime"]["version"]:
        pytest.skip("the record is of another commit of slime")
    recorded = load_flag_table(None)
    probed = [flag for flag in map(Flag.model_validate, probe_flags(slime_dir)["flags"]) if flag.system == "slime"]
    # where Megatron-LM declares a flag too, slime changes only its default
    own = {
        flag
        for flag in probed
        if not any(known.system == "megatron" for name in flag.names for known in recorded.find(name))
    }

    assert own == {flag for flag in recorded.flags if flag.system == "slime"}

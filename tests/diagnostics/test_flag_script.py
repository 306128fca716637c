"""`read_script` runs only scripts that source the launch library, by --dry-run; `read_arguments` splits like bash."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from flag_stage import LAUNCH_SCRIPTS, SCRIPTS, findings_of, write

from strands_rollout.diagnostics.flag_check import _PRINT_ARGUMENTS, read_arguments, read_script
from strands_rollout.errors import ConfigError

FOREIGN = """
    #!/bin/bash
    touch {folder}/was-run
    pkill -9 sglang
    ray stop --force
    set -ex
    SCRIPT_DIR="$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" &>/dev/null && pwd)"
    source "${{SCRIPT_DIR}}/models/small.sh"
    echo "HAS_NVLINK: 0"
    ROLLOUT_ARGS=(
       --rollout-batch-size 32
       #--hf-chekpoint /root/Other
       --num-rollout "${{STEPS:-3}}"
       --wandb-group "a group of 'two' runs"
    )
    ray start --head --num-gpus 8
    for worker in one; do
      ssh $worker "pkill -9 python ; ray start" &
    done
    ray job submit --address="http://127.0.0.1:8265" \\
       --runtime-env-json="{{\\"env_vars\\": {{}}}}" \\
       -- python3 train.py \\
       --colocat \\
       ${{MODEL_ARGS[@]}} \\
       "${{ROLLOUT_ARGS[@]}}" 2>&1 | tee log
    ray stop --force
"""
MODEL = "MODEL_ARGS=(\n  --num-layers 4\n  --hiden-size 64\n)\n"
OURS = 'source "$(dirname "${BASH_SOURCE[0]}")/slime_launch.sh"\nread_options "$@"\n'
LIBRARY = "read_options() {\n  [ $# = 1 ] && [ $1 = --dry-run ]\n}\n"
PROJECT_SCRIPT = Path(__file__).parents[2] / "strands_rollout/data/project/run_slime.sh"


def script_of(folder: Path, text: str) -> Path:
    return write(folder, {"run.sh": text}) / "run.sh"


def test_read_script_refuses_a_foreign_script_with_a_command(tmp_path: Path) -> None:
    write(tmp_path, {"models/small.sh": MODEL})
    script = script_of(tmp_path, FOREIGN.format(folder=tmp_path).lstrip())
    with pytest.raises(
        ConfigError, match=r"run\.sh is shell code \('\$'\), which is neither run nor parsed"
    ) as refused:
        read_script(script, None)
    assert not (tmp_path / "was-run").exists()
    command = str(refused.value).splitlines()[-1].strip().partition(" | ")[0]
    assert command == f"{_PRINT_ARGUMENTS} SCRIPT"
    assert _PRINT_ARGUMENTS in (Path(__file__).parents[2] / "docs/diagnostics.md").read_text()
    printed = subprocess.run(
        ["bash", "-c", command.replace("SCRIPT", shlex.quote(str(script)))],
        env={"PATH": "/usr/bin:/bin"}, cwd=tmp_path, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    words = read_arguments(printed, "stdin").words
    assert words[0] == "--colocat"
    assert words[-2:] == ("--wandb-group", "a group of 'two' runs")
    assert {fault.flag for fault in findings_of(words).findings} == {"--colocat", "--hiden-size"}


@pytest.mark.parametrize(
    "text",
    [
        "python3 train.py ${ARGS[@]}",
        "ARGS=(\n  --lr 1e-6\n)",
        'python3 train.py --lr "$LR"',
        "python3 train.py --lr `cat lr`",
        "python3 train.py --lr 3 2>&1 | tee log",
    ],
)
def test_read_arguments_refuses_shell_code(text: str) -> None:
    with pytest.raises(ConfigError, match="stdin is shell code"):
        read_arguments(text, "stdin")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--lr 3\n--colocate\n", ["--lr", "3", "--colocate"]),
        ("env X=1 ray job submit --id=\"$(date)\" -- python3 'a b/train.py' --lr 3", ["--lr", "3"]),
        ("HAS_NVLINK: 0 (0)\npython3 -u train_async.py \\\n  --lr \\\n  3\n", ["--lr", "3"]),
        (r"""--a 'x $y | "z"' "(\"b\")" c\ \$d 'it'\''s'""", ["--a", 'x $y | "z"', '("b")', "c $d", "it's"]),
        (r"--a=$'\377'", ["--a=\ufffd"]),
    ],
    ids=["a list", "a command", "after other output", "quoted", "invalid UTF-8"],
)
def test_read_arguments_splits_like_a_shell(text: str, words: list[str]) -> None:
    assert list(read_arguments(text, "stdin").words) == words


PRINTERS = {
    "printf %q": 'printf "%q " "$@"',
    "the scripts' output": f'source "{SCRIPTS}/launch/settings.sh"; print_command "$@"',
}


@pytest.mark.parametrize("printer", PRINTERS.values(), ids=PRINTERS)
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_read_arguments_reads_the_output_of_bash(printer: str, locale: str) -> None:
    words = [
        "--a",
        "x y",
        "it's",
        'say "$HOME"',
        "a\nb\tc",
        "`id`; rm -rf | (x)",
        "/home/müller",
        "back\\slash",
        "{a}#b",
        "--c=$'",
    ]
    command = ["bash", "-c", printer, "bash", *words]
    printed = subprocess.run(command, env={"PATH": "/usr/bin:/bin", "LC_ALL": locale}, capture_output=True, check=True)
    assert list(read_arguments(printed.stdout.decode(), "stdin").words) == words


def test_read_arguments_refuses_an_unclosed_quote() -> None:
    with pytest.raises(ConfigError, match="stdin can't be split into arguments: No closing quotation"):
        read_arguments("--lr '3", "stdin")


def test_read_script_reports_a_failing_or_endless_dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"slime_launch.sh": LIBRARY})
    script = script_of(tmp_path, f"{OURS}echo no GPUs >&2\nexit 3\n")
    with pytest.raises(ConfigError, match=r"exit code 3.*no GPUs"):
        read_script(script, None)
    script.write_text(f"{OURS}sleep 60\n")
    monkeypatch.setattr("strands_rollout.diagnostics.flag_check._DRY_RUN_TIMEOUT_S", 0.2)
    with pytest.raises(ConfigError, match=r"gave no arguments: the script did not end within 0.2 s"):
        read_script(script, None)


@pytest.mark.parametrize("library", [None, LIBRARY], ids=["no library", "library in a comment"])
def test_read_script_runs_only_scripts_that_source_the_library(library: str | None, tmp_path: Path) -> None:
    write(tmp_path, {} if library is None else {"slime_launch.sh": library})
    ours = OURS if library is None else f"# {OURS}"
    with pytest.raises(ConfigError, match="neither run nor parsed"):
        read_script(script_of(tmp_path, f"#!/bin/bash\ntouch {tmp_path}/was-run\n{ours}"), None)
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize(
    "script", [*(SCRIPTS / name for name in LAUNCH_SCRIPTS), PROJECT_SCRIPT], ids=lambda at: at.name
)
def test_read_script_launch_scripts_have_no_fault(script: Path) -> None:
    read = read_script(script, None)
    assert read.source == f"bash {script} --dry-run"
    found = findings_of(read.words)
    assert found.flags > 40
    assert [fault.line() for fault in found.findings] == []


def test_read_script_refuses_a_script_that_trains_nothing() -> None:
    with pytest.raises(ConfigError, match=r"prepare_model\.sh --dry-run prints no command"):
        read_script(SCRIPTS / "prepare_model.sh", None)


def test_read_script_refuses_unreadable_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(ConfigError, match="expected a regular file, or - for"):
            read_script(path, None)
    with pytest.raises(ConfigError, match="can't read the script"):
        read_script(tmp_path / "absent.sh", None)

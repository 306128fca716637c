"""Launch scripts are read, and only those of this repository are run, with --dry-run."""

import os
from pathlib import Path

import pytest
from flag_stage import LAUNCH_SCRIPTS, SCRIPTS, the_table, write

from strands_rollout.diagnostics.flag_check import FlagFinding, Reading, judge_reading, read_script
from strands_rollout.errors import ConfigError

FOREIGN = """
    #!/bin/bash
    touch {folder}/was-run
    set -ex
    SCRIPT_DIR="$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" &>/dev/null && pwd)"
    source "${{SCRIPT_DIR}}/models/small.sh"
    CKPT_ARGS=(
       --hf-checkpoint /root/Model # the model
       #--hf-chekpoint /root/Other
    )
    ROLLOUT_ARGS=(
       --rollout-batch-size 32
       --num-rollout "${{STEPS}}"
       --rollout-max-respone-len 8192
    )
    WANDB_ARGS=(
       # --use-wandbb
       --wandb-group "a group of 'two' runs"
    )
    cat <<EOF
    python3 train.py --not-a-flag-of-anything
    EOF
    ray job submit --address="http://127.0.0.1:8265" \\
       --runtime-env-json="{{\\"env_vars\\": {{}}}}" \\
       -- python3 train.py \\
       --colocat \\
       ${{MODEL_ARGS[@]}} ${{CKPT_ARGS[@]}} \\
       ${{ROLLOUT_ARGS[@]}} "${{WANDB_ARGS[@]}}" 2>&1 | tee log
"""


OURS = 'source "$(dirname "${BASH_SOURCE[0]}")/slime_launch.sh"\n'


def script_of(folder: Path, text: str) -> Path:
    return write(folder, {"run.sh": text}) / "run.sh"


def faults(reading: Reading) -> list[FlagFinding]:
    return list(judge_reading(reading, the_table()).findings)


def test_a_foreign_script_is_not_run_and_its_command_arrays_and_sourced_files_are_judged(tmp_path: Path) -> None:
    write(tmp_path, {"models/small.sh": "MODEL_ARGS=(\n  --num-layers 4\n  --hiden-size 64\n)\n"})
    reading = read_script(script_of(tmp_path, FOREIGN.format(folder=tmp_path)), None)
    assert not (tmp_path / "was-run").exists()
    assert "nothing was run" in reading.how
    assert {(fault.flag, fault.where) for fault in faults(reading)} == {
        ("--colocat", f"{tmp_path}/run.sh:26"),
        ("--rollout-max-respone-len", f"{tmp_path}/run.sh:14"),
        ("--hiden-size", f"{tmp_path}/models/small.sh:3"),
    }


COMMAND = "python train.py --rollout-batch-size 4 --num-rollout 5"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            """\
            if [ "$1" = big ]; then ARGS=(--lr 1e-6 --rollout-batch-size 8)
            else ARGS=(--lr 2e-6 --rollout-batch-sise 4); fi
            ARGS+=(--num-rollout 5)
            python train.py "${ARGS[@]}"
            """,
            [("--rollout-batch-sise", 2)],
        ),
        (
            'ARGS="\n  --rollout-batch-size 8\n  --num-rollout 5 --colocat"\npython -u train.py $ARGS\n',
            [("--colocat", 3)],
        ),
        (f"A='\n\n'\n{COMMAND} \\\n--lr 4 \\\n--colocat\n", [("--colocat", 6)]),
    ],
    ids=["set twice", "a string", "continued lines"],
)
def test_what_is_certain_of_a_script_is_judged_once_at_its_line(text, found, tmp_path) -> None:
    judged = faults(read_script(script_of(tmp_path, text), None))
    assert [(fault.flag, int((fault.where or "").rpartition(":")[2])) for fault in judged] == found


def test_a_dry_run_that_fails_or_does_not_end_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"slime_launch.sh": 'read_options() {\n  [ "$1" = --dry-run ]\n}\n'})
    script = script_of(tmp_path, f"{OURS}echo no GPUs >&2\nexit 3\n")
    with pytest.raises(ConfigError, match=r"ended with 3.*no GPUs"):
        read_script(script, None)
    script.write_text(f"{OURS}sleep 60\n")
    monkeypatch.setattr("strands_rollout.diagnostics.flag_check._DRY_RUN_LIMIT_S", 0.2)
    with pytest.raises(ConfigError, match=r"could not be run: it did not end within 0.2 s"):
        read_script(script, None)


def test_a_script_that_names_the_library_but_has_none_beside_it_is_not_run(tmp_path: Path) -> None:
    reading = read_script(script_of(tmp_path, f"touch {tmp_path}/was-run\n{OURS}"), None)
    assert not (tmp_path / "was-run").exists()
    assert "nothing was run" in reading.how


@pytest.mark.parametrize("name", LAUNCH_SCRIPTS)
def test_each_launch_script_of_this_repository_has_no_fault(name: str) -> None:
    reading = read_script(SCRIPTS / name, None)
    assert "--dry-run" in reading.how
    assert any(word.is_flag for word in reading.commands[0])
    assert [fault.line() for fault in faults(reading)] == []


def test_what_is_no_script_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(ConfigError, match="expected a regular file, or - for"):
            read_script(path, None)
    with pytest.raises(ConfigError, match="expected a file that can be read"):
        read_script(tmp_path / "absent.sh", None)

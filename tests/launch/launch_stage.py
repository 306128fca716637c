"""A copy of the launch scripts and configs, a fake slime checkout, and fakes of the programs that the scripts call.

The fakes are `ray` (a cluster is a file that exists while `ray start --block` runs), `python3`, `torchrun`, `hf`,
`nvidia-smi`, `strands-rollout`, `sleep` (20 ms instead of a pause), and `pkill`, which no script may call.
"""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
MODEL_ARGS = 'MODEL_ARGS=(\n   --num-layers 36\n   --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"\n)\n'
FAKE = """#!{python} -S
import json, os, pathlib, signal, sys, time
stage = pathlib.Path({stage!r})
name, words = pathlib.Path(sys.argv[0]).name, sys.argv[1:]
entry = {{"name": name, "words": words, "key": os.environ.get("WANDB_API_KEY")}}
for word in words:
    if word.startswith("--runtime-env-json="):
        entry["runtime_env"] = json.loads(word.partition("=")[2])["env_vars"]
        netrc = entry["runtime_env"].get("NETRC")
        if netrc:
            entry["netrc"] = pathlib.Path(netrc).read_text()
            entry["netrc_mode"] = oct(os.stat(netrc).st_mode & 0o777)
if "--flags" in words:
    entry["stdin"] = sys.stdin.read()
with open(stage / "calls.jsonl", "a") as log:
    log.write(json.dumps(entry) + "\\n")
{body}
"""
RAY = """
running, number = stage / "ray-runs", int(os.environ.get("FAKE_JOB_STATUS", "0"))
if words[:2] == ["job", "status"]:
    print("Job 'one' " + ("failed" if number else "succeeded"))
if words[:2] == ["job", "list"] and (stage / "job-runs").exists() and os.environ.get("FAKE_OTHER_JOB"):
    print("[JobDetails(submission_id='another', status=<JobStatus.RUNNING: 'RUNNING'>)]")
if words[:1] == ["status"]:
    (stage / "ray-was-asked").touch()
if words[:2] == ["job", "list"] or words[:1] == ["status"]:
    if words[:1] == ["status"] and running.exists() and os.environ.get("FAKE_CLUSTER_GPUS"):
        print(f"Usage:\\n 0.0/96.0 CPU\\n 0.0/{os.environ['FAKE_CLUSTER_GPUS']}.0 GPU\\n 0B/1.00TiB memory")
    sys.exit(not (running.exists() and (words[0] == "status" or os.environ.get("FAKE_DASHBOARD", "1") == "1")))
if words[:1] == ["start"]:
    if os.environ.get("FAKE_RAY_FAILS"):
        sys.exit("no free port")
    if os.environ.get("FAKE_RAY_IN_BACKGROUND"):
        running.touch()
        sys.exit()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        (stage / "ray-was-asked").unlink(missing_ok=True)
        running.write_text(str(os.getpid()))
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if os.environ.get("FAKE_RAY_ENDS") and (stage / "ray-was-asked").exists():
                sys.exit("out of memory")
            time.sleep(0.02)
    finally:
        running.unlink()
if words[:2] == ["job", "submit"]:
    (stage / "job-runs").touch()
    deadline = time.monotonic() + 60
    while os.environ.get("FAKE_LONG_JOB") and not (stage / "job-stopped").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    sys.exit(number)
if words == ["stop"]:
    running.unlink()
if words[:2] == ["job", "stop"]:
    (stage / "job-stopped").touch()
"""
PYTHON = """
if words[:1] in (["-c"], ["-"]):
    if "import strands_rollout" in words:
        sys.exit(int(os.environ.get("FAKE_NOT_INSTALLED", "0")))
    os.execv(sys.executable, [sys.executable, *words])
if words[:1] == ["-m"]:
    sys.exit(int(os.environ.get("FAKE_CHECK_STATUS", "0")))
if "--save" in words and not os.environ.get("FAKE_CONVERSION_FAILS"):
    saved = pathlib.Path(words[words.index("--save") + 1])
    saved.mkdir(parents=True)
    (saved / "latest_checkpointed_iteration.txt").write_text("release")
sys.exit(int(os.environ.get("FAKE_CONVERSION_FAILS", "0")))
"""
NVIDIA_SMI = """
if words == ["-L"]:
    print("\\n".join(f"GPU {n}: one (UUID: GPU-{n})" for n in range(int(os.environ.get("FAKE_GPUS", "8")))))
elif words[:1] == ["topo"] and os.environ.get("FAKE_NVLINK"):
    print("GPU0 X NV18")
"""
HF = """
if os.environ.get("FAKE_HUB_FAILS"):
    sys.exit("cannot reach the hub")
folder = pathlib.Path(words[words.index("--local-dir") + 1])
folder.mkdir(parents=True, exist_ok=True)
(folder / "config.json").write_text("{}")
(folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}')
(folder / "one.safetensors").touch()
if not os.environ.get("FAKE_CUT_DOWNLOAD"):
    (folder / "two.safetensors").touch()
"""


@dataclass(frozen=True)
class Call:
    """One call of a fake: its name and arguments, wandb's key, the job's environment, the netrc file, and its stdin.

    A field is None if the call does not have it; stdin is read only if the call has --flags.
    """

    name: str
    words: list[str]
    key: str | None
    runtime_env: dict[str, str] | None = None
    netrc: str | None = None
    netrc_mode: str | None = None
    stdin: str | None = None


@dataclass(frozen=True)
class Stage:
    """A copy of the repository's scripts and configs, in which the scripts run, and the fake slime."""

    root: Path  # the copy's folder
    slime: Path  # fake slime checkout; Megatron-LM is beside it

    @property
    def calls(self) -> list[Call]:
        log = self.root.parent / "calls.jsonl"
        return [Call(**json.loads(line)) for line in log.read_text().splitlines()] if log.exists() else []

    def calls_of(self, *words: str) -> list[Call]:
        """Return the calls that begin with these words, the command's name first."""
        return [call for call in self.calls if [call.name, *call.words][: len(words)] == list(words)]

    @property
    def all_arguments(self) -> str:
        return "\n".join(" ".join([call.name, *call.words]) for call in self.calls)

    @property
    def ray_runs(self) -> Path:
        return self.root.parent / "ray-runs"

    def environment(self, **given: str) -> dict[str, str]:
        base = {"PATH": f"{self.root.parent / 'bin'}:/usr/bin:/bin", "HOME": str(self.root.parent), "LC_ALL": "C.UTF-8"}
        return {**base, "SLIME_DIR": str(self.slime), **given}

    def run(self, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(self.root / "scripts" / script), *arguments],
            env=self.environment(**environment),
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    def start(self, script: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start a script in the background, in its own process group, with signals as in a terminal."""
        # a shell can't trap a signal that was ignored at its start: Ctrl-C in a background job, a hangup under nohup
        begin = (
            "import os, signal, sys; "
            "[signal.signal(each, signal.SIG_DFL) for each in (signal.SIGINT, signal.SIGHUP)]; "
            "os.execvp('bash', sys.argv[1:])"
        )
        return subprocess.Popen(
            [sys.executable, "-S", "-c", begin, "bash", str(self.root / "scripts" / script), *arguments],
            env=self.environment(**environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def provide_files(self) -> None:
        names = ["models/Qwen3-8B/config.json", "models/Qwen3-8B_torch_dist/latest_checkpointed_iteration.txt"]
        for name in (*names, *(f"data/{name}.jsonl" for name in ("dapo-math-17k", "aime-2024", "aime-2025"))):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).touch()

    def use_real_python(self) -> None:
        """Make python3 the Python of this test run, which has the package."""
        command = self.root.parent / "bin" / "python3"
        command.write_text(f'#!/usr/bin/env bash\nexec "{sys.executable}" "$@"\n')

    def files(self) -> dict[str, int]:
        folders = (self.root, self.slime.parent)
        return {str(path): path.stat().st_mtime_ns for folder in folders for path in folder.rglob("*")}


def make_stage(root: Path) -> Stage:
    """Copy the scripts and configs to a folder below `root`, and put the fakes and the fake slime beside it."""
    copy, slime, commands = root / "a checkout", root / "sources" / "slime", root / "bin"
    shutil.copytree(REPOSITORY / "scripts", copy / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(REPOSITORY / "configs", copy / "configs")
    (slime / "scripts/models").mkdir(parents=True)
    (slime.parent / "Megatron-LM").mkdir()
    (slime / "train.py").touch()
    for module in ("slime/utils/arguments.py", "slime/backends/sglang_utils/arguments.py"):
        (slime / module).parent.mkdir(parents=True)
        (slime / module).touch()  # without a parser, so that the recorded flags are used
    for model in ("qwen3-8B", "qwen3-4B"):
        (slime / f"scripts/models/{model}.sh").write_text(MODEL_ARGS)
    commands.mkdir()
    bodies = {"ray": RAY, "python3": PYTHON, "nvidia-smi": NVIDIA_SMI, "hf": HF, "pkill": "", "torchrun": PYTHON}
    bodies["strands-rollout"] = ""
    scripts = {name: FAKE.format(python=sys.executable, stage=str(root), body=body) for name, body in bodies.items()}
    # `sleep` shortens the scripts' pauses; their deadlines use the clock
    for name, text in {**scripts, "sleep": "#!/bin/sh\nexec /bin/sleep 0.02\n"}.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    return Stage(copy, slime)


def value_of(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def readable(stage: Stage, text: str) -> str:
    return text.replace(str(stage.root), "<repository>").replace(str(stage.slime.parent), "<sources>")

"""`strands-rollout eval` in its own process: exit codes, Ctrl-C, kills, the embedded engine."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from evaluation_stage import options_for, write_problems
from fake_sglang import FakeSGLang, Reply
from harness import ANSWER, ids_of
from processes import wait_until
from typer.testing import CliRunner

from strands_rollout.cli.commands import app
from strands_rollout.evaluation.run import run_evaluation
from strands_rollout.play.options import Sampling

REPOSITORY = str(Path(__file__).parents[2])
SMOKE = Path(REPOSITORY) / "configs" / "smoke.yaml"
COMMAND = ["-m", "strands_rollout.cli", "eval"]
# a shell's background job inherits an ignored SIGINT
AS_IN_A_TERMINAL = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.executable, sys.argv[1:])"
)
PATIENCE_S = 60.0


@asynccontextmanager
async def running_eval(
    *arguments: str, cwd: Path, sigint: str = "SIG_DFL"
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start the command, and kill it on leaving if it still runs."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        AS_IN_A_TERMINAL.replace("SIG_DFL", sigint),
        sys.executable,
        *COMMAND,
        *arguments,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": REPOSITORY, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def run_eval(*arguments: str, cwd: Path) -> tuple[int, str, str]:
    async with running_eval(*arguments, cwd=cwd) as process:
        out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


def result_lines(out: Path) -> list[bytes]:
    results = out / "results.jsonl"
    return results.read_bytes().splitlines(keepends=True) if results.exists() else []


async def test_eval_embedded_engine_on_the_shipped_problems(tmp_path: Path) -> None:
    options = options_for(tmp_path, None, None, sampling=Sampling(2, 256), limit=1, data=[], config=SMOKE)
    assert await asyncio.to_thread(run_evaluation, options) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["data_sets"]["demo"]["scored"] == 2
    assert report["model"].endswith("checkpoint")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signum", "in_background"), [(signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGTERM, True)]
)
async def test_eval_sigint_and_sigterm_exit_with_130(
    signum: signal.Signals, in_background: bool, shipped_tokenizer: Any, tmp_path: Path
) -> None:
    """The signal comes when two samples are answered and others wait. A background job begins with SIGINT ignored."""
    waiting = asyncio.Event()

    async def reply(request: dict[str, Any], number: int) -> Reply:
        if number < 2:
            return Reply.tokens(ids_of(shipped_tokenizer, ANSWER))
        if number == 3:
            waiting.set()
        await asyncio.Event().wait()
        raise AssertionError

    config = tmp_path / "rollout.yaml"
    config.write_text("strands_rollout: {tools: []}\n")
    data = write_problems(tmp_path)
    async with FakeSGLang(reply, context_length=8192) as fake:
        arguments = ["--base-url", fake.base_url, "--tokenizer", str(shipped_tokenizer.name_or_path)]
        arguments += ["--data", str(data), "--config", str(config), "--out", "run", "--concurrency", "2"]
        async with running_eval(*arguments, cwd=tmp_path, sigint="SIG_IGN" if in_background else "SIG_DFL") as process:
            async with asyncio.timeout(PATIENCE_S):
                await waiting.wait()
            process.send_signal(signum)
            async with asyncio.timeout(PATIENCE_S):
                out, err = await process.communicate()
    assert (process.returncode, out) == (130, b"")
    assert b"interrupted; finished samples are saved; to resume, run the same command with --out run" in err
    assert b"Traceback" not in err
    assert len(result_lines(tmp_path / "run")) == 2


@pytest.mark.parametrize(("base_url", "expected"), [("http://127.0.0.1:1", (16, 16384, 64)), (None, (4, 1024, 16))])
def test_eval_defaults_depend_on_the_engine(base_url, expected, monkeypatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("strands_rollout.evaluation.run.run_evaluation", lambda options: seen.append(options) or 0)
    ended = CliRunner().invoke(app, ["eval", *(["--base-url", base_url] if base_url else [])])
    assert ended.exit_code == 0, ended.output
    (options,) = seen
    assert (options.sampling.samples, options.sampling.max_new_tokens, options.concurrency) == expected
    assert (options.sampling.temperature, options.sampling.top_p, options.sampling.top_k) == (1.0, 1.0, -1)
    assert options.out.parent == Path("eval_results")


@pytest.mark.slow
async def test_eval_killed_twice_resumes_to_the_same_report(tmp_path: Path) -> None:
    """The embedded engine dies with each killed process and starts anew."""
    arguments = ["--seed", "3", "--limit", "8", "--concurrency", "3"]
    code, _, err = await run_eval(*arguments, "--out", "whole", cwd=tmp_path)
    assert code == 0, err
    cut = tmp_path / "cut"
    kept: list[bytes] = []
    for least in (5, 17):
        async with running_eval(*arguments, "--out", "cut", cwd=tmp_path) as process:
            await wait_until(lambda least=least: len(result_lines(cut)) >= least)  # type: ignore[misc]
            process.kill()
            await process.communicate()
        found = result_lines(cut)
        assert len(found) >= least
        assert found[: len(kept)] == kept
        kept = found
    with (cut / "results.jsonl").open("ab") as results:
        results.write(kept[0][:40])
    code, out, err = await run_eval(*arguments, "--out", "cut", cwd=tmp_path)
    assert code == 0, err
    assert "dropped 40 bytes of a half-written last line" in err
    assert f"{len(kept)} samples have a score already" in err
    assert (len(result_lines(cut)), result_lines(cut)[: len(kept)]) == (32, kept)
    assert report_without_session(cut) == report_without_session(tmp_path / "whole")
    assert json.loads(out.splitlines()[-1])["complete"] is True


def report_without_session(out: Path) -> str:
    """Return the report without its session, which depends on the clock and on the point of the interruption."""
    report = json.loads((out / "report.json").read_text())
    del report["session"]
    return json.dumps(report)

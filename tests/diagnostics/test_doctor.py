"""The doctor as a whole: every check is run, none can stop another, the exit code is the verdict; and on servers.

Servers are dead, loading, foreign, with too small a context, of another vocabulary, behind a router.
"""

import asyncio
import json
import os
import socket
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_sglang import dead_url
from stand_in_machine import (
    REPOSITORY,
    SHIPPED,
    answering,
    assert_fault,
    only,
    question,
    tokenizer_folder,
)
from typer.testing import CliRunner

from strands_rollout.cli.commands import app
from strands_rollout.diagnostics import diagnosis
from strands_rollout.diagnostics.diagnosis import (
    Check,
    Diagnosis,
    Finding,
    Question,
    error,
    good,
    run_checks,
    skipped,
    warning,
)
from strands_rollout.diagnostics.doctor import check_server, examine

FINE, DOUBTFUL, BAD, NOT_ASKED = (
    good("a", "fine"),
    warning("b", "hm", "do b"),
    error("c", "bad [red]", "do c"),
    skipped("d", "no"),
)


async def test_a_clean_machine_passes_and_the_json_holds_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "run_checks", partial(run_checks, limit_s=250))  # this machine may be busy
    env = {"PATH": os.defpath, "HOME": str(tmp_path)}
    found = await asyncio.to_thread(examine, question(REPOSITORY, env, isolation="rlimits"))
    report = json.loads(found.to_json())
    assert (found.ok(), report["ok"]) == (True, True), [one for one in report["checks"] if one["status"] == "error"]
    assert report["versions"]["strands-rollout"]
    assert report["python"]
    missing = {check["name"] for check in report["checks"] if "MISSING" in check["found"]}
    assert missing == {f"sandbox {layer}" for layer in report["sandbox"]["missing"]}
    (limits,) = [check["found"] for check in report["checks"] if check["name"] == "sandbox limits"]
    assert limits.endswith(report["sandbox"]["enforced"]["limits"])
    names = {check["name"].partition(" ")[0].rstrip(":") for check in report["checks"]}
    checked = "python packages slime megatron gpus memory open proxies disk shared ray wandb model tokenizer config"
    assert names >= {*checked.split(), "data", "sandbox", "server"}
    assert all(check["remedy"] for check in report["checks"] if check["status"] in ("warning", "error"))


def test_the_command_asks_what_its_options_say_and_exits_with_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Question] = []

    def find_doubts(question: Question) -> Diagnosis:
        asked.append(replace(question, env={}))
        return Diagnosis([FINE, DOUBTFUL])

    monkeypatch.setattr("strands_rollout.diagnostics.doctor.examine", find_doubts)
    named = "--model-name Qwen3-4B --tokenizer t --config c --data d --data e --slime-dir s --megatron-dir m"
    options = f"--training --gpus 2 --isolation rlimits --base-url http://a:1 --max-context-length 9 {named}"
    done = CliRunner().invoke(app, ["doctor", "--json", *options.split()])
    strict = CliRunner().invoke(app, ["doctor", "--strict"])
    assert (done.exit_code, json.loads(done.stdout)["ok"]) == (0, True)
    assert (strict.exit_code, "-> do b" in strict.stdout) == (1, True)
    paths = {"tokenizer": Path("t"), "config": Path("c"), "slime_dir": Path("s"), "megatron_dir": Path("m")}
    given = {"isolation": "rlimits", "base_urls": ["http://a:1"], "data": [Path("d"), Path("e")], "gpus": 2, **paths}
    given |= {"training": True, "model_name": "Qwen3-4B", "max_context_length": 9}
    assert asked == [Question({}, REPOSITORY, **given), Question({}, REPOSITORY)]


def test_an_unknown_isolation_is_a_usage_error() -> None:
    done = CliRunner().invoke(app, ["doctor", "--isolation", "none"])
    assert (done.exit_code, "'none' is not one of 'full', 'seccomp', 'rlimits'" in done.stderr) == (2, True)


@pytest.mark.parametrize("on_stdin", [False, True])
def test_the_flag_check_is_run_alone(on_stdin: bool, tmp_path: Path) -> None:
    script = tmp_path / "launch.sh"
    script.write_text("python3 train.py --no-such-flag-of-slime 3\n")
    given = {"input": script.read_text()} if on_stdin else {}
    done = CliRunner().invoke(app, ["doctor", "--flags", "-" if on_stdin else str(script)], **given)
    assert (done.exit_code, "no-such-flag-of-slime" in done.stdout, "sandbox" in done.stdout) == (1, True, False)


def test_no_check_stops_another() -> None:
    """One crashes, one can't import, one hangs."""
    released = threading.Event()

    def crash(_: Question) -> list[Finding]:
        raise KeyError("gone")

    def import_nothing(_: Question) -> list[Finding]:
        import no_such_package  # noqa: F401

        return []

    def hang(_: Question) -> list[Finding]:
        return [good("slow", str(released.wait()))]

    checks = [Check("a", crash), Check("b", lambda _: [good("b", "fine")]), Check("c", import_nothing)]
    ended = run_checks(checks, question(Path()))
    assert [finding.name for finding in ended] == ["a", "b", "c"]
    assert_fault(ended, "a", "error", "this is a bug in the check: KeyError: 'gone'", remedy="doctor --json")
    assert_fault(ended, "c", "error", "no_such_package can't be imported", remedy="pip install")
    found = run_checks([Check("slow", hang, waits=True)], question(Path()), limit_s=0.1)
    released.set()
    assert_fault(found, "slow", "error", "did not end within 0.1 s", remedy="state D")


SERVES = {"model_path": "/models/m", "served_model_name": "m", "weight_version": "default"}
UP = {"/health": (200, None)}
SICK = {"workers": [{"url": "http://127.0.0.1:1", "is_healthy": False}]}


def serving(info: dict[str, Any]) -> dict[str, tuple[int, Any]]:
    return {**UP, "/server_info": (200, info)}


async def look(url: str, limit_s: float = 15.0, **expected: Any) -> list[Finding]:
    return await asyncio.to_thread(check_server, url, question(Path("nowhere"), **expected), limit_s)


@pytest.mark.parametrize(
    ("routes", "name", "status", "words", "remedy"),
    [
        (serving({**SERVES, "version": "0.4.9"}), "server", "warning", "0.4.9", "sglang>=0.5"),
        ({"/health": (503, None)}, "server", "error", "is up, but not healthy (503)", "wait"),
        ({**UP, "/v1/models": (200, {"data": []})}, "server", "error", "not SGLang", "check the port"),
        (serving(SERVES), "server context", "warning", "does not state", "--context-length 20480"),
        ({**UP, "/workers": (200, SICK)}, "server", "error", "1 workers, none of them healthy", "/workers"),
        (
            serving({**SERVES, "context_length": 9}),
            "server context",
            "warning",
            "takes 9 tokens, 20480 are",
            "length 20",
        ),
    ],
    ids=["too old", "loading", "foreign", "context unknown", "no workers", "context too small"],
)
async def test_a_server_that_is_not_what_a_run_expects_is_named(
    routes: dict[str, tuple[int, Any]], name: str, status: str, words: str, remedy: str
) -> None:
    async with answering(routes) as url:
        assert_fault(await look(url, max_context_length=20480), name, status, words, remedy=remedy)


async def test_a_server_that_can_not_be_asked_is_an_error() -> None:
    url = dead_url()
    assert_fault(await look(url), "server", "error", "nothing answers", url, remedy="sglang.launch_server")
    assert_fault(await look("http://127.0.0.1:1/generate"), "server", "error", "/generate", remedy="http://")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and is never looked at
        found = await look(f"http://127.0.0.1:{silent.getsockname()[1]}", limit_s=0.3)
    assert_fault(found, "server", "error", "did not answer within 0.3 s", remedy="log")


async def test_a_server_with_another_vocabulary_is_an_error(tmp_path: Path) -> None:
    async with answering({**serving(SERVES), "/tokenize": (200, {"tokens": [1, 2, 3]})}) as url:
        named = await look(url, tokenizer=SHIPPED)
        guessed = await look(url, env={"HF_CHECKPOINT": str(tokenizer_folder(tmp_path / "model"))})
    assert_fault(named, "server tokens", "error", str(SHIPPED), "/models/m", "3 there", remedy="--tokenizer")
    assert only(guessed, "server tokens").status == "warning"
    async with answering(serving({**SERVES, "model_path": str(SHIPPED)})) as url:  # it does not tokenize
        same = await look(url, tokenizer=SHIPPED)
    assert only(same, "server tokens").status == "ok"

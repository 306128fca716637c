"""Algebra in a worker process: right, bounded in time, off the event loop, and gone when its parent is."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import ends

from strands_rollout.grading import symbolic
from strands_rollout.grading.comparison import compare
from strands_rollout.grading.symbolic import compare_symbolically

SLOW = r"\binom{10^7}{5\cdot 10^6}"  # one C call of many seconds: no Python exception gets in
LINUX = pytest.mark.skipif(not Path("/proc/self").exists(), reason="reads /proc")


@pytest.fixture(scope="module", autouse=True)
def workers_end_with_this_module() -> Iterator[None]:
    yield
    symbolic.close_workers()


async def algebra(prediction: str, label: str, limit_s: float = 10.0) -> tuple[bool | None, str]:
    comparison = compare(prediction, label)
    assert comparison.equal is None
    comparison = await compare_symbolically(*comparison.formulas, limit_s)
    return comparison.equal, comparison.method


def idle_process() -> subprocess.Popen[bytes]:
    return symbolic._pools[os.getpid()]._idle[-1]._process


@pytest.mark.parametrize(
    ("prediction", "label"),
    [
        (r"\sqrt{4}", "2"),
        ("2x+1", "1+2x"),
        (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt2}{2}"),
        ("sqrt(2)/2", r"\frac{1}{\sqrt{2}}"),
        ("pi/2", r"\frac{\pi}{2}"),
        ("x^10", "x^{5}x^{5}"),
        ("x^-1", r"\frac{1}{x}"),
        ("(x+1)^2", "x^2+2x+1"),
        (r"(1, \sqrt{4})", "(1,2)"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"),
        ("3!", "6"),
    ],
)
async def test_algebra_finds_equal_expressions(prediction: str, label: str) -> None:
    assert await algebra(prediction, label) == (True, "algebra")


@pytest.mark.parametrize(
    ("prediction", "label"),
    [
        ("42x", "42"),
        ("y=5", "x=5"),
        ("x, 42", "42"),
        (r"x \le 42", "42"),
        ("42 million", "42"),
        (r"\frac{1}{0}", "1"),
        (r"\text{42 maybe}^3", "42"),
        ("\x00(", "1"),
        ('__import__("os").abort()', "1"),
        (r"\frac{" * 60, "1"),
    ],
)
async def test_algebra_takes_nothing_else_for_equal(prediction: str, label: str) -> None:
    assert await algebra(prediction, label) == (False, "algebra")


@pytest.mark.parametrize(
    "hostile", ["10^10^10+x", "9**9**9**9 x", "9^{9^{9}}x", "10^{99999}", "99999!", "3!!!", "x" + "1" * 300]
)
async def test_towers_and_giants_are_refused_unread(hostile: str) -> None:
    assert await algebra(hostile, "42", 0.001) == (False, "algebra_refused")


async def test_a_hostile_expression_is_stopped_and_the_next_question_answered() -> None:
    await algebra(r"\sqrt{9}", "3")
    process = idle_process()
    started = time.monotonic()
    ticks = 0
    question = asyncio.create_task(algebra(SLOW, "1", 0.5))
    while not question.done():
        await asyncio.sleep(0.01)
        ticks += 1
    assert await question == (False, "algebra_timeout")
    assert time.monotonic() - started < 3.0
    assert ticks > 20
    assert process.returncode == -signal.SIGALRM
    assert await algebra(r"\sqrt{16}", "4") == (True, "algebra")


async def test_a_worker_killed_while_idle_is_replaced() -> None:
    await algebra(r"\sqrt{25}", "5")
    idle_process().kill()
    assert await algebra(r"\sqrt{36}", "6") == (True, "algebra")


async def test_the_same_question_is_answered_once() -> None:
    first = await algebra(SLOW, "3", 0.3)
    started = time.monotonic()
    assert await asyncio.gather(*(algebra(SLOW, "3", 0.3) for _ in range(50))) == [first] * 50
    assert time.monotonic() - started < 0.3


def test_loops_of_several_threads_share_the_workers() -> None:
    answers: list[tuple[bool | None, str]] = []

    def own_loop(number: int) -> None:
        answers.append(asyncio.run(algebra(rf"\sqrt{{{number * number}}}+x", f"x+{number}")))

    threads = [threading.Thread(target=own_loop, args=(number,)) for number in range(31, 35)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [(True, "algebra")] * 4


async def test_a_missing_library_is_an_error_of_the_grader_not_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('no math_verify here')")
    symbolic.close_workers()
    monkeypatch.syspath_prepend(tmp_path)
    assert await algebra(r"\sqrt{49}", "7") == (False, "algebra_unavailable")
    assert await algebra(r"\sqrt{64}", "8") == (False, "algebra_unavailable")
    assert caplog.text.count("no math_verify here") == 1
    symbolic.close_workers()


SCRIPT = """
import asyncio, os, sys, threading, time
from strands_rollout.grading import symbolic
assert "sympy" not in sys.modules and not symbolic._pools, "work was done at import"
print(asyncio.run(symbolic.compare_symbolically("2x", "x+x", 10)).equal, flush=True)
print(symbolic._pools[os.getpid()]._idle[-1]._process.pid, flush=True)
if {busy}:
    threading.Thread(target=lambda: asyncio.run(symbolic.compare_symbolically({slow!r}, "1", 1.5)), daemon=True).start()
    time.sleep(0.3)
os.kill(os.getpid(), 9)
"""


@LINUX
@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.slow
def test_a_worker_does_not_outlive_a_killed_parent(busy: bool) -> None:
    script = SCRIPT.format(busy=busy, slow=SLOW)
    parent = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert parent.returncode == -signal.SIGKILL, parent.stderr
    equal, pid = parent.stdout.split()
    assert equal == "True"
    assert ends(int(pid), 4.0)


@LINUX
def test_a_process_that_exits_takes_its_workers_along() -> None:
    script = SCRIPT.format(busy=False, slow=SLOW).replace("os.kill(os.getpid(), 9)", "")
    parent = subprocess.run([sys.executable, "-X", "dev", "-c", script], capture_output=True, text=True, check=True)
    assert parent.stderr == ""  # no ResourceWarning either
    assert ends(int(parent.stdout.split()[1]), 1.0)

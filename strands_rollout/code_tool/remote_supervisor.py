"""The program that a remote sandbox is sent: it forks the code off, reads, caps, times and kills it, and reports once.

Runs where neither this package nor Python 3.11 is: Python 3.8 and its standard library, on POSIX. `remote.py`
sends it with the source of `code_runner.py`, and reads what it prints: a line when the code starts, and a line with
the report. Until the first line, whatever goes wrong is the sandbox's fault; after it, the code's.

Three processes, so that who kills the first one (a sandbox that gives up, by process group) ends the others: the first
only waits and cleans up; the second, in a group of its own, watches the code and sees by a pipe that the first is gone;
the third, in a session of its own, becomes the code. Code that stops the second gains nothing: it continues when
the first dies, since the kernel continues (and hangs up on) a group whose last parent in the session is gone.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import resource
import selectors
import signal
import sys
import time
import types
import zlib
from types import ModuleType
from typing import Any

KEPT_VARIABLES = (
    "PATH",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "LD_LIBRARY_PATH",
    "TZ",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
)
POLL_S = 0.05  # how soon an end that closed no pipe is seen
DRAIN_S = 0.5  # a process that left the group may hold the pipes open for ever
CHUNK_BYTES = 65536
FIRST_OWN_FD = 3


def run(job: dict[str, Any], sources: dict[str, str]) -> None:
    """Run `job["code"]`; returns only in the process that ran it, which then ends as any interpreter does."""
    scratch = os.environ.get("TMPDIR", "/tmp") + "/code-" + job["token"]  # noqa: S108 - the token can't be foreseen
    os.mkdir(scratch, 0o700)  # noqa: PTH102 - pathlib is slow to import
    lifeline = step_behind(scratch)
    go, stdout, stderr = os.pipe(), os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        become_the_code(go, stdout[1], stderr[1], scratch, job)
        runner = load("code_runner", sources["code_runner"])
        runner.run_code(job["code"], runner.prepare_interpreter().__dict__)
        return
    try:
        for descriptor in (go[0], stdout[1], stderr[1]):
            os.close(descriptor)
        say(job["token"] + " start")  # before the code can do anything: it can't take this back
        os.write(go[1], b"1")
        watch = CodeWatch(child, (stdout[0], stderr[0], lifeline), job, load("code_runner", sources["code_runner"]))
        say(job["token"] + " report " + watch.report())
    finally:
        remove(scratch)
        os._exit(0)


def step_behind(scratch: str) -> int:
    """Go on in a fork whose parent waits and cleans up; return a descriptor that ends when that parent dies."""
    lifeline, parents_end = os.pipe()
    pid = os.fork()
    if pid:
        os.close(lifeline)
        os.waitpid(pid, 0)
        remove(scratch)
        os._exit(0)
    os.close(parents_end)
    os.setpgid(0, 0)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return lifeline


def remove(folder: str) -> None:
    """Remove the scratch directory, if it is still there and as far as that is possible."""
    try:
        os.rmdir(folder)  # noqa: PTH106 - most code leaves nothing there, and shutil is slow to import
    except OSError:
        import shutil

        shutil.rmtree(folder, ignore_errors=True)


def say(line: str) -> None:
    """Print one line, whatever the sandbox printed before it."""
    sys.stdout.write("\n" + line + "\n")
    sys.stdout.flush()


def load(name: str, source: str) -> ModuleType:
    """Make a module of its source."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(source, "<" + name + ">", "exec"), module.__dict__)  # noqa: S102 - this package's own source
    return module


def become_the_code(go: tuple[int, int], stdout: int, stderr: int, scratch: str, job: dict[str, Any]) -> None:
    """Wait for the word, then have nothing but the code's three streams, a scratch directory and few variables."""
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.close(go[1])
    if not os.read(go[0], 1):
        os._exit(1)
    for target, source in enumerate((os.open(os.devnull, os.O_RDONLY), stdout, stderr)):
        os.dup2(source, target)
    os.closerange(FIRST_OWN_FD, min(65536, os.sysconf("SC_OPEN_MAX")))
    os.chdir(scratch)
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    os.environ.clear()
    os.environ.update(kept, HOME=scratch, TMPDIR=scratch)
    sys.path[:] = [entry for entry in sys.path if entry and entry != os.path.dirname(sys.argv[0])]  # noqa: PTH120
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    for kind, limit_mb in ((resource.RLIMIT_AS, job["memory_mb"]), (resource.RLIMIT_FSIZE, job["file_mb"])):
        if limit_mb is not None:
            limit_bytes = limit_mb * 1024 * 1024
            with contextlib.suppress(ValueError, OSError):  # one that the platform does not know is left out
                resource.setrlimit(kind, (limit_bytes, limit_bytes))


class CodeWatch:
    """Follows the code from its start to its end."""

    def __init__(self, child: int, descriptors: tuple[int, int, int], job: dict[str, Any], output: ModuleType) -> None:
        self.child = child
        self.stdout_fd, self.stderr_fd, self.lifeline = descriptors
        self.job = job
        self.shorten = output.shorten
        self.outputs = {fd: output.CappedOutput(job["max_output_chars"]) for fd in descriptors[:2]}
        self.started_at = time.monotonic()
        self.killed_by: str | None = None
        self.timed_out = False

    def report(self) -> str:
        """Follow the code, end what is left of its group, and return the encoded report."""
        selector = selectors.DefaultSelector()
        for descriptor in (self.stdout_fd, self.stderr_fd, self.lifeline):
            selector.register(descriptor, selectors.EVENT_READ)
        self.follow(selector)
        self.kill_group()
        ended_at = time.monotonic()
        give_up_at = ended_at + DRAIN_S
        while any(fd in selector.get_map() for fd in self.outputs) and time.monotonic() < give_up_at:
            self.take(selector, POLL_S)
        status = os.waitpid(self.child, 0)[1]
        return self.encoded(
            {
                "exit_code": -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status),
                "timed_out": self.timed_out,
                "killed_by": self.killed_by,
                "duration_s": ended_at - self.started_at,
            }
        )

    def follow(self, selector: selectors.BaseSelector) -> None:
        """Read until the code has ended or must end."""
        pause_s = 0.0005  # between the end of the pipes and that of the process there is normally less than this
        while not self.has_ended() and not self.must_end():
            if any(fd in selector.get_map() for fd in self.outputs):
                self.take(selector, POLL_S)
            else:
                time.sleep(pause_s)
                pause_s = min(POLL_S, 2 * pause_s)

    def take(self, selector: selectors.BaseSelector, wait_s: float) -> None:
        """Read what there is on any pipe."""
        left_s = self.started_at + self.job["timeout_s"] - time.monotonic()
        for key, _ in selector.select(max(0.0, min(wait_s, left_s)) if not self.killed_by else wait_s):
            chunk = os.read(key.fd, CHUNK_BYTES)
            if not chunk:
                selector.unregister(key.fd)
            if key.fd == self.lifeline:
                self.killed_by = "cancellation"
            else:
                self.outputs[key.fd].feed(chunk, final=not chunk)

    def has_ended(self) -> bool:
        """Whether the code's process has ended; it is not reaped, so that no other group can take its number."""
        return os.waitid(os.P_PID, self.child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def must_end(self) -> bool:
        """Whether a limit is reached, or the first process has been killed."""
        printed_mb = sum(output.total_bytes for output in self.outputs.values()) / (1024 * 1024)
        if printed_mb > self.job["max_output_mb"]:
            self.killed_by = "output limit of " + str(self.job["max_output_mb"]) + " MiB"
        elif time.monotonic() >= self.started_at + self.job["timeout_s"]:
            self.timed_out = True
            self.killed_by = f"time limit of {self.job['timeout_s']:g} s"
        return self.killed_by is not None

    def kill_group(self) -> None:
        """End whatever the code started and left in its group."""
        try:
            os.killpg(self.child, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return

    def encoded(self, report: dict[str, Any]) -> str:
        """The report on one line of ASCII, its streams shortened until it is as small as the sandbox can carry."""
        texts = [self.outputs[fd].text() for fd in (self.stdout_fd, self.stderr_fd)]
        report["truncated"] = any(output.truncated for output in self.outputs.values())
        limit_chars = self.job["max_output_chars"]
        while True:
            report["stdout"], report["stderr"] = (self.shorten(text, limit_chars) for text in texts)
            line = base64.b64encode(zlib.compress(json.dumps(report).encode())).decode()
            if len(line) <= self.job["max_report_bytes"] or limit_chars < 2:
                return line
            limit_chars //= 2
            report["truncated"] = True

"""The supervisor that is sent to a remote sandbox: it forks a child for the code, enforces limits, and reports once.

It runs without this package, on Python 3.8 or newer and POSIX, with the standard library only. `remote.py` sends it
with the source of `code_runner.py` and parses its output: a line when the code starts, and a line with the report. If
the first line is missing, the sandbox is at fault; if only the report is missing, the code is.

The supervisor and the code are three processes. At its timeout, a sandbox kills the process group of the parent; then
the watcher and the child end as well:

- The parent only waits and cleans up.
- The watcher, in a process group of its own, watches the code. The end of a pipe tells it that the parent has died.
- The child, in a session of its own, runs the code.

Code gains nothing by stopping the watcher. When the parent dies, the kernel sends SIGHUP and SIGCONT to the orphaned
process group, and the watcher continues.
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

INHERITED_VARIABLES = (
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
POLL_S = 0.05  # how often to check whether the code has ended without closing its pipes
DRAIN_TIMEOUT_S = 0.5  # a process that left the group may hold the pipes open forever
CHUNK_BYTES = 65536
FIRST_FREE_FD = 3


def run(job: dict[str, Any], sources: dict[str, str]) -> None:
    """Run `job["code"]` in a child under its limits, and print the lines that `remote.py` parses.

    Returns only in the child, which then exits like any interpreter; the parent and the watcher end in this function.
    """
    scratch = os.environ.get("TMPDIR", "/tmp") + "/code-" + job["token"]  # noqa: S108 - the token is random
    os.mkdir(scratch, 0o700)  # noqa: PTH102 - pathlib is slow to import
    lifeline = fork_watcher(scratch)
    go, stdout, stderr = os.pipe(), os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        set_up_child(go, stdout[1], stderr[1], scratch, job)
        runner = load_module("code_runner", sources["code_runner"])
        runner.run_code(job["code"], runner.prepare_interpreter().__dict__)
        return
    try:
        for descriptor in (go[0], stdout[1], stderr[1]):
            os.close(descriptor)
        print_line(job["token"] + " start")  # before the code runs, since the code could suppress this line
        os.write(go[1], b"1")
        watch = CodeWatch(
            child, (stdout[0], stderr[0], lifeline), job, load_module("code_runner", sources["code_runner"])
        )
        print_line(job["token"] + " report " + watch.report())
    finally:
        remove_scratch(scratch)
        os._exit(0)


def fork_watcher(scratch: str) -> int:
    """Fork the watcher, and return only in the watcher, which gets a process group of its own.

    The parent waits for the watcher, removes the scratch directory and exits.

    Returns:
        The reading end of a pipe; the pipe reaches its end of file when the parent dies.
    """
    lifeline, parents_end = os.pipe()
    pid = os.fork()
    if pid:
        os.close(lifeline)
        os.waitpid(pid, 0)
        remove_scratch(scratch)
        os._exit(0)
    os.close(parents_end)
    os.setpgid(0, 0)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return lifeline


def remove_scratch(folder: str) -> None:
    """Remove the scratch directory; errors are ignored."""
    try:
        os.rmdir(folder)  # noqa: PTH106 - most directories are empty, and shutil is slow to import
    except OSError:
        import shutil

        shutil.rmtree(folder, ignore_errors=True)


def print_line(line: str) -> None:
    """Print `line` as a line of its own, even if the sandbox printed an unfinished line before it."""
    sys.stdout.write("\n" + line + "\n")
    sys.stdout.flush()


def load_module(name: str, source: str) -> ModuleType:
    """Create a module from its source."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(source, "<" + name + ">", "exec"), module.__dict__)  # noqa: S102 - this package's own source
    return module


def set_up_child(go: tuple[int, int], stdout: int, stderr: int, scratch: str, job: dict[str, Any]) -> None:
    """Wait for a byte on the pipe `go`, then prepare this process for the code.

    If the pipe is closed without a byte, the process exits. Otherwise, it gets an empty stdin, the descriptors `stdout`
    and `stderr` for its output, and no other descriptors. The directory `scratch` becomes its working directory. Its
    environment has only HOME and TMPDIR, which name this directory, and the `INHERITED_VARIABLES`. Its memory and the
    size of its files are limited.
    """
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.close(go[1])
    if not os.read(go[0], 1):
        os._exit(1)
    for target, source in enumerate((os.open(os.devnull, os.O_RDONLY), stdout, stderr)):
        os.dup2(source, target)
    os.closerange(FIRST_FREE_FD, min(65536, os.sysconf("SC_OPEN_MAX")))
    os.chdir(scratch)
    inherited = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
    os.environ.clear()
    os.environ.update(inherited, HOME=scratch, TMPDIR=scratch)
    sys.path[:] = [entry for entry in sys.path if entry and entry != os.path.dirname(sys.argv[0])]  # noqa: PTH120
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    for kind, limit_mb in ((resource.RLIMIT_AS, job["memory_mb"]), (resource.RLIMIT_FSIZE, job["file_mb"])):
        if limit_mb is not None:
            limit_bytes = limit_mb * 1024 * 1024
            with contextlib.suppress(ValueError, OSError):  # the platform may not support this limit
                resource.setrlimit(kind, (limit_bytes, limit_bytes))


class CodeWatch:
    """Monitor that reads the output of running code, enforces the limits, and encodes the report."""

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
        """Follow the code to its end or to a limit, kill its process group, and return the encoded report."""
        selector = selectors.DefaultSelector()
        for descriptor in (self.stdout_fd, self.stderr_fd, self.lifeline):
            selector.register(descriptor, selectors.EVENT_READ)
        self.follow(selector)
        self.kill_group()
        ended_at = time.monotonic()
        give_up_at = ended_at + DRAIN_TIMEOUT_S
        while any(fd in selector.get_map() for fd in self.outputs) and time.monotonic() < give_up_at:
            self.read_output(selector, POLL_S)
        status = os.waitpid(self.child, 0)[1]
        return self.encode_report(
            {
                "exit_code": -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status),
                "timed_out": self.timed_out,
                "killed_by": self.killed_by,
                "duration_s": ended_at - self.started_at,
            }
        )

    def follow(self, selector: selectors.BaseSelector) -> None:
        """Read output until the code has ended, has reached a limit or is cancelled."""
        pause_s = 0.0005  # a process normally ends sooner than this after its pipes are closed
        while not self.has_ended() and not self.check_limits():
            if any(fd in selector.get_map() for fd in self.outputs):
                self.read_output(selector, POLL_S)
            else:
                time.sleep(pause_s)
                pause_s = min(POLL_S, 2 * pause_s)

    def read_output(self, selector: selectors.BaseSelector, wait_s: float) -> None:
        """Wait up to `wait_s` for output on any pipe, and read it; the end of the lifeline counts as cancellation."""
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
        """Return whether the code's process has ended. It is not reaped, so that its group id can't be reused."""
        return os.waitid(os.P_PID, self.child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def check_limits(self) -> bool:
        """Record in `killed_by` a limit that the code has reached; return whether the code must be killed."""
        printed_mb = sum(output.total_bytes for output in self.outputs.values()) / (1024 * 1024)
        if printed_mb > self.job["max_output_mb"]:
            self.killed_by = "output limit of " + str(self.job["max_output_mb"]) + " MiB"
        elif time.monotonic() >= self.started_at + self.job["timeout_s"]:
            self.timed_out = True
            self.killed_by = f"time limit of {self.job['timeout_s']:g} s"
        return self.killed_by is not None

    def kill_group(self) -> None:
        """Kill the code and all processes in its group."""
        try:
            os.killpg(self.child, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return

    def encode_report(self, report: dict[str, Any]) -> str:
        """Return the report as a line of ASCII; streams are shortened until the line fits into `max_report_bytes`."""
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

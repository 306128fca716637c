"""Tries the layers in a real child before any is promised."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from typing import Final

from strands_rollout.sandbox.inside import scratch
from strands_rollout.sandbox.inside.child import FAILED, READY, STARTED, become_child
from strands_rollout.sandbox.inside.confinement import Confinement, LayerError
from strands_rollout.sandbox.inside.frames import frame

_LIMIT_S: Final = 30.0
_PROBE: Final = """
import json, os, resource, socket
broken = {}
def must_fail(layer, what, attempt):
    try:
        attempt()
    except (OSError, ValueError):
        return
    broken[layer] = what
if "files" in enforced:
    must_fail("files", "a file outside could be read", lambda: open("/etc/passwd").close())
    must_fail("files", "a directory outside could be listed", lambda: os.listdir("/etc"))
    must_fail("files", "a file outside could be written", lambda: open("/tmp/strands-rollout-probe", "w").close())
if "syscalls" in enforced:
    must_fail("syscalls", "a socket could be made", lambda: socket.socket())
    must_fail("syscalls", "a limit could be set", lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)))
    must_fail("syscalls", "a directory's mode could be changed", lambda: os.chmod(".", 0o777))
if "user" in enforced and 0 in (os.getuid(), os.geteuid(), os.getgid(), os.getegid()):
    broken["user"] = "the code still runs as root"
if "limits" in enforced and resource.getrlimit(resource.RLIMIT_AS)[1] == resource.RLIM_INFINITY:
    broken["limits"] = "memory is not limited"
try:
    for path in readable:
        open(path, "rb").close()
except OSError as e:
    broken["reading"] = f"the code's user can't read Python's own files ({e.filename}: {e.strerror})"
with open("probe", "w") as file:
    file.write(json.dumps(broken))
print(json.dumps(broken), flush=True)
"""


def find_broken_layer(confinement: Confinement, folder: str) -> tuple[str, str] | None:
    """Run a probe under all layers; the first layer that does not hold, or "reading", and why; or None.

    Args:
        confinement: What to try.
        folder: A directory to be made for it, and deleted.

    Raises:
        RuntimeError: The probe failed for a reason that is no layer's.
    """
    try:
        place = confinement.make_place(folder, 0)
    except LayerError as e:
        return e.layer, str(e)
    ours, theirs = socket.socketpair()
    with tempfile.TemporaryFile() as output, ours, theirs:
        child = os.fork()
        if child == 0:
            become_child(confinement, place, (output.fileno(), output.fileno(), theirs.fileno()))
        theirs.close()
        ours.settimeout(_LIMIT_S)
        try:
            return _verdict(confinement, ours, child, output.fileno()) or _broken_cleaning(folder)
        finally:
            if place.ruleset is not None:
                place.ruleset.close()
            scratch.delete(folder)


def _broken_cleaning(folder: str) -> tuple[str, str] | None:
    try:
        scratch.empty(folder)
    except PermissionError:
        return "user", "root may not delete other users' files here (no CAP_DAC_OVERRIDE)"
    return None


def _verdict(confinement: Confinement, control: socket.socket, child: int, output: int) -> tuple[str, str] | None:
    greeting = control.recv(65536)
    may_signal = True
    if greeting == READY:
        try:
            os.kill(child, 0)
        except PermissionError:
            may_signal = False
        control.sendall(frame({"code": _program(confinement), "session": False}))
        if control.recv(1) != STARTED:
            greeting = b""
    exit_code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if greeting.startswith(FAILED):
        failure = json.loads(greeting[len(FAILED) :])
        if failure["layer"] is not None:
            return failure["layer"], failure["reason"]
        raise RuntimeError(f"the self-test of the sandbox failed: {failure['reason']}")
    printed = os.pread(output, 65536, 0).decode(errors="replace")
    if exit_code != 0:
        raise RuntimeError(f"the self-test of the sandbox ended with {exit_code}: {printed[-2000:]}")
    broken: dict[str, str] = json.loads(printed.splitlines()[-1])
    if not may_signal:
        broken["user"] = "root may not signal other users' processes here (no CAP_KILL)"
    return next(iter(broken.items()), None)


def _program(confinement: Confinement) -> str:
    """The probe, with what it can't find out itself."""
    readable = [] if confinement.changes_root else confinement.sample_files()
    return f"enforced = {list(confinement.enforced)!r}\nreadable = {readable!r}\n{_PROBE}"

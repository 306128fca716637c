"""The template: a process that has imported everything, and does nothing but fork children and reap them.

It never sees code or output, so that no child inherits another run's. Its one command socket comes from the supervisor,
which sends JSON messages, one per packet:

- `{"do": "fork", "place": 3}` with three descriptors: stdout, stderr, control
- `{"do": "signal", "place": 3, "signal": 9}`

and receives `{"is": "up", ...}` once, `{"is": "forked", "place": 3, "pid": 4711, "user": null}`, `{"is": "ended",
"place": 3, "exit_code": -9}`, and `{"is": "failed", "place": 3, "reason": ...}`. It ends when the supervisor does.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from strands_rollout.sandbox.inside.child import become_child
from strands_rollout.sandbox.inside.child_limits import ChildLimits
from strands_rollout.sandbox.inside.confinement import Confinement, LayerError, Place
from strands_rollout.sandbox.inside.importing import allow_imports
from strands_rollout.sandbox.inside.libc import prctl
from strands_rollout.sandbox.inside.preloading import preload, preload_everything
from strands_rollout.sandbox.inside.self_test import find_broken_layer

_MAX_MESSAGE: Final = 65536
_POLL_S: Final = 1.0
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36


class Template:
    """Forks children into places, and tells what became of them.

    Args:
        commands: The socket to the supervisor.
        confinement: What each child puts on.
        root: The directory of the places.
    """

    def __init__(self, commands: socket.socket, confinement: Confinement, root: str) -> None:
        self._commands = commands
        self._confinement = confinement
        self._root = root
        self._places: dict[int, Place] = {}
        self._children: dict[int, int] = {}  # process -> place
        self._supervisor = os.getppid()

    def serve(self, facts: Mapping[str, Any]) -> None:
        """Fork and reap until the supervisor is gone."""
        wakeup, wake = os.pipe()
        for end in (wakeup, wake):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._send(facts)
        while os.getppid() == self._supervisor:
            ready, _, _ = select.select([self._commands.fileno(), wakeup], [], [], _POLL_S)
            if wakeup in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wakeup, 4096)
                self._reap()
            if self._commands.fileno() in ready and not self._obey():
                break
        for process in self._children:
            _kill(process)

    def _obey(self) -> bool:
        """Carry out one command; False once there will be none."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self._commands, _MAX_MESSAGE, 3)
        except ConnectionError:
            return False
        if not message:
            return False
        try:
            command = json.loads(message)
            if command["do"] == "fork":
                self._fork(command["place"], descriptors)
            else:
                self._signal(command["place"], command["signal"])
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _fork(self, index: int, descriptors: list[int]) -> None:
        try:
            if index not in self._places:
                self._places[index] = self._confinement.make_place(os.path.join(self._root, str(index)), index)  # noqa: PTH118
            process = os.fork()
        except (OSError, LayerError) as e:
            self._send({"is": "failed", "place": index, "reason": f"{type(e).__name__}: {e}"})
            return
        if process == 0:
            become_child(self._confinement, self._places[index], (descriptors[0], descriptors[1], descriptors[2]))
        self._children[process] = index
        self._send({"is": "forked", "place": index, "pid": process, "user": self._places[index].user})

    def _signal(self, index: int, number: int) -> None:
        for process, place in self._children.items():
            if place == index:  # not reaped yet, so its number is still its own
                with contextlib.suppress(OSError):
                    os.kill(process, number)

    def _reap(self) -> None:
        """Report whoever has ended, and end whatever they left behind."""
        while (ended := _ended_child()) is not None:
            process, exit_code = ended
            index = self._children.pop(process, None)
            if index is not None:
                self._kill_orphans()
                self._send({"is": "ended", "place": index, "exit_code": exit_code})

    def _kill_orphans(self) -> None:
        """Kill adopted processes: whoever left its group and lost its parent comes here (PR_SET_CHILD_SUBREAPER)."""
        with contextlib.suppress(OSError):
            listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            for process in set(map(int, listed)) - self._children.keys():
                with contextlib.suppress(OSError):
                    os.kill(process, signal.SIGKILL)

    def _send(self, message: Mapping[str, Any]) -> None:
        self._commands.send(json.dumps(message).encode())


def _ended_child() -> tuple[int, int] | None:
    """Reap a child that has ended: its process and exit code."""
    found = None
    try:
        if hasattr(os, "waitid"):  # not on macOS before Python 3.13
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None:
                return None
            _kill(found.si_pid)  # its whole group, while its number can't be another's
        process, status = os.waitpid(found.si_pid if found is not None else -1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (process, os.waitstatus_to_exitcode(status)) if process else None


def _kill(process: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(process, signal.SIGKILL)


def main() -> None:
    """Run as a process: arguments are the number of the command socket and the settings in JSON."""
    started = time.monotonic()
    commands = socket.socket(fileno=int(sys.argv[1]))
    settings = json.loads(sys.argv[2])
    if sys.platform == "linux":
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        prctl(_PR_SET_CHILD_SUBREAPER, 1)
    while os.open(os.devnull, os.O_RDONLY) <= 3:
        pass
    confinement = Confinement(settings["libraries"], ChildLimits(**settings["limits"]), settings["disabled"])
    confinement.open_folders()
    allow_imports(confinement.library_folders())
    _forget_package()
    preload(settings["preload"])
    _settle(confinement, settings)
    gc.disable()
    gc.collect()
    gc.freeze()
    facts = {
        "is": "up",
        "enforced": confinement.enforced,
        "missing": confinement.missing,
        "start_s": time.monotonic() - started,
    }
    Template(commands, confinement, settings["root"]).serve(facts)


def _forget_package() -> None:
    """Code can import what is in `sys.modules`, whatever the kernel confines: this package is not for it."""
    for name in [name for name in sys.modules if name.partition(".")[0] == __package__.partition(".")[0]]:
        del sys.modules[name]


def _settle(confinement: Confinement, settings: Mapping[str, Any]) -> None:
    """Try the layers in a real child, and do without those that don't hold."""
    for attempt in range(8):
        if confinement.changes_root:
            preload_everything(settings["preload"])
        broken = find_broken_layer(confinement, os.path.join(settings["root"], f"self-test-{attempt}"))  # noqa: PTH118
        if broken is None:
            return
        layer, reason = broken
        if layer != "reading":
            confinement.give_up(layer, reason)
        elif not confinement.may_read_as_root():
            confinement.give_up("user", reason)
    raise RuntimeError("the self-test of the sandbox never passed")

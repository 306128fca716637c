"""The processes of one running sandbox, with the directory in which they work, and what they enforce."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final, Literal

from strands_rollout.sandbox.scratch_root import ScratchRoot
from strands_rollout.sandbox.supervisor_link import SupervisorLink

Isolation = Literal["full", "seccomp", "rlimits"]

LAYERS: Final[dict[Isolation, tuple[str, ...]]] = {  # what each mode asks for, strongest first
    "full": ("limits", "user", "files", "syscalls"),
    "seccomp": ("limits", "syscalls"),
    "rlimits": ("limits",),
}


@dataclass(frozen=True, slots=True)
class SandboxReport:
    """What a started sandbox enforces.

    Attributes:
        enforced: Layer ("limits", "user", "files", "syscalls") -> how, in words.
        missing: Layer -> why it is not there, in words.
        isolation: The strongest mode that this is enough for.
        start_s: Seconds that it took to start.
    """

    enforced: dict[str, str]
    missing: dict[str, str]
    isolation: Isolation
    start_s: float


class SandboxProcesses:
    """A supervisor process with the directory in which it works, of the process that started it."""

    def __init__(self, settings: dict[str, Any], scratch_dir: str | None) -> None:
        self.pid = os.getpid()
        self._closed = False
        self._root = ScratchRoot(scratch_dir)
        settings["root"] = settings["template"]["root"] = self._root.path
        try:
            self.link = SupervisorLink(settings)
        except BaseException:
            self._root.delete()
            raise
        facts = self.link.facts
        self.report = SandboxReport(facts["enforced"], facts["missing"], _strongest(facts["missing"]), facts["start_s"])

    @property
    def is_ours(self) -> bool:
        """Whether it can be used: it runs, and this process is not a fork of the one that started it."""
        return self.pid == os.getpid() and not self.link.is_gone

    def close(self) -> None:
        """End it and delete its files, unless another process started it. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self.pid != os.getpid():
            self.link.forget()
            return
        self.link.close()
        self._root.delete()


def _strongest(missing: Collection[str]) -> Isolation:
    return next(mode for mode, layers in LAYERS.items() if mode == "rlimits" or not set(layers) & set(missing))

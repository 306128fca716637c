"""What lives in the kernel, outlives its process, and is common to all processes: System V IPC, queues, keys."""

import ctypes
import os
import secrets
from pathlib import Path

from attack_targets import Stage, Target

_LIBC = ctypes.CDLL(None, use_errno=True)
_REMOVE = 0


class IpcObject(Target):
    """A System V object ("shm", "msg" or "sem") that may not come to be; its key is agreed on."""

    def __init__(self, stage: Stage, kind: str) -> None:
        super().__init__(stage)
        self._kind = kind
        self.facts |= {"key": secrets.randbelow(2**31 - 2) + 1}

    def _number(self) -> int | None:
        lines = Path("/proc/sysvipc", self._kind).read_text().splitlines()[1:]
        return next((int(line.split()[1]) for line in lines if int(line.split()[0]) == self.facts["key"]), None)

    def seen(self) -> bool:
        return self._number() is not None

    def close(self) -> None:
        number = self._number()
        if number is None:
            return
        remove = {"shm": _LIBC.shmctl, "msg": _LIBC.msgctl}.get(self._kind)
        if remove is not None:
            remove(number, _REMOVE, None)
        else:
            _LIBC.semctl(number, 0, _REMOVE, 0)


class Segment(Target):
    """Shared memory of somebody else, which all may read and write."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        _LIBC.shmat.restype = ctypes.c_void_p
        key = secrets.randbelow(2**31 - 2) + 1
        self._number = _LIBC.shmget(key, 4096, 0o1666)  # 0o1000 is IPC_CREAT
        self._address = _LIBC.shmat(self._number, None, 0)
        ctypes.memmove(self._address, self.secret.encode(), len(self.secret))
        self.facts |= {"key": key, "length": len(self.secret)}

    def seen(self) -> bool:
        return ctypes.string_at(self._address, len(self.secret)) != self.secret.encode()

    def close(self) -> None:
        _LIBC.shmdt(ctypes.c_void_p(self._address))
        _LIBC.shmctl(self._number, _REMOVE, None)


class Queue(Target):
    """A POSIX message queue that may not come to be."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self.facts |= {"queue": f"/{self.name}"}
        self._path = f"/{self.name}".encode()

    def seen(self) -> bool:
        handle = _LIBC.mq_open(self._path, os.O_RDONLY)
        if handle >= 0:
            os.close(handle)
        return bool(handle >= 0)

    def close(self) -> None:
        _LIBC.mq_unlink(self._path)


class Keys(Target):
    """The kernel's keyrings: no key of the attack's name may come to be, and none of a user who had none."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self._before = self._users()

    def _users(self) -> set[str]:
        return {line.partition(":")[0] for line in Path("/proc/key-users").read_text().splitlines()}

    def seen(self) -> bool:
        return self.name in Path("/proc/keys").read_text() or bool(self._users() - self._before)


class KernelLog(Target):
    """What the kernel printed at boot; some line of it is the proof."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        log = ctypes.create_string_buffer(4096)
        length = _LIBC.klogctl(3, log, 4096)
        lines = log.raw[: max(0, length)].decode("utf-8", "replace").splitlines()
        self.secret = lines[-1] if lines else self.secret

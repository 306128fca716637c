"""Checks of the machine: Python and its packages, GPUs, disks, limits, proxies, Ray, wandb and the code sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import netrc
import os
import platform
import re
import resource
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import httpx

from strands_rollout.client.transport import redacted
from strands_rollout.code_tool.local.executor import LocalExecutor
from strands_rollout.code_tool.local.supervisor_link import LAYERS, Isolation, SandboxReport
from strands_rollout.diagnostics import diagnosis
from strands_rollout.diagnostics.diagnosis import Finding, Question, error, good, lacking, skipped, warning
from strands_rollout.errors import ConfigError, RolloutError

if TYPE_CHECKING:
    from packaging.requirements import Requirement

OURS: Final = "strands-rollout"
_NOT_FOR_A_RUN: Final = frozenset({"dev", "bench"})  # extras of those who work on this package
_GB: Final = 1e9
_SHM: Final = Path("/dev/shm")  # noqa: S108 - NCCL's and Ray's own place
_FILES: Final = 4096
_RAY_FILES: Final = 65_535
_MEMORY_GB: Final = 32.0
_PROXIES: Final = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
_TRAINING_GPUS: Final = 8
_SMI: Final = ("nvidia-smi", "--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader,nounits")
_SMI_COLUMNS: Final = 4
_SMI_S: Final = 10.0
_RAY_S: Final = 3.0
_RAY_DASHBOARD_PORT: Final = "8265"
_UNSET_RAY: Final = "unset RAY_ADDRESS to have a Ray started here; or, there: ray start --head --dashboard-host=0.0.0.0"
_WANDB_KEYS: Final = ("WANDB_API_KEY", "WANDB_KEY")  # the scripts take the first that is set
_SHORTEST_KEY: Final = 40  # wandb itself refuses a shorter one
_WANDB_MODES: Final = ("online", "offline", "disabled", "shared", "dryrun", "run", "")
_SANDBOX_CALLS: Final = 20
MEANING: Final = {
    "limits": "memory, disk, files, threads, time",
    "user": "another user than root",
    "files": "no file but its own",
    "syscalls": "no network, process or device",
}
_LAYER_REMEDIES: Final = {
    "limits": "run on Linux or macOS, where a process can be limited",
    "user": "run as an ordinary user, or let the container change users (docker run --cap-add SETUID --cap-add SETGID)",
    "files": "use a kernel with Landlock (Linux 5.13 or newer), or run as root",
    "syscalls": "use Linux with seccomp on x86-64 or aarch64",
}


def check_python(version: str | None = None, path: Sequence[str] | None = None) -> list[Finding]:
    """Whether Python is new enough: this process's, and by the metadata in `sys.path`, where None."""
    from packaging.specifiers import SpecifierSet

    version = version or platform.python_version()
    ours = _distribution(OURS, path)
    wanted = _field(ours, "Requires-Python") if ours else None
    if wanted and not SpecifierSet(wanted).contains(version, prereleases=True):
        remedy = f"make an environment with a Python {wanted} and install this package there"
        return [error("python", f"Python {version} at {sys.executable}; expected {wanted}", remedy)]
    uname = platform.uname()
    machine = f"{uname.system} {uname.release}, {uname.machine}"
    return [good("python", f"Python {version} at {sys.executable}, on {machine}", python=version, machine=machine)]


def check_packages(path: Sequence[str] | None = None) -> list[Finding]:
    """Whether what this package's metadata requires is there, in the versions that it takes; nothing is imported.

    Optional packages count where they are installed.
    """
    ours = _distribution(OURS, path)
    if ours is None:
        remedy = "install this package again: pip install -e /path/to/strands-rollout"
        return [error("packages", f"{OURS} is not installed: its requirements are not known", remedy)]
    faults: dict[str, Finding] = {}
    fine = {OURS: _field(ours, "Version")}
    extras = set(ours.metadata.get_all("Provides-Extra") or []) - _NOT_FOR_A_RUN
    for wanted, is_optional in _required(ours, sorted(extras), path):
        version = installed_version(wanted.name, path)
        fault = _package_fault(wanted, version, optional=is_optional)
        if fault is not None:
            faults.setdefault(fault.name, fault)
        elif version is not None:
            fine[wanted.name] = version
    shown = ", ".join(f"{name} {version}" for name, version in sorted(fine.items()))
    return [good("packages", f"as required: {shown}", versions=fine), *faults.values()]


def installed_version(name: str, path: Sequence[str] | None = None) -> str | None:
    """The version of a distribution, "" where its metadata has none; None where it is not installed."""
    found = _distribution(name, path)
    return None if found is None else _field(found, "Version")


def _field(distribution: metadata.Distribution, name: str) -> str:
    return next(iter(distribution.metadata.get_all(name) or []), "")


def _distribution(name: str, path: Sequence[str] | None) -> metadata.Distribution | None:
    return next(iter(metadata.distributions(name=name, path=list(sys.path if path is None else path))), None)


def _required(
    distribution: metadata.Distribution, extras: Iterable[str], path: Sequence[str] | None
) -> Iterator[tuple[Requirement, bool]]:
    """What a distribution requires with these extras, and whether one of them asks for it.

    Also what the extras of a requirement require in turn, such as the one ANTLR that math-verify's grammar works with.
    """
    from packaging.requirements import Requirement

    for wanted in map(Requirement, distribution.requires or []):
        asking = [extra for extra in ("", *extras) if wanted.marker is None or wanted.marker.evaluate({"extra": extra})]
        if not asking:
            continue
        yield wanted, bool(asking[0])
        found = _distribution(wanted.name, path) if wanted.extras else None
        for inner, of_extra in _required(found, wanted.extras, path) if found else ():
            if of_extra:
                yield inner, bool(asking[0])


def _package_fault(wanted: Requirement, version: str | None, *, optional: bool) -> Finding | None:
    """What is wrong with a package; an optional one that is too old fails only those who use it."""
    from packaging.version import InvalidVersion, Version

    name, remedy = f"package {wanted.name}", f"pip install '{wanted.name}{wanted.specifier}'"
    expected = f"expected {wanted.specifier or 'any'}"
    if version is None:
        return None if optional else error(name, f"not installed; {expected}", remedy)
    found = f"{wanted.name} {version or 'without a version'}; {expected}"
    try:
        number = Version(version)
    except InvalidVersion:
        return error(name, f"{found}: its metadata can't be read", f"pip install --force-reinstall '{wanted.name}'")
    if wanted.specifier.contains(number, prereleases=True):
        return None
    operators = (">=", "~=", "==", ">")
    bounds = [Version(part.version.removesuffix(".*")) for part in wanted.specifier if part.operator in operators]
    too_old = any(number < bound for bound in bounds)
    make = error if too_old and not optional else warning
    return make(name, f"{found}: {'too old' if too_old else 'newer than what was tested'}", remedy)


@dataclass(frozen=True, slots=True)
class Place:
    """A folder that a run writes to; it need not exist yet."""

    what: str
    path: Path
    enough_gb: float  # with less free, a run may fill it: a warning
    least_gb: float  # with less, it will not get far: an error
    variable: str  # that names another one


def places_of(question: Question) -> list[Place]:
    """Where runs write by default, and how much they need there.

    Sizes are of Qwen3-8B: 8.2e9 parameters are 16.4 GB in bf16, as downloaded and again as converted for Megatron; a
    save with the optimizer's state (bf16 weights, fp32 weights, two fp32 moments) holds 14 bytes a parameter, 115 GB.
    """
    checkpoints = question.named("SAVE_DIR") or question.repository / "checkpoints"
    ready = question.model.is_dir() and question.converted_model.is_dir()
    temporary = question.named("TMPDIR") or Path(tempfile.gettempdir())
    return [
        # two saves of 115 GB, the newer one beside the one that it replaces
        Place("checkpoints", checkpoints, 250, 5, "SAVE_DIR"),
        Place("models", question.model_dir, 0 if ready else 40, 0 if ready else 2, "MODEL_DIR"),
        Place("data", question.data_dir, 1, 0.1, "DATA_DIR"),
        # Ray's logs and what it spills of its objects
        Place("temporary files", temporary, 20, 1, "TMPDIR"),
    ]


def check_disk(places: Sequence[Place]) -> list[Finding]:
    """Whether each place has room; one line for all that have, and one for each that has not."""
    findings = [(place, _check_place(place)) for place in places]
    fine = "; ".join(f"{place.what}: {finding.found}" for place, finding in findings if finding.status == "ok")
    faults = [finding for _, finding in findings if finding.status != "ok"]
    return [good("disk", fine), *faults] if fine else faults


def _check_place(place: Place) -> Finding:
    name, remedy = f"disk: {place.what}", f"free some, or set {place.variable} to a larger disk"
    existing = next(folder for folder in (place.path.absolute(), *place.path.absolute().parents) if folder.exists())
    if not existing.is_dir():
        return error(name, f"{existing} is a file, {place.path} can't be made", remedy)
    if os.statvfs(existing).f_flag & os.ST_RDONLY or not os.access(existing, os.W_OK):
        return error(name, f"{existing} can't be written to", remedy)
    free_gb = shutil.disk_usage(existing).free / _GB
    found = f"{free_gb:.0f} GB free at {place.path}"
    if free_gb < place.least_gb:
        return error(name, f"{found}; expected {place.least_gb:g} GB at the very least", remedy)
    if free_gb < place.enough_gb:
        return warning(name, f"{found}; {diagnosis.MODEL_NAME} needs up to {place.enough_gb:g} GB there", remedy)
    return good(name, found)


def check_shared_memory(path: Path = _SHM, enough_gb: float = 8.0) -> list[Finding]:
    """Whether shared memory is large enough for NCCL and Ray; Docker's default is 64 MB."""
    if not path.is_dir():
        return [good("shared memory", f"no {path} on this system")]
    size_gb = shutil.disk_usage(path).total / _GB
    found = f"{size_gb:.1f} GB at {path}"
    if size_gb >= enough_gb:
        return [good("shared memory", found)]
    remedy = "start the container with --shm-size=64g, or with --ipc=host"
    return [warning("shared memory", f"{found}; NCCL and Ray want {enough_gb:g} GB", remedy)]


def check_memory(total_gb: float | None = None) -> list[Finding]:
    """Whether there is memory for a model's weights: this machine's, or what its container may use, where None."""
    if total_gb is None:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
        total_gb = total / _GB
    if total_gb >= _MEMORY_GB:
        return [good("memory", f"{total_gb:.0f} GB")]
    found = f"{total_gb:.0f} GB; to convert Qwen3-8B its weights, 16 GB, are read into memory"
    return [warning("memory", found, f"use a machine, or give the container, {_MEMORY_GB:g} GB or more for that")]


def check_open_files(soft_limit: int | None = None) -> list[Finding]:
    """Whether hundreds of episodes can have their sockets and pipes, with this process's limit where None."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if soft_limit is None else soft_limit
    if limit == resource.RLIM_INFINITY:
        return [good("open files", "no limit")]
    if limit < _FILES:
        found = f"ulimit -n is {limit}; hundreds of episodes at once need {_FILES} open files, Ray wants {_RAY_FILES}"
        return [warning("open files", found, f"ulimit -n {_RAY_FILES} before the run")]
    return [good("open files", f"ulimit -n is {limit}" + (f"; Ray wants {_RAY_FILES}" if limit < _RAY_FILES else ""))]


def check_proxies(env: Mapping[str, str]) -> list[Finding]:
    """Whether a proxy stands between engines and router.

    This package reaches engines directly whatever is set, and so do slime's own rollouts; but slime's engines register
    with `requests` (slime/backends/sglang_utils/sglang_engine.py), which uses a proxy for all hosts not in no_proxy.
    """
    used = ", ".join(name for name in _PROXIES if env.get(name))
    if not used:
        return [good("proxies", "none is set")]
    excepted = {name.strip() for key in ("no_proxy", "NO_PROXY") for name in env.get(key, "").split(",")}
    # the address at which slime's router is reached on this machine, as slime finds it (slime/utils/http_utils.py)
    hosts = ["127.0.0.1", env["SLIME_HOST_IP"]] if env.get("SLIME_HOST_IP") else ["127.0.0.1"]
    if len(hosts) == 1:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # sends nothing: the kernel picks the address that it would send from
            address = str(probe.getsockname()[0])
            hosts += [] if address.startswith("127.") else [address]
    proxied = [host for host in hosts if host not in excepted]
    if "*" in excepted or not proxied:
        return [good("proxies", f"{used} set, and no_proxy has {', '.join(hosts)}")]
    asks = "slime's engines would ask the proxy for their router"
    found = f"{used} set without no_proxy for {', '.join(proxied)}: {asks}"
    return [warning("proxies", found, f"export no_proxy=localhost,{','.join(hosts)}; export NO_PROXY=$no_proxy")]


def check_gpus(question: Question, limit_s: float = _SMI_S) -> list[Finding]:
    """How many GPUs nvidia-smi finds, of which memory; fewer than are wanted is an error."""
    try:
        wanted = _wanted_gpus(question)
    except ValueError:
        found = f"NUM_GPUS is {question.env['NUM_GPUS']!r}; expected a whole number"
        return [error("gpus", found, "export NUM_GPUS=8, or unset it")]
    answer = diagnosis.run_program(*_SMI, env=question.env, limit_s=limit_s)
    lines = answer.stdout.splitlines() if answer is not None and answer.exit_code == 0 else []
    gpus = [row for row in ([cell.strip() for cell in line.split(",")] for line in lines) if len(row) == _SMI_COLUMNS]
    asked = f"{wanted} were asked for"
    if not gpus:
        if answer is None:
            why_not = "no nvidia-smi on the PATH"
        elif answer.exit_code is None:
            why_not = f"nvidia-smi did not answer within {limit_s:g} s: the driver hangs"
        else:
            why_not = f"nvidia-smi {'failed' if answer.exit_code else 'lists no GPU'}: {answer.words}"
        needed = "training needs 8, an evaluation against a server elsewhere none"
        remedy = "for training, use a machine with GPUs whose nvidia-smi works; a container: docker run --gpus all"
        found = f"no GPU here: {why_not}{f'; {asked}' if wanted else ''}; {needed}"
        return [lacking("gpus", found, remedy, training=bool(wanted))]
    count, hidden = _visible(len(gpus), question.env.get("CUDA_VISIBLE_DEVICES"))
    sizes = {(name, f"{int(mib) / 1024:.0f} GiB" if mib.isdecimal() else f"memory {mib}") for _, name, mib, _ in gpus}
    kinds = ", ".join(sorted(f"{name} with {memory}" for name, memory in sizes))
    found = f"{count} GPUs{hidden}: {kinds}; driver {gpus[0][3]}"
    if wanted is not None and count < wanted:
        remedy = f"use a machine with {wanted}; or NUM_GPUS={count}, as --gpus {count}"
        return [error("gpus", f"{found}; {asked}", remedy)]
    return [good("gpus", found)]


def _wanted_gpus(question: Question) -> int | None:
    if question.gpus is not None:
        return question.gpus
    if question.env.get("RAY_ADDRESS"):
        return None  # the training is on a cluster elsewhere
    if question.env.get("NUM_GPUS"):
        return int(question.env["NUM_GPUS"])
    return _TRAINING_GPUS if question.training else None


def _visible(count: int, chosen: str | None) -> tuple[int, str]:
    """How many are left, and a note, where CUDA_VISIBLE_DEVICES hides some: all from the first that is not there."""
    if chosen is None:
        return count, ""
    left = 0
    for name in map(str.strip, chosen.split(",")):
        if not name or (name.lstrip("-").isdecimal() and not 0 <= int(name) < count):
            break
        left += 1  # a UUID is taken for one that is there
    return min(count, left), f" of {count} (CUDA_VISIBLE_DEVICES={chosen})"


def check_ray(
    env: Mapping[str, str], *, training: bool = False, installed: bool | None = None, limit_s: float = _RAY_S
) -> list[Finding]:
    """Whether a job could be given to Ray, and something listens where RAY_ADDRESS says that a cluster is.

    `installed` is None to look for the package; a cluster gets `limit_s` seconds to accept a connection.
    """
    command = shutil.which("ray", path=env.get("PATH", ""))
    if command is not None:
        findings = [good("ray", f"Ray {installed_version('ray') or ''} with {command}")]
    elif find_spec("ray") is not None if installed is None else installed:
        found = "installed, but no `ray` on the PATH, which starts it"
        findings = [lacking("ray", found, "activate its environment", training=training)]
    else:
        remedy = "work in the image slimerl/slime, or: pip install 'ray[default]'"
        findings = [lacking("ray", "not installed: slime's training runs on it", remedy, training=training)]
    address = env.get("RAY_ADDRESS", "")
    return findings if address in ("", "auto", "local") else [*findings, _check_cluster(address, env, limit_s)]


def _check_cluster(address: str, env: Mapping[str, str], limit_s: float) -> Finding:
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        host, port = parts.hostname, parts.port or int(env.get("RAY_DASHBOARD_PORT") or _RAY_DASHBOARD_PORT)
    except ValueError:
        host, port = None, 0
    if not host:
        expected = "expected http://HOST:8265, ray://HOST:10001, HOST:6379 or auto"
        return error("ray cluster", f"RAY_ADDRESS is {_without_secrets(address)!r}; {expected}", _UNSET_RAY)
    try:
        socket.create_connection((host, port), timeout=limit_s).close()
    except OSError as e:
        found = f"RAY_ADDRESS is {_without_secrets(address)}, but nothing listens at {host}:{port}: {e}"
        return error("ray cluster", found, _UNSET_RAY)
    return good("ray cluster", f"something listens at {host}:{port}, which RAY_ADDRESS names")


def _without_secrets(address: str) -> str:
    """The address, without user, password and query."""
    if not {"@", "?"} & set(address):
        return address
    try:
        url = redacted(httpx.URL(address if "://" in address else f"//{address}"))
    except httpx.InvalidURL:
        return "(not shown)"
    return url.removeprefix("://")


def check_wandb(env: Mapping[str, str], *, installed: bool | None = None) -> list[Finding]:
    """Whether wandb is on, and could log in; the key itself is never shown.

    `installed` is None to look for the package.
    """
    mode = env.get("WANDB_MODE", "")
    if mode not in _WANDB_MODES:
        return [error("wandb", f"WANDB_MODE is {mode!r}", "export WANDB_MODE=online, offline or disabled")]
    faults = [fault for name in _WANDB_KEYS if (fault := _fault_of_key(name, env.get(name, "")))]
    if faults:
        remedy = "copy the key again: export WANDB_API_KEY=..., without quotes or spaces in it"
        return [error("wandb", fault, remedy) for fault in faults]
    login, wanted = _wandb_login(env), env.get("USE_WANDB")
    if wanted == "1" and login is None:
        remedy = "export WANDB_API_KEY=..., or: wandb login; or, to upload later: export WANDB_MODE=offline"
        return [error("wandb", "USE_WANDB is 1, but there is no key and no login", remedy)]
    if login is None or wanted == "0" or mode == "disabled":
        off = "USE_WANDB=0" if wanted == "0" else f"WANDB_MODE={mode}" if mode == "disabled" else "no key and no login"
        return [good("wandb", f"off: {off}; runs are logged without it")]
    if not (find_spec("wandb") is not None if installed is None else installed):
        return [error("wandb", f"{login}, but wandb is not installed", "pip install 'strands-rollout[wandb]'")]
    first, older = _WANDB_KEYS
    if env.get(first) and env.get(older) and env[first] != env[older]:
        found = f"{first} and {older} are both set, and differ; {first} counts"
        return [warning("wandb", found, f"unset {older}, its older name")]
    return [good("wandb", login)]


def _wandb_login(env: Mapping[str, str]) -> str | None:
    """How wandb would log in; None if it would not."""
    if env.get("WANDB_MODE") in ("offline", "dryrun"):
        return f"WANDB_MODE={env['WANDB_MODE']}"
    named = next((name for name in _WANDB_KEYS if env.get(name)), None)
    if named is not None:
        return f"on: {named} is set"
    host = str(urlsplit(env.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname)
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        file = env.get("NETRC") or Path(env.get("HOME") or Path.home()) / ".netrc"
        if netrc.netrc(file).authenticators(host):
            return f"logged in to {host} by ~/.netrc"
    return None


def _fault_of_key(name: str, key: str) -> str | None:
    if key and not re.fullmatch(r"[\w.-]+", key):  # a dash after the name of an own server, dots in a token
        return f"{name} has characters in it that no key has, such as quotes, spaces or a line break"
    if key and len(key) < _SHORTEST_KEY:
        return f"{name} has {len(key)} characters; expected {_SHORTEST_KEY} or more"
    return None


def to_isolation(name: str) -> Isolation:
    """The mode of that name.

    Raises:
        ConfigError: There is none.
    """
    found: Isolation | None = next((isolation for isolation in LAYERS if isolation == name), None)
    if found is None:
        raise ConfigError(f"isolation is {name!r}; expected one of {', '.join(LAYERS)}")
    return found


def check_sandbox(isolation: Isolation) -> list[Finding]:
    """Whether model-written code can be run with this isolation; starts the sandbox with all that it can enforce."""
    try:
        report, call_ms = asyncio.run(_try_sandbox())
    except RolloutError as e:
        other = "free the temporary folder, or name another executor in the settings, such as sandbox_fusion"
        return [error("sandbox", f"the code sandbox does not start: {e}", other)]
    return judge_sandbox(report, isolation, call_ms)


async def _try_sandbox() -> tuple[SandboxReport, float]:
    """What is enforced, and the median milliseconds of an empty call."""
    async with LocalExecutor(isolation="rlimits") as executor:
        report = await executor.start()
        times_s = []
        for _ in range(_SANDBOX_CALLS):
            started = time.perf_counter()
            await executor.run("pass")
            times_s.append(time.perf_counter() - started)
    return report, statistics.median(times_s) * 1000


def judge_sandbox(report: SandboxReport, isolation: Isolation, call_ms: float) -> list[Finding]:
    """A line for the sandbox and one for each of its layers; `call_ms` is what a call that does nothing takes."""
    found = (
        f"the strongest isolation here is {report.isolation}, {isolation} was asked for; started in "
        f"{report.start_s:.1f} s, an empty call takes {call_ms:.1f} ms"
    )
    findings = [good("sandbox", found, sandbox=asdict(report), call_ms=call_ms, wanted=isolation)]
    for layer, meaning in MEANING.items():
        name, missing = f"sandbox {layer}", f"MISSING ({meaning}): {report.missing.get(layer)}"
        if layer in report.enforced:
            findings.append(good(name, f"{meaning}: {report.enforced[layer]}"))
        elif layer not in report.missing:
            findings.append(good(name, f"{meaning}: not needed, this is not root"))
        elif layer not in LAYERS[isolation]:
            findings.append(skipped(name, f"{missing}; isolation {isolation} does not ask for it"))
        else:
            weaker = next(mode for mode, layers in LAYERS.items() if layer not in layers or mode == "rlimits")
            accept = f"or accept less in the settings: executor: {{name: local, isolation: {weaker}}}"
            findings.append(error(name, missing, f"{_LAYER_REMEDIES[layer]}; {accept}"))
    return findings

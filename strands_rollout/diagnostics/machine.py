"""Checks of the machine: Python and its packages, GPUs, disks, limits, proxies, Ray, wandb and the code sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import math
import netrc
import os
import platform
import re
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from strands_rollout.code_tool.local.executor import LocalExecutor
from strands_rollout.code_tool.local.supervisor_link import LAYERS, Isolation, SandboxReport
from strands_rollout.diagnostics import diagnosis
from strands_rollout.diagnostics.diagnosis import Finding, Question, error, good, missing, skipped, warning
from strands_rollout.errors import RolloutError

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_OURS: Final = "strands-rollout"
_NOT_FOR_A_RUN: Final = frozenset({"dev", "docs", "bench"})  # extras of those who work on this package
_GB: Final = 1e9
_SHM: Final = Path("/dev/shm")  # noqa: S108 - NCCL's and Ray's own place
_SHM_GB: Final = 8.0
_FILES: Final = 4096
_RAY_FILES: Final = 65_535
_MEMORY_GB: Final = 32.0
_PROXIES: Final = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
_TRAINING_GPUS: Final = 8
_SMI: Final = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")
_SMI_S: Final = 10.0
_RAY_S: Final = 3.0
_RAY_DASHBOARD_PORT: Final = "8265"
_WANDB_KEYS: Final = ("WANDB_API_KEY", "WANDB_KEY")  # the scripts take the first that is set
_WANDB_KEY: Final = re.compile(r"[\w.-]{40,}")  # a dash after the name of an own server, dots in a token
_WANDB_MODES: Final = ("online", "offline", "disabled", "shared", "dryrun", "run", "")
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


def check_packages(_question: Question) -> Iterator[Finding]:
    """Whether Python and the installed packages are what this package's metadata requires; nothing is imported.

    Optional packages count where they are installed.
    """
    from packaging.requirements import Requirement

    version = installed_version(_OURS)
    if version is None:
        remedy = "install this package again: pip install -e /path/to/strands-rollout"
        yield error("packages", f"{_OURS} is not installed: its requirements are not known", remedy)
        return
    ours = metadata.distribution(_OURS).metadata.json
    yield _python(str(ours.get("requires_python", "")))
    extras = set(ours.get("provides_extra", ())) - _NOT_FOR_A_RUN
    versions = {_OURS: version}
    faults: dict[str, Finding] = {}
    for package in map(Requirement, metadata.requires(_OURS) or []):
        asking = [extra for extra in ("", *extras) if not package.marker or package.marker.evaluate({"extra": extra})]
        if not asking:
            continue
        version = installed_version(package.name)
        if fault := _package_fault(package, version, required="" in asking):
            faults.setdefault(package.name, fault)
        elif version is not None:
            versions[package.name] = version
    shown = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    yield good("packages", f"as required: {shown}", versions=versions)
    yield from faults.values()


def _python(wanted: str) -> Finding:
    from packaging.specifiers import SpecifierSet

    version, uname = platform.python_version(), platform.uname()
    if not SpecifierSet(wanted).contains(version, prereleases=True):
        remedy = f"make an environment with a Python {wanted} and install this package there"
        return error("python", f"Python {version} at {sys.executable}; expected {wanted}", remedy)
    machine = f"{uname.system} {uname.release}, {uname.machine}"
    return good("python", f"Python {version} at {sys.executable}, on {machine}", python=version, machine=machine)


def installed_version(name: str) -> str | None:
    """The version of a distribution; None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _package_fault(wanted: Requirement, version: str | None, *, required: bool) -> Finding | None:
    """What is wrong with a package; an optional one that is too old fails only those who use it."""
    from packaging.version import InvalidVersion, Version

    name, remedy = f"package {wanted.name}", f"pip install '{wanted.name}{wanted.specifier}'"
    expected = f"expected {wanted.specifier or 'any'}"
    if version is None:
        return error(name, f"not installed; {expected}", remedy) if required else None
    found = f"{wanted.name} {version}; {expected}"
    try:
        number = Version(version)
    except InvalidVersion:
        return error(name, f"{found}: its metadata can't be read", f"pip install --force-reinstall '{wanted.name}'")
    if wanted.specifier.contains(number, prereleases=True):
        return None
    lowest = [part.version.removesuffix(".*") for part in wanted.specifier if part.operator in (">=", "~=", "==", ">")]
    if any(number < Version(bound) for bound in lowest):
        return missing(name, f"{found}: too old", remedy, needed=required)
    return warning(name, f"{found}: newer than what was tested", remedy)


def check_disk(question: Question) -> Iterator[Finding]:
    """Whether the folders that a run writes to, which need not exist yet, have room.

    Sizes are of Qwen3-8B: 8.2e9 parameters are 16.4 GB in bf16, as downloaded and again as converted for Megatron; a
    save with the optimizer's state (bf16 weights, fp32 weights, two fp32 moments) holds 14 bytes a parameter, 115 GB.
    """
    needs_model = not (question.model.is_dir() and question.converted_model.is_dir())
    temporary = question.named("TMPDIR") or Path(tempfile.gettempdir())
    fine = []
    for what, folder, variable, needed_gb, least_gb in (
        # two saves, the newer one beside the one that it replaces
        ("checkpoints", question.named("SAVE_DIR") or question.repository / "checkpoints", "SAVE_DIR", 250, 5),
        ("models", question.model_dir, "MODEL_DIR", 40 * needs_model, 2 * needs_model),
        ("data", question.data_dir, "DATA_DIR", 1, 0.1),
        ("temporary files", temporary, "TMPDIR", 20, 1),  # Ray's logs, and objects that it moves out of memory
    ):
        name, remedy = f"disk: {what}", f"free some, or set {variable} to a larger disk"
        existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        free_gb = shutil.disk_usage(existing).free / _GB
        found = f"{free_gb:.0f} GB free at {folder}"
        if not existing.is_dir():
            yield error(name, f"{existing} is a file, {folder} can't be made", remedy)
        elif os.statvfs(existing).f_flag & os.ST_RDONLY or not os.access(existing, os.W_OK):
            yield error(name, f"{existing} can't be written to", remedy)
        elif free_gb < least_gb:
            yield error(name, f"{found}; expected {least_gb:g} GB at the very least", remedy)
        elif free_gb < needed_gb:
            yield warning(name, f"{found}; {diagnosis.MODEL_NAME} needs up to {needed_gb:g} GB there", remedy)
        else:
            fine.append(f"{what}: {found}")
    if fine:
        yield good("disk", "; ".join(fine))


def check_limits(_question: Question) -> Iterator[Finding]:
    """Whether memory, shared memory and open files, also of a container, are enough."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    files = math.inf if limit == resource.RLIM_INFINITY else limit
    shared = shutil.disk_usage(_SHM).total if _SHM.is_dir() else None  # in Docker 64 MB by default
    for name, found, is_enough, need, remedy in (
        ("memory", f"{memory / _GB:.0f} GB", memory >= _MEMORY_GB * _GB,
         f"to convert {diagnosis.MODEL_NAME} its weights, 16 GB, are read into memory",
         f"use a machine, or give the container, {_MEMORY_GB:g} GB or more for that"),
        ("open files", f"ulimit -n is {files}", files >= _FILES,
         f"hundreds of episodes at once need {_FILES} open files, Ray wants {_RAY_FILES}",
         f"ulimit -n {_RAY_FILES} before the run"),
        ("shared memory", f"no {_SHM} on this system" if shared is None else f"{shared / _GB:.1f} GB at {_SHM}",
         shared is None or shared >= _SHM_GB * _GB,
         f"NCCL and Ray want {_SHM_GB:g} GB", "start the container with --shm-size=64g, or with --ipc=host"),
    ):  # fmt: skip
        yield good(name, found) if is_enough else warning(name, f"{found}; {need}", remedy)


def check_proxies(question: Question) -> Iterator[Finding]:
    """Whether engines would reach their router through a proxy.

    This package reaches engines directly whatever is set, and so do slime's own rollouts; but slime's engines register
    with `requests` (slime/backends/sglang_utils/sglang_engine.py), which uses a proxy for all hosts not in no_proxy.
    """
    env = question.env
    used = ", ".join(name for name in _PROXIES if env.get(name))
    if not used:
        yield good("proxies", "none is set")
        return
    excepted = {name.strip() for key in ("no_proxy", "NO_PROXY") for name in env.get(key, "").split(",")}
    # the address at which slime's router is reached on this machine, as slime finds it (slime/utils/http_utils.py)
    own = env.get("SLIME_HOST_IP")
    if not own:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # sends nothing: the kernel picks the address that it would send from
            own = str(probe.getsockname()[0])
    hosts = list(dict.fromkeys(["127.0.0.1", own or "127.0.0.1"]))
    proxied = [host for host in hosts if host not in excepted]
    if "*" in excepted or not proxied:
        yield good("proxies", f"{used} set, and no_proxy has {', '.join(hosts)}")
        return
    asks = "slime's engines would ask the proxy for their router"
    found = f"{used} set without no_proxy for {', '.join(proxied)}: {asks}"
    yield warning("proxies", found, f"export no_proxy=localhost,{','.join(hosts)}; export NO_PROXY=$no_proxy")


def check_gpus(question: Question) -> Iterator[Finding]:
    """How many GPUs nvidia-smi finds, of which memory; fewer than are wanted is an error."""
    env = question.env
    wanted = question.gpus
    if wanted is None and not env.get("RAY_ADDRESS"):  # else the training is on a cluster elsewhere
        try:
            wanted = int(env.get("NUM_GPUS") or (_TRAINING_GPUS if question.training else 0)) or None
        except ValueError:
            found = f"NUM_GPUS is {env['NUM_GPUS']!r}; expected a whole number"
            yield error("gpus", found, "export NUM_GPUS=8, or unset it")
            return
    answer = diagnosis.run_program(*_SMI, env=env, limit_s=_SMI_S)
    lines = answer.stdout.splitlines() if answer is not None and answer.exit_code == 0 else []
    gpus = [tuple(cells) for cells in ([cell.strip() for cell in line.split(",")] for line in lines) if len(cells) == 3]
    if not gpus:
        if answer is None:
            why_not = "no nvidia-smi on the PATH"
        elif answer.exit_code is None:
            why_not = f"nvidia-smi did not answer within {_SMI_S:g} s: the driver hangs"
        else:
            why_not = f"nvidia-smi {'failed' if answer.exit_code else 'lists no GPU'}: {answer.printed}"
        asked = f"; {wanted} were asked for" if wanted else ""
        found = f"no GPU here: {why_not}{asked}; training needs 8, an evaluation against a server elsewhere none"
        remedy = "for training, use a machine with GPUs whose nvidia-smi works; a container: docker run --gpus all"
        yield missing("gpus", found, remedy, needed=bool(wanted))
        return
    count, chosen = len(gpus), env.get("CUDA_VISIBLE_DEVICES")
    hidden = "" if chosen is None else f" of {count} (CUDA_VISIBLE_DEVICES={chosen})"
    if chosen is not None:
        count = min(count, sum(name.strip() not in ("", "-1") for name in chosen.split(",")))
    sizes = {(name, f"{int(mib) / 1024:.0f} GiB" if mib.isdecimal() else f"memory {mib}") for name, mib, _ in gpus}
    kinds = ", ".join(sorted(f"{name} with {memory}" for name, memory in sizes))
    found = f"{count} GPUs{hidden}: {kinds}; driver {gpus[0][2]}"
    if count < (wanted or 0):
        remedy = f"use a machine with {wanted}; or NUM_GPUS={count}, as --gpus {count}"
        yield error("gpus", f"{found}; {wanted} were asked for", remedy)
    else:
        yield good("gpus", found)


def check_ray(question: Question) -> Iterator[Finding]:
    """Whether a job could be given to Ray, and something listens where RAY_ADDRESS says that a cluster is."""
    env = question.env
    command = shutil.which("ray", path=env.get("PATH", ""))
    if command is not None:
        yield good("ray", f"Ray {installed_version('ray') or ''} with {command}")
    else:
        found = "no `ray` on the PATH: slime's training runs on it"
        remedy = "work in the image slimerl/slime, or: pip install 'ray[default]', and activate its environment"
        yield missing("ray", found, remedy, needed=question.training)
    address = env.get("RAY_ADDRESS", "")
    if address in ("", "auto", "local"):
        return
    remedy = "unset RAY_ADDRESS to have a Ray started here; or, there: ray start --head --dashboard-host=0.0.0.0"
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        host, port = parts.hostname or "", parts.port or int(env.get("RAY_DASHBOARD_PORT") or _RAY_DASHBOARD_PORT)
    except ValueError:
        host, port = "", 0
    if not host:
        shown = "not shown, it may hold a password" if {"@", "?"} & set(address) else repr(address)
        found = f"RAY_ADDRESS can't be read ({shown}); expected http://HOST:8265, ray://HOST:10001, HOST:6379 or auto"
        yield error("ray cluster", found, remedy)
        return
    try:
        socket.create_connection((host, port), timeout=_RAY_S).close()
    except OSError as e:
        yield error("ray cluster", f"RAY_ADDRESS names {host}:{port}, but nothing listens there: {e}", remedy)
    else:
        yield good("ray cluster", f"something listens at {host}:{port}, which RAY_ADDRESS names")


def check_wandb(question: Question) -> Iterator[Finding]:
    """Whether wandb is on, and could log in; the key itself is never shown."""
    env = question.env
    mode, wanted = env.get("WANDB_MODE", ""), env.get("USE_WANDB")
    if mode not in _WANDB_MODES:
        yield error("wandb", f"WANDB_MODE is {mode!r}", "export WANDB_MODE=online, offline or disabled")
        return
    malformed = [name for name in _WANDB_KEYS if env.get(name) and not _WANDB_KEY.fullmatch(env[name])]
    for name in malformed:
        expected = "expected 40 or more letters, digits, dots and dashes, without quotes, spaces or a line break"
        remedy = "copy the key again: export WANDB_API_KEY=..., without quotes or spaces in it"
        yield error("wandb", f"{name} is no key: it has {len(env[name])} characters; {expected}", remedy)
    login = _wandb_login(env)
    if malformed:
        return
    if wanted == "0" or mode == "disabled" or (login is None and wanted != "1"):
        off = "USE_WANDB=0" if wanted == "0" else f"WANDB_MODE={mode}" if mode == "disabled" else "no key and no login"
        yield good("wandb", f"off: {off}; runs are logged without it")
    elif login is None:
        remedy = "export WANDB_API_KEY=..., or: wandb login; or, to upload later: export WANDB_MODE=offline"
        yield error("wandb", "USE_WANDB is 1, but there is no key and no login", remedy)
    elif find_spec("wandb") is None:
        yield error("wandb", f"{login}, but wandb is not installed", "pip install 'strands-rollout[wandb]'")
    else:
        yield good("wandb", login)


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


def check_sandbox(question: Question) -> Iterator[Finding]:
    """Whether model-written code can be run with this isolation; starts the sandbox with all that it can enforce."""

    async def started() -> SandboxReport:
        async with LocalExecutor(isolation="rlimits") as executor:
            report = await executor.start()
            await executor.run("pass")
            return report

    try:
        report = asyncio.run(started())
    except RolloutError as e:
        other = "free the temporary folder, or name another executor in the settings, such as sandbox_fusion"
        yield error("sandbox", f"the code sandbox does not start: {e}", other)
        return
    yield from judge_sandbox(report, question.isolation)


def judge_sandbox(report: SandboxReport, isolation: Isolation) -> Iterator[Finding]:
    """A finding for the sandbox and one for each of its layers."""
    found = f"the strongest isolation here is {report.isolation}, {isolation} was asked for"
    yield good("sandbox", f"{found}; started in {report.start_s:.1f} s", sandbox=asdict(report), wanted=isolation)
    for layer, meaning in MEANING.items():
        name, lacking = f"sandbox {layer}", f"MISSING ({meaning}): {report.missing.get(layer)}"
        if layer in report.enforced:
            yield good(name, f"{meaning}: {report.enforced[layer]}")
        elif layer not in report.missing:
            yield good(name, f"{meaning}: not needed, this is not root")
        elif layer not in LAYERS[isolation]:
            yield skipped(name, f"{lacking}; isolation {isolation} does not ask for it")
        else:
            weaker = next(mode for mode, layers in LAYERS.items() if layer not in layers or mode == "rlimits")
            accept = f"or accept less in the settings: executor: {{name: local, isolation: {weaker}}}"
            yield error(name, lacking, f"{_LAYER_REMEDIES[layer]}; {accept}")

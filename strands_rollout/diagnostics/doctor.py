"""`strands-rollout doctor`: the list of all checks, and the checks of the machine and of servers.

The machine's checks cover Python and its packages, GPUs, disks, limits, proxies, Ray, wandb and the code sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import platform
import re
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

import aiohttp
import httpx
import orjson

from strands_rollout import diagnostics
from strands_rollout.client.client import ServerInfo, fetch_server_info
from strands_rollout.client.transport import create_client, parse_base_url, redacted
from strands_rollout.code_tool.local import LocalExecutor
from strands_rollout.code_tool.supervisor_link import LAYERS, Isolation, SandboxReport
from strands_rollout.diagnostics import (
    Check,
    DoctorOptions,
    Finding,
    error,
    good,
    missing,
    package_folders,
    skipped,
    warning,
)
from strands_rollout.diagnostics.run_files import (
    check_config,
    check_converted_model,
    check_data,
    check_model,
    check_tokenizer,
)
from strands_rollout.diagnostics.slime_episode import check_megatron, check_slime, check_slime_episode
from strands_rollout.errors import ConfigError, EngineResponseError, EngineUnavailableError, RolloutError
from strands_rollout.files.json_codec import Json

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_SERVER_TIMEOUT_S: Final = 15.0
_CONNECT_TIMEOUT_S: Final = 3.0
_READ_TIMEOUT_S: Final = 5.0
_OLD: Final = re.compile(r"0\.[0-4](?:\.|$)")
_START: Final = "start it, and check host and port: python -m sglang.launch_server --model-path MODEL --port 30000"
_UNREACHABLE: Final = (httpx.TransportError, aiohttp.ClientError, EngineUnavailableError)
# words, numbers and control tokens that vocabularies split in different ways
_TEXT: Final = "<|im_start|>Zwölf Boxkämpfer: x = 1234567, \\boxed{42}; unbelievably<tool_call>\n\n\t東京<|im_end|>"
_DISTRIBUTION: Final = "strands-rollout"
_NOT_FOR_A_RUN: Final = frozenset({"dev", "docs", "bench"})  # extras for developers of this package
_GB: Final = 1e9
_SHM: Final = Path("/dev/shm")  # noqa: S108 - the folder that NCCL and Ray use
_SHM_GB: Final = 8.0
_MODEL_SIZE: Final = "a model of 8 billion parameters"
_FILES: Final = 4096
_RAY_FILES: Final = 65_535
_MEMORY_GB: Final = 32.0
_PROXIES: Final = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
_TRAINING_GPUS: Final = 8
_SMI: Final = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")
_SMI_TIMEOUT_S: Final = 10.0
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


def run_doctor(options: DoctorOptions) -> diagnostics.Diagnosis:
    """Run all checks on this machine; takes seconds and leaves nothing behind."""
    checks = [
        Check("packages", check_packages),
        Check("strands", check_strands),
        Check("slime", check_slime, waits=True),
        Check("slime episode", check_slime_episode, waits=True),
        Check("megatron", check_megatron, waits=True),
        Check("gpus", check_gpus, waits=True),
        Check("limits", check_limits, waits=True),
        Check("proxies", check_proxies),
        Check("disk", check_disk, waits=True),
        Check("ray", check_ray, waits=True),
        Check("wandb", check_wandb),
        Check("model", check_model),
        Check("converted model", check_converted_model),
        Check("tokenizer", check_tokenizer),
        Check("config", check_config),
        Check("data", check_data),
        Check("sandbox", check_sandbox, waits=True),
    ]
    servers = [Check("server", partial(check_server, url), waits=True) for url in options.base_urls or ()]
    no_server = Check("server", lambda _: [skipped("server", "no --base-url: no SGLang was asked")])
    found = diagnostics.run_checks([*checks, *(servers or [no_server])], options)
    return diagnostics.Diagnosis(without_training(found, options))


_TRAINING_CHECKS: Final = ("slime", "megatron", "gpus", "memory", "disk", "ray", "model", "converted model", "data")


def without_training(findings: Sequence[Finding], options: DoctorOptions) -> list[Finding]:
    """Return the findings with warnings about training skipped, on a machine that is not meant for training.

    That is a machine without GPUs and slime, on which training was not requested. Things that an option names are still
    checked.
    """
    has_gpus = not any(one.name == "gpus" and one.status == "warning" for one in findings)
    means_training = options.training or options.gpus or options.env.get("RAY_ADDRESS")
    has_slime = options.slime_dir or options.path_in_env("SLIME_DIR") or package_folders("slime")
    if has_gpus or means_training or has_slime:
        return list(findings)
    named = {"data": options.data, "megatron": options.megatron_dir, "model": options.model_name}
    aside = [kind for kind in _TRAINING_CHECKS if not named.get(kind.removeprefix("converted "))]
    return [
        replace(one, status="skipped") if one.status == "warning" and one.name.partition(":")[0] in aside else one
        for one in findings
    ]


def check_server(base_url: str, options: DoctorOptions, timeout_s: float = _SERVER_TIMEOUT_S) -> list[Finding]:
    """Check that SGLang, or a router, answers, and that its tokenizer and context length fit the options."""
    try:
        shown = redacted(parse_base_url(base_url))
    except ConfigError as e:
        return [error("server", str(e), "name it as http://127.0.0.1:30000")]

    async def within_limit() -> list[Finding]:
        async with asyncio.timeout(timeout_s):
            return await _ask(base_url, shown, options)

    try:
        return asyncio.run(within_limit())
    except TimeoutError:
        return [error("server", f"{shown} did not answer within {timeout_s:g} s", f"look at its log, or {_START}")]


async def _ask(base_url: str, shown: str, options: DoctorOptions, *, is_worker: bool = False) -> list[Finding]:
    async with create_client(base_url, connect_timeout=_CONNECT_TIMEOUT_S, timeout=_READ_TIMEOUT_S) as http:
        try:
            health = await http.get("/health")
            if health.status_code == httpx.codes.SERVICE_UNAVAILABLE:
                found = f"{shown} is up, but not healthy (503): it is loading, or its scheduler hangs"
                return [error("server", found, "wait until it has loaded, look at its log, or start it again")]
            workers = None if is_worker else _object(await http.get("/workers")).get("workers")
            if isinstance(workers, list):
                return await _ask_router(workers, shown, options)
            info = await fetch_server_info(http, url=shown)
            if info.model_path is None:
                name = health.headers.get("server", "a server that does not name itself")
                found = f"{shown} answers, but is not SGLang: {name}; its /server_info names no model"
                return [error("server", found, f"check the port; another server may have it. {_START}")]
            context = _context(info, shown, options.max_context_length)
            return [_engine(info, shown), context, await _tokens(http, info, options)]
        except EngineResponseError as e:
            return [error("server", f"{shown} is up, but fails: {e}", "wait a moment, or look at its log")]
        except _UNREACHABLE as e:
            return [error("server", f"nothing answers at {shown}: {e or type(e).__name__}", _START)]


async def _ask_router(workers: list[dict[str, Json]], shown: str, options: DoctorOptions) -> list[Finding]:
    urls = [str(worker["url"]) for worker in workers if worker.get("is_healthy", True)]
    if not urls:
        found = f"the router at {shown} has {len(workers)} workers, none of them healthy"
        return [error("server", found, "start an SGLang server and register it: POST /workers with its url")]
    router = good("server", f"a router at {shown} with {len(urls)} of {len(workers)} workers healthy")
    behind = f"{redacted(parse_base_url(urls[0]))} (behind the router)"
    return [router, *await _ask(urls[0], behind, options, is_worker=True)]


def _object(response: httpx.Response) -> dict[str, Json]:
    """Return the JSON object in a response; empty if there is none."""
    try:
        answer = orjson.loads(response.content) if response.status_code == httpx.codes.OK else None
    except orjson.JSONDecodeError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _engine(info: ServerInfo, shown: str) -> Finding:
    version = str(info.raw.get("version") or "of unknown version")
    found = f"SGLang {version} at {shown}: {info.model_path}, weights {info.weight_version}"
    if _OLD.match(version):
        return warning("server", f"{found}; too old", "pip install 'sglang>=0.5'")
    return good("server", found)


def _context(info: ServerInfo, shown: str, wanted: int | None) -> Finding:
    name, length = "server context", info.context_length
    known = f"{shown} takes {length} tokens" if length else f"{shown} does not state its context length"
    if wanted is None:
        return skipped(name, f"{known}; no --max-context-length to compare with")
    if length is not None and length >= wanted:
        return good(name, f"{known}, {wanted} are wanted")
    found = f"{known}, {wanted} are wanted: longer episodes are cut or refused"
    lower = f", or lower slime's --rollout-max-context-len to {length}" if length else ""
    return warning(name, found, f"start it with --context-length {wanted}{lower}")


async def _tokens(http: httpx.AsyncClient, info: ServerInfo, options: DoctorOptions) -> Finding:
    """Check that a server's tokenizer gives the same ids as the run's; other ids can crash a server.

    Calls SGLang's /tokenize (0.5.23). Routers and older servers lack it; then the tokenizer in the server's own folder
    is read, if it is on this machine.
    """
    name, folder = "server tokens", options.tokenizer_dir
    is_known = options.tokenizer is not None or folder != diagnostics.SHIPPED_TOKENIZER
    own = _ids_of(folder) if is_known else None
    if own is None:
        return skipped(name, "no --tokenizer to compare with the server's")
    model = info.raw.get("served_model_name") or info.model_path
    asked = {"model": model, "prompt": _TEXT, "add_special_tokens": False}
    served = _object(await http.post("/tokenize", json=asked)).get("tokens")
    if not isinstance(served, list):
        served = _ids_of(Path(str(info.raw.get("tokenizer_path") or info.model_path)))
    if served is None:
        return skipped(name, "the server has no /tokenize, and its tokenizer is not on this machine")
    if served == own:
        return good(name, f"a text has the same {len(own)} tokens there as in {folder}")
    found = (
        f"the tokenizer {folder} is not that of the served {info.model_path}: a text is {len(own)} tokens "
        f"here, {own[:6]}..., and {len(served)} there, {served[:6]}..."
    )
    remedy = "name the folder of the served model with --tokenizer, or serve the model that is trained"
    return (warning if options.tokenizer is None else error)(name, found, remedy)


def _ids_of(folder: Path) -> list[int] | None:
    """Return the ids of the test text in a folder's tokenizer; None if it has no working tokenizer."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        return list(Tokenizer.from_file(str(file)).encode(_TEXT, add_special_tokens=False).ids)
    except Exception:  # tokenizers raises plain Exceptions; another check reports a broken file
        return None


def check_packages(_question: DoctorOptions) -> Iterator[Finding]:
    """Check Python and the installed packages against this package's metadata, without importing them.

    Optional packages are checked only if they are installed.
    """
    from packaging.requirements import Requirement

    version = installed_version(_DISTRIBUTION)
    if version is None:
        remedy = "install this package again: pip install -e /path/to/strands-rollout"
        yield error("packages", f"{_DISTRIBUTION} is not installed: its requirements are not known", remedy)
        return
    ours = metadata.distribution(_DISTRIBUTION).metadata.json
    yield _python(str(ours.get("requires_python", "")))
    extras = set(ours.get("provides_extra", ())) - _NOT_FOR_A_RUN
    versions = {_DISTRIBUTION: version}
    faults: dict[str, Finding] = {}
    for package in map(Requirement, metadata.requires(_DISTRIBUTION) or []):
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
    """Return the version of a distribution; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _package_fault(wanted: Requirement, version: str | None, *, required: bool) -> Finding | None:
    """Return the problem of a package; an optional package that is too old is only a warning."""
    from packaging.version import Version

    name, remedy = f"package {wanted.name}", f"pip install '{wanted.name}{wanted.specifier}'"
    if version is None:
        expected = f"not installed; expected {wanted.specifier or 'any'}"
        return error(name, expected, remedy) if required else None
    if wanted.specifier.contains(version, prereleases=True):
        return None
    lowest = [part.version.removesuffix(".*") for part in wanted.specifier if part.operator in (">=", "~=", "==", ">")]
    is_old = any(Version(version) < Version(bound) for bound in lowest)
    why = "too old" if is_old else "newer than what was tested"
    found = f"{wanted.name} {version}; expected {wanted.specifier}: {why}"
    return missing(name, found, remedy, needed=required and is_old)


def check_strands(_question: DoctorOptions) -> Iterator[Finding]:
    """Check that Strands has the private names that this package reads."""
    from strands_rollout.agent.loop import IMPORT_FAULT  # the import takes long
    from strands_rollout.agent.strands_names import find_losses, strands_version

    version = strands_version()
    found = find_losses(IMPORT_FAULT)
    if not found:
        yield good("strands", f"strands-agents {version} has all that is read of it; this package's agent loop runs")
        return
    words = "; ".join(f"{name}: {lost}" for name, lost in found.items())
    remedy = "pip install 'strands-agents==1.62.*', with which this package was tested; or a newer strands-rollout"
    yield warning("strands", f"strands-agents {version} lacks what is read of it. {words}", remedy)


def check_disk(options: DoctorOptions) -> Iterator[Finding]:
    """Check free space and write permission of the folders that a run writes to, which need not exist yet.

    Sizes are of Qwen3-8B: 8.2e9 parameters are 16.4 GB in bf16, as downloaded and again as converted for Megatron; a
    save with the optimizer's state (bf16 weights, fp32 weights, two fp32 moments) holds 14 bytes a parameter, 115 GB.
    """
    needs_model = not (options.model.is_dir() and options.converted_model.is_dir())
    temporary = options.path_in_env("TMPDIR") or Path(tempfile.gettempdir())
    fine = []
    for what, folder, variable, needed_gb in (
        # two saves: the newer save, and the save that it replaces
        ("checkpoints", options.path_in_env("SAVE_DIR") or options.repository / "checkpoints", "SAVE_DIR", 250),
        ("models", options.model_dir, "MODEL_DIR", 40 * needs_model),
        ("data", options.data_dir, "DATA_DIR", 1),
        ("temporary files", temporary, "TMPDIR", 20),  # Ray's logs, and objects that it moves out of memory
    ):
        name, remedy = f"disk: {what}", f"free some, or set {variable} to a larger disk"
        existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        free_gb = shutil.disk_usage(existing).free / _GB
        found = f"{free_gb:.0f} GB free at {folder}"
        if not os.access(existing, os.W_OK):
            yield error(name, f"{existing} can't be written to", remedy)
        elif free_gb < needed_gb:
            yield warning(name, f"{found}; {_MODEL_SIZE} needs up to {needed_gb:g} GB there", remedy)
        else:
            fine.append(f"{what}: {found}")
    if fine:
        yield good("disk", "; ".join(fine))


def check_limits(_question: DoctorOptions) -> Iterator[Finding]:
    """Check memory, shared memory and open files, including a container's limits."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    files = math.inf if limit == resource.RLIM_INFINITY else limit
    shared = shutil.disk_usage(_SHM).total if _SHM.is_dir() else None  # in Docker 64 MB by default
    for name, found, is_enough, need, remedy in (
        ("memory", f"{memory / _GB:.0f} GB", memory >= _MEMORY_GB * _GB,
         f"to convert {_MODEL_SIZE} its weights, 16 GB, are read into memory",
         f"use a machine, or give the container, {_MEMORY_GB:g} GB or more for that"),
        ("open files", f"ulimit -n is {files}", files >= _FILES,
         f"hundreds of episodes at once need {_FILES} open files, Ray wants {_RAY_FILES}",
         f"ulimit -n {_RAY_FILES} before the run"),
        ("shared memory", f"no {_SHM} on this system" if shared is None else f"{shared / _GB:.1f} GB at {_SHM}",
         shared is None or shared >= _SHM_GB * _GB,
         f"NCCL and Ray want {_SHM_GB:g} GB", "start the container with --shm-size=64g, or with --ipc=host"),
    ):  # fmt: skip
        yield good(name, found) if is_enough else warning(name, f"{found}; {need}", remedy)


def check_proxies(options: DoctorOptions) -> Iterator[Finding]:
    """Check that a proxy does not stand between slime's engines and their router.

    This package reaches engines directly whatever is set, and so do slime's own rollouts; but slime's engines register
    with `requests` (slime/backends/sglang_utils/sglang_engine.py), which uses a proxy for all hosts not in no_proxy.
    """
    env = options.env
    used = ", ".join(name for name in _PROXIES if env.get(name))
    excepted = {name.strip() for key in ("no_proxy", "NO_PROXY") for name in env.get(key, "").split(",")}
    # the address at which slime's router is reached on this machine, determined as in slime (slime/utils/http_utils.py)
    own = env.get("SLIME_HOST_IP")
    if not own:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # sends nothing: the kernel only picks the source address
            own = str(probe.getsockname()[0])
    hosts = list(dict.fromkeys(["127.0.0.1", own or "127.0.0.1"]))
    proxied = [host for host in hosts if host not in excepted]
    if not used or "*" in excepted or not proxied:
        yield good("proxies", f"{used} set, and no_proxy has {', '.join(hosts)}" if used else "none is set")
        return
    found = f"{used} set without no_proxy for {', '.join(proxied)}: slime's engines would ask the proxy for the router"
    yield warning("proxies", found, f"export no_proxy=localhost,{','.join(hosts)}; export NO_PROXY=$no_proxy")


def check_gpus(options: DoctorOptions) -> Iterator[Finding]:
    """Count the GPUs that nvidia-smi lists; fewer than requested are an error."""
    env = options.env
    wanted = options.gpus
    if wanted is None and not env.get("RAY_ADDRESS"):  # with RAY_ADDRESS, training runs on a cluster elsewhere
        given = env.get("NUM_GPUS", "")
        wanted = int(given) if given.isdecimal() else _TRAINING_GPUS * options.training
    answer = diagnostics.run_program(*_SMI, env=env, timeout_s=_SMI_TIMEOUT_S)
    lines = answer.stdout.splitlines() if answer is not None and answer.exit_code == 0 else []
    gpus = [tuple(cells) for cells in ([cell.strip() for cell in line.split(",")] for line in lines) if len(cells) == 3]
    if not gpus:
        if answer is None:
            why_not = "no nvidia-smi on the PATH"
        elif answer.exit_code is None:
            why_not = f"nvidia-smi did not answer within {_SMI_TIMEOUT_S:g} s: the driver hangs"
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
    kinds = ", ".join(sorted({f"{name} with {mib} MiB" for name, mib, _ in gpus}))
    found = f"{count} GPUs{hidden}: {kinds}; driver {gpus[0][2]}"
    if count < (wanted or 0):
        remedy = f"use a machine with {wanted}; or NUM_GPUS={count}, as --gpus {count}"
        yield error("gpus", f"{found}; {wanted} were asked for", remedy)
    else:
        yield good("gpus", found)


def check_ray(options: DoctorOptions) -> Iterator[Finding]:
    """Check that the command `ray` is installed; the launch scripts check the cluster at RAY_ADDRESS."""
    command = shutil.which("ray", path=options.env.get("PATH", ""))
    if command is not None:
        yield good("ray", f"Ray {installed_version('ray') or ''} with {command}")
        return
    found = "no `ray` on the PATH: slime's training runs on it"
    remedy = "work in the image slimerl/slime, or: pip install 'ray[default]', and activate its environment"
    yield missing("ray", found, remedy, needed=options.training)


def check_wandb(options: DoctorOptions) -> Iterator[Finding]:
    """Check that wandb is installed if it is enabled; the launch scripts check the key."""
    env = options.env
    asking = [name for name in ("USE_WANDB", "WANDB_API_KEY", "WANDB_KEY") if env.get(name)]
    if not asking or env.get("USE_WANDB") == "0" or env.get("WANDB_MODE") == "disabled":
        yield good("wandb", "off; runs are logged without it")
    elif find_spec("wandb") is None:
        yield error("wandb", f"{asking[0]} is set, but wandb is not installed", "pip install 'strands-rollout[wandb]'")
    else:
        yield good("wandb", f"on: {asking[0]} is set")


def check_sandbox(options: DoctorOptions) -> Iterator[Finding]:
    """Start the code sandbox and check that it enforces the requested isolation."""

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
    yield from judge_sandbox(report, options.isolation)


def judge_sandbox(report: SandboxReport, isolation: Isolation) -> Iterator[Finding]:
    """Return a finding for the sandbox and one for each of its layers."""
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

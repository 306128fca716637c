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
    count_of,
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

    from strands_rollout.diagnostics.preflight import Preflight

_PREFLIGHT_TIMEOUT_S: Final = 240.0
_SERVER_TIMEOUT_S: Final = 15.0
_CONNECT_TIMEOUT_S: Final = 3.0
_READ_TIMEOUT_S: Final = 5.0
_OLD_VERSION: Final = re.compile(r"0\.[0-4](?:\.|$)")
_START_SERVER: Final = (
    "correct the host and port, or start a server: python -m sglang.launch_server --model-path MODEL --port 30000"
)
_UNREACHABLE: Final = (httpx.TransportError, aiohttp.ClientError, EngineUnavailableError)
# words, numbers and control tokens that vocabularies split in different ways
_TEST_TEXT: Final = (
    "<|im_start|>Zwölf Boxkämpfer: x = 1234567, \\boxed{42}; unbelievably<tool_call>\n\n\t東京<|im_end|>"
)
_DISTRIBUTION: Final = "strands-rollout"
_DEVELOPER_EXTRAS: Final = frozenset({"dev", "docs", "bench"})  # extras for developers of this package
_GB: Final = 1e9
_SHM: Final = Path("/dev/shm")  # noqa: S108 - the folder that NCCL and Ray use
_MIN_SHM_GB: Final = 8.0
_REFERENCE_MODEL: Final = "a model of 8 billion parameters"
_MIN_OPEN_FILES: Final = 4096
_RAY_OPEN_FILES: Final = 65_535
_MIN_MEMORY_GB: Final = 32.0
_PROXY_VARIABLES: Final = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
_TRAINING_GPUS: Final = 8
_NVIDIA_SMI: Final = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")
_NVIDIA_SMI_TIMEOUT_S: Final = 10.0
LAYER_MEANINGS: Final = {
    "limits": "memory, disk, files, threads, time",
    "user": "a user other than root",
    "files": "no file but its own",
    "syscalls": "no network, process or device",
}
_LAYER_REMEDIES: Final = {
    "limits": "run on Linux or macOS, where a process can be limited",
    "user": "run as an ordinary user, or let the container change users (docker run --cap-add SETUID --cap-add SETGID)",
    "files": "use a kernel with Landlock (Linux 5.13 or newer), or run as root",
    "syscalls": "use Linux with seccomp on x86-64 or aarch64",
}


def run_doctor(options: DoctorOptions, preflight: Preflight | None = None) -> diagnostics.Diagnosis:
    """Run all checks and, if `preflight` is given, the checks of its training command; return all findings."""
    if preflight is not None:
        options = preflight.with_command_values(options)
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
    no_server = Check("server", lambda _: [skipped("server", "no --base-url given, so no server was checked")])
    checks += servers or [no_server]
    if preflight is not None:
        checks += [
            Check("command", preflight.check_flags, waits=True),
            Check("command: batch", preflight.check_batch, waits=True),
            Check("command: context", preflight.check_context),
            Check("command: memory", preflight.check_memory),
            Check("command: disk", preflight.check_disk),
            Check("command: prompts", preflight.check_data),
            Check("command: evaluation", preflight.check_evaluation),
            Check("command: outage", preflight.check_outage),
            Check("command: pass rates", preflight.check_pass_rates),
            Check("judge", preflight.check_judges, waits=True),
            Check("this run", preflight.summarize),
        ]
    elif options.training:
        print_command = "bash SCRIPT --dry-run | strands-rollout doctor --training --flags -"
        checks.append(
            Check("command", lambda _: [skipped("command", f"no command to check; to give one, run: {print_command}")])
        )
    # reading the parsers of SGLang and Megatron-LM may take minutes
    timeout_s = {} if preflight is None else {"timeout_s": _PREFLIGHT_TIMEOUT_S}
    found = diagnostics.run_checks(checks, options, **timeout_s)
    return diagnostics.Diagnosis(skip_training_warnings(found, options))


_TRAINING_CHECKS: Final = ("slime", "megatron", "gpus", "memory", "disk", "ray", "model", "converted model", "data")


def skip_training_warnings(findings: Sequence[Finding], options: DoctorOptions) -> list[Finding]:
    """Mark warnings about training as skipped on a machine that is not meant for training.

    A machine is meant for training in any of these cases:

    - It has GPUs.
    - slime is importable, or an option or SLIME_DIR names a checkout of slime.
    - --training, --gpus above 0 or RAY_ADDRESS is given.

    Warnings about data, a model or Megatron-LM that an option names stay warnings.
    """
    has_gpus = not any(finding.name == "gpus" and finding.status == "warning" for finding in findings)
    wants_training = options.training or options.gpus or options.env.get("RAY_ADDRESS")
    has_slime = options.slime_dir or options.path_in_env("SLIME_DIR") or package_folders("slime")
    if has_gpus or wants_training or has_slime:
        return list(findings)
    named = {"data": options.data, "megatron": options.megatron_dir, "model": options.model_name}
    skippable = [name for name in _TRAINING_CHECKS if not named.get(name.removeprefix("converted "))]
    return [
        replace(finding, status="skipped")
        if finding.status == "warning" and finding.name.partition(":")[0] in skippable
        else finding
        for finding in findings
    ]


def check_server(base_url: str, options: DoctorOptions, timeout_s: float = _SERVER_TIMEOUT_S) -> list[Finding]:
    """Check that SGLang or a router answers; check SGLang's version, tokenizer and context length.

    Of the servers behind a router, only the first healthy server is checked.
    """
    try:
        shown = redacted(parse_base_url(base_url))
    except ConfigError as e:
        return [error("server", str(e), "give a URL such as http://127.0.0.1:30000")]

    async def query_with_timeout() -> list[Finding]:
        async with asyncio.timeout(timeout_s):
            return await _query_server(base_url, shown, options)

    try:
        return asyncio.run(query_with_timeout())
    except TimeoutError:
        return [error("server", f"{shown} did not answer within {timeout_s:g} s", f"see its log, or {_START_SERVER}")]


async def _query_server(base_url: str, shown: str, options: DoctorOptions, *, is_worker: bool = False) -> list[Finding]:
    async with create_client(base_url, connect_timeout=_CONNECT_TIMEOUT_S, timeout=_READ_TIMEOUT_S) as http:
        try:
            health = await http.get("/health")
            if health.status_code == httpx.codes.SERVICE_UNAVAILABLE:
                found = f"{shown} is up, but not healthy (503): the server is loading, or its scheduler hangs"
                return [error("server", found, "wait until the server has loaded, see its log, or restart it")]
            workers = None if is_worker else _json_object(await http.get("/workers")).get("workers")
            if isinstance(workers, list):
                return await _query_router(workers, shown, options)
            info = await fetch_server_info(http, url=shown)
            if info.model_path is None:
                name = health.headers.get("server", "a server that does not name itself")
                found = f"{shown} answers, but is not SGLang: {name}; its /server_info names no model"
                return [error("server", found, f"check the port: another program may use it; or {_START_SERVER}")]
            context = _context_finding(info, shown, options.max_context_length)
            return [_version_finding(info, shown), context, await _check_tokens(http, info, options)]
        except EngineResponseError as e:
            return [error("server", f"{shown} is up, but fails: {e}", "wait a moment, or see its log")]
        except _UNREACHABLE as e:
            return [error("server", f"nothing answers at {shown}: {e or type(e).__name__}", _START_SERVER)]


async def _query_router(workers: list[dict[str, Json]], shown: str, options: DoctorOptions) -> list[Finding]:
    urls = [str(worker["url"]) for worker in workers if worker.get("is_healthy", True)]
    if not urls:
        found = f"the router at {shown} has {count_of(len(workers), 'worker')}, none of them healthy"
        return [error("server", found, "start an SGLang server and register it: POST /workers with its url")]
    router = good("server", f"a router at {shown} with {len(urls)} of {len(workers)} workers healthy")
    behind = f"{redacted(parse_base_url(urls[0]))} (behind the router)"
    return [router, *await _query_server(urls[0], behind, options, is_worker=True)]


def _json_object(response: httpx.Response) -> dict[str, Json]:
    try:
        answer = orjson.loads(response.content) if response.status_code == httpx.codes.OK else None
    except orjson.JSONDecodeError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _version_finding(info: ServerInfo, shown: str) -> Finding:
    version = str(info.raw.get("version") or "of unknown version")
    found = f"SGLang {version} at {shown}: {info.model_path}, weights {info.weight_version}"
    if _OLD_VERSION.match(version):
        return warning("server", f"{found}; too old, expected 0.5 or newer", "pip install 'sglang>=0.5'")
    return good("server", found)


def _context_finding(info: ServerInfo, shown: str, required: int | None) -> Finding:
    name, length = "server context", info.context_length
    stated = f"{shown} has a context of {length} tokens" if length else f"{shown} does not state its context length"
    if required is None:
        return skipped(name, f"{stated}; no --max-context-length to compare with")
    if length is not None and length >= required:
        return good(name, f"{stated}; expected at least {required}")
    found = f"{stated}; expected at least {required}: episodes beyond the server's limit are cut or refused"
    lower = f", or lower slime's --rollout-max-context-len to {length}" if length else ""
    return warning(name, found, f"start the server with --context-length {required}{lower}")


async def _check_tokens(http: httpx.AsyncClient, info: ServerInfo, options: DoctorOptions) -> Finding:
    """Check that a test text gets the same ids from the server's tokenizer as from the run's tokenizer.

    Ids that the served model does not have can crash the server.

    Calls SGLang's /tokenize (0.5.23). Routers and older servers do not have /tokenize. For them, the tokenizer is read
    from the server's own folder, if the folder is on this machine.
    """
    name, folder = "server tokens", options.tokenizer_dir
    has_tokenizer = options.tokenizer is not None or folder != diagnostics.SHIPPED_TOKENIZER
    expected = _encode_test_text(folder) if has_tokenizer else None
    if expected is None:
        return skipped(name, "the run has no usable tokenizer to compare with the server's; name one with --tokenizer")
    model = info.raw.get("served_model_name") or info.model_path
    body = {"model": model, "prompt": _TEST_TEXT, "add_special_tokens": False}
    served = _json_object(await http.post("/tokenize", json=body)).get("tokens")
    if not isinstance(served, list):
        served = _encode_test_text(Path(str(info.raw.get("tokenizer_path") or info.model_path)))
    if served is None:
        return skipped(name, "the server has no /tokenize, and its tokenizer is not on this machine")
    if served == expected:
        return good(name, f"a test text has the same {len(expected)} tokens on the server as in {folder}")
    found = (
        f"the tokenizer {folder} does not fit the served {info.model_path}: a test text has {len(expected)} tokens "
        f"in the folder, {expected[:6]}..., and {len(served)} on the server, {served[:6]}..."
    )
    remedy = "name the folder of the served model with --tokenizer, or serve the model that is trained"
    return (warning if options.tokenizer is None else error)(name, found, remedy)


def _encode_test_text(folder: Path) -> list[int] | None:
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        return list(Tokenizer.from_file(str(file)).encode(_TEST_TEXT, add_special_tokens=False).ids)
    except Exception:  # tokenizers raises plain Exceptions; another check reports a broken file
        return None


def check_packages(_options: DoctorOptions) -> Iterator[Finding]:
    """Check Python and the installed packages against this package's metadata, without importing them.

    Optional packages are checked only if they are installed; packages for developers are not checked.
    """
    from packaging.requirements import Requirement

    version = installed_version(_DISTRIBUTION)
    if version is None:
        remedy = "install this package again: pip install -e /path/to/strands-rollout"
        yield error("packages", f"{_DISTRIBUTION} is not installed, so its requirements are unknown", remedy)
        return
    ours = metadata.distribution(_DISTRIBUTION).metadata.json
    yield _check_python(str(ours.get("requires_python", "")))
    extras = set(ours.get("provides_extra", ())) - _DEVELOPER_EXTRAS
    versions = {_DISTRIBUTION: version}
    faults: dict[str, Finding] = {}
    for package in map(Requirement, metadata.requires(_DISTRIBUTION) or []):
        requiring = [e for e in ("", *extras) if not package.marker or package.marker.evaluate({"extra": e})]
        if not requiring:
            continue
        version = installed_version(package.name)
        if fault := _package_fault(package, version, required="" in requiring):
            faults.setdefault(package.name, fault)
        elif version is not None:
            versions[package.name] = version
    shown = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    yield good("packages", f"as required: {shown}", versions=versions)
    yield from faults.values()


def _check_python(specifier: str) -> Finding:
    from packaging.specifiers import SpecifierSet

    version, uname = platform.python_version(), platform.uname()
    if not SpecifierSet(specifier).contains(version, prereleases=True):
        remedy = f"create an environment with Python {specifier} and install this package there"
        return error("python", f"Python {version} at {sys.executable}; expected {specifier}", remedy)
    machine = f"{uname.system} {uname.release}, {uname.machine}"
    return good("python", f"Python {version} at {sys.executable}, on {machine}", python=version, machine=machine)


def installed_version(name: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _package_fault(package: Requirement, version: str | None, *, required: bool) -> Finding | None:
    """Return the problem of a package, or None. A missing optional package is not a problem."""
    from packaging.version import Version

    name, remedy = f"package {package.name}", f"pip install '{package.name}{package.specifier}'"
    if version is None:
        found = f"not installed; expected {package.specifier or 'any version'}"
        return error(name, found, remedy) if required else None
    if package.specifier.contains(version, prereleases=True):
        return None
    lower_bounds = [
        part.version.removesuffix(".*") for part in package.specifier if part.operator in (">=", "~=", "==", ">")
    ]
    is_old = any(Version(version) < Version(bound) for bound in lower_bounds)
    reason = "too old" if is_old else "newer than the tested versions"
    found = f"{package.name} {version}; expected {package.specifier}: {reason}"
    return missing(name, found, remedy, needed=required and is_old)


def check_strands(_options: DoctorOptions) -> Iterator[Finding]:
    """Check that Strands has the private names that this package reads."""
    from strands_rollout.agent.loop import IMPORT_FAULT  # the import takes long
    from strands_rollout.agent.strands_names import find_missing_names, strands_version

    version = strands_version()
    names = find_missing_names(IMPORT_FAULT)
    if not names:
        yield good("strands", f"strands-agents {version} has all names that this package reads")
        return
    lost = "; ".join(f"{name}: {loss}" for name, loss in names.items())
    remedy = "install the tested version: pip install 'strands-agents==1.62.*'; or a newer strands-rollout"
    yield warning("strands", f"strands-agents {version} lacks names that this package reads. {lost}", remedy)


def check_disk(options: DoctorOptions) -> Iterator[Finding]:
    """Check free space and write permission of the folders that a run writes to; they need not exist yet.

    The needed sizes are for Qwen3-8B, which has 8.2e9 parameters. The model takes 16.4 GB in bf16, and 16.4 GB
    again after the conversion for Megatron. A save with the optimizer's state takes 115 GB: 14 bytes per parameter, for
    bf16 weights, fp32 weights and two fp32 moments.
    """
    needs_model = not (options.model.is_dir() and options.converted_model.is_dir())
    temporary = options.path_in_env("TMPDIR") or Path(tempfile.gettempdir())
    sufficient = []
    for what, folder, variable, needed_gb in (
        # two saves: the newer save, and the save that it replaces
        ("checkpoints", options.path_in_env("SAVE_DIR") or options.repository / "checkpoints", "SAVE_DIR", 250),
        ("models", options.model_dir, "MODEL_DIR", 40 * needs_model),
        ("data", options.data_dir, "DATA_DIR", 1),
        ("temporary files", temporary, "TMPDIR", 20),  # Ray's logs, and objects that it moves out of memory
    ):
        name, remedy = f"disk: {what}", f"free some space, or set {variable} to a folder on a larger disk"
        existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        free_gb = shutil.disk_usage(existing).free / _GB
        found = f"{free_gb:.0f} GB free at {folder}"
        if not os.access(existing, os.W_OK):
            yield error(name, f"{existing} can't be written to", f"set {variable} to a writable folder")
        elif free_gb < needed_gb:
            yield warning(name, f"{found}; a run with {_REFERENCE_MODEL} needs up to {needed_gb:g} GB there", remedy)
        else:
            sufficient.append(f"{what}: {found}")
    if sufficient:
        yield good("disk", "; ".join(sufficient))


def check_limits(_options: DoctorOptions) -> Iterator[Finding]:
    """Check the memory (at most the container's limit), the limit on open files, and the shared memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    files = math.inf if limit == resource.RLIM_INFINITY else limit
    shared = shutil.disk_usage(_SHM).total if _SHM.is_dir() else None  # in Docker 64 MB by default
    for name, found, is_enough, need, remedy in (
        ("memory", f"{memory / _GB:.0f} GB", memory >= _MIN_MEMORY_GB * _GB,
         f"converting {_REFERENCE_MODEL} reads its weights, 16 GB, into memory",
         f"give the machine or the container {_MIN_MEMORY_GB:g} GB or more for that"),
        ("open files", f"ulimit -n is {files}", files >= _MIN_OPEN_FILES,
         f"hundreds of concurrent episodes need {_MIN_OPEN_FILES}, and Ray needs {_RAY_OPEN_FILES}",
         f"ulimit -n {_RAY_OPEN_FILES} before the run"),
        ("shared memory", f"no {_SHM} on this system" if shared is None else f"{shared / _GB:.1f} GB at {_SHM}",
         shared is None or shared >= _MIN_SHM_GB * _GB,
         f"NCCL and Ray need {_MIN_SHM_GB:g} GB", "start the container with --shm-size=64g, or with --ipc=host"),
    ):  # fmt: skip
        yield good(name, found) if is_enough else warning(name, f"{found}; {need}", remedy)


def check_proxies(options: DoctorOptions) -> Iterator[Finding]:
    """Check that slime's engines reach their router without a proxy.

    This package and slime's rollouts ignore proxy variables. slime's engines do not: they register with `requests`
    (slime/backends/sglang_utils/sglang_engine.py). `requests` uses a proxy for all hosts that are not in no_proxy.
    """
    env = options.env
    used = ", ".join(name for name in _PROXY_VARIABLES if env.get(name))
    excepted = {name.strip() for key in ("no_proxy", "NO_PROXY") for name in env.get(key, "").split(",")}
    # determine the address of slime's router on this machine as slime does (slime/utils/http_utils.py)
    own = env.get("SLIME_HOST_IP")
    if not own:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # sends nothing: the kernel only picks the source address
            own = str(probe.getsockname()[0])
    hosts = list(dict.fromkeys(["127.0.0.1", own or "127.0.0.1"]))
    proxied = [host for host in hosts if host not in excepted]
    if not used or "*" in excepted or not proxied:
        exceptions = "*" if "*" in excepted else ", ".join(hosts)
        yield good("proxies", f"{used} set, and no_proxy has {exceptions}" if used else "none is set")
        return
    problem = f"{used} set without no_proxy for {', '.join(proxied)}"
    found = f"{problem}: slime's engines would contact their router through the proxy"
    yield warning("proxies", found, f"export no_proxy=localhost,{','.join(hosts)}; export NO_PROXY=$no_proxy")


def check_gpus(options: DoctorOptions) -> Iterator[Finding]:
    """Check that nvidia-smi lists, and CUDA_VISIBLE_DEVICES allows, at least as many GPUs as required.

    If there are fewer, yield an error. If no GPU is required and none can be used, yield a warning.
    """
    env = options.env
    required = options.gpus
    if required is None and not env.get("RAY_ADDRESS"):  # with RAY_ADDRESS, training runs on a cluster elsewhere
        num_gpus = env.get("NUM_GPUS", "")
        required = int(num_gpus) if num_gpus.isdecimal() else _TRAINING_GPUS * options.training
    answer = diagnostics.run_program(*_NVIDIA_SMI, env=env, timeout_s=_NVIDIA_SMI_TIMEOUT_S)
    lines = answer.stdout.splitlines() if answer is not None and answer.exit_code == 0 else []
    gpus = [tuple(cells) for cells in ([cell.strip() for cell in line.split(",")] for line in lines) if len(cells) == 3]
    if not gpus:
        if answer is None:
            reason = "no nvidia-smi on the PATH"
        elif answer.exit_code is None:
            reason = f"nvidia-smi did not answer within {_NVIDIA_SMI_TIMEOUT_S:g} s: the driver may hang"
        else:
            reason = f"nvidia-smi {'failed' if answer.exit_code else 'lists no GPU'}: {answer.printed}"
        expected = f"; expected {required}" if required else ""
        found = f"no GPU here: {reason}{expected}; training needs GPUs, an evaluation on a remote server does not"
        remedy = "to train, use a machine whose nvidia-smi lists GPUs; start a container with docker run --gpus all"
        yield missing("gpus", found, remedy, needed=bool(required))
        return
    count, visible = len(gpus), env.get("CUDA_VISIBLE_DEVICES")
    hidden = "" if visible is None else f" of {count} (CUDA_VISIBLE_DEVICES={visible})"
    if visible is not None:
        count = min(count, sum(name.strip() not in ("", "-1") for name in visible.split(",")))
    kinds = ", ".join(sorted({f"{name} with {mib} MiB" for name, mib, _ in gpus}))
    found = f"{count_of(count, 'GPU')}{hidden}: {kinds}; driver {gpus[0][2]}"
    needed = required or 0
    if not count and not needed:
        yield warning("gpus", f"{found}; training needs GPUs", "to train, unset CUDA_VISIBLE_DEVICES")
    elif count < needed:
        remedy = (
            f"use a machine with {count_of(needed, 'GPU')}, or set NUM_GPUS={count} (--gpus {count} for this check)"
        )
        yield error("gpus", f"{found}; expected {needed}", remedy)
    else:
        yield good("gpus", found)


def check_ray(options: DoctorOptions) -> Iterator[Finding]:
    """Check that the command `ray` is installed; the launch scripts check the cluster at RAY_ADDRESS."""
    command = shutil.which("ray", path=options.env.get("PATH", ""))
    if command is not None:
        yield good("ray", f"Ray {installed_version('ray') or ''} with {command}")
        return
    found = "no `ray` on the PATH: slime trains on Ray"
    remedy = "work in the image slimerl/slime, or run pip install 'ray[default]' and activate its environment"
    yield missing("ray", found, remedy, needed=options.training)


def check_wandb(options: DoctorOptions) -> Iterator[Finding]:
    """Check that wandb is installed if it is enabled; the launch scripts check the key."""
    env = options.env
    enabling = [name for name in ("USE_WANDB", "WANDB_API_KEY", "WANDB_KEY") if env.get(name)]
    if env.get("WANDB_MODE") == "offline":
        enabling.append("WANDB_MODE")
    if not enabling or env.get("USE_WANDB") == "0" or env.get("WANDB_MODE") == "disabled":
        yield good("wandb", "off; runs do not log to it")
    elif find_spec("wandb") is None:
        yield error(
            "wandb", f"{enabling[0]} is set, but wandb is not installed", "pip install 'strands-rollout[wandb]'"
        )
    else:
        yield good("wandb", f"on: {enabling[0]} is set")


def check_sandbox(options: DoctorOptions) -> Iterator[Finding]:
    """Check that the code sandbox starts and enforces the requested isolation for code that starts no programs."""

    async def start() -> SandboxReport:
        async with LocalExecutor(isolation="rlimits") as executor:
            report = await executor.start()
            await executor.run("pass")
            return report

    try:
        report = asyncio.run(start())
    except RolloutError as e:
        remedy = "free space in the temporary folder, or set another executor, such as sandbox_fusion"
        yield error("sandbox", f"the code sandbox does not start: {e}", remedy)
        return
    yield from sandbox_findings(report, options.isolation)


def sandbox_findings(report: SandboxReport, isolation: Isolation) -> Iterator[Finding]:
    """Yield a finding for the sandbox, then a finding for each of its layers."""
    found = f"the strongest isolation here is {report.isolation}; expected {isolation}"
    yield good("sandbox", f"{found}; started in {report.start_s:.1f} s", sandbox=asdict(report), wanted=isolation)
    for layer, meaning in LAYER_MEANINGS.items():
        name, lacking = f"sandbox {layer}", f"MISSING ({meaning}): {report.missing.get(layer)}"
        if layer in report.enforced:
            yield good(name, f"{meaning}: {report.enforced[layer]}")
        elif layer not in report.missing:
            yield good(name, f"{meaning}: not needed, because this user is not root")
        elif layer not in LAYERS[isolation]:
            yield skipped(name, f"{lacking}; isolation {isolation} does not include it")
        else:
            weaker = next(mode for mode, layers in LAYERS.items() if layer not in layers or mode == "rlimits")
            alternative = f"or accept less isolation in the settings: executor: {{name: local, isolation: {weaker}}}"
            yield error(name, lacking, f"{_LAYER_REMEDIES[layer]}; {alternative}")

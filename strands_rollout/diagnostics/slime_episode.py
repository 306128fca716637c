"""Checks of slime and Megatron-LM, and a trial episode in slime's own rollout loop.

`python -m strands_rollout.diagnostics.slime_episode CHECKOUT` runs an episode through slime's rollout loop on the
embedded engine, and prints the result as JSON on its last line. It runs in its own process, because slime's state is
process-wide and slime imports torch. The checks find packages without importing them.
"""

import asyncio
import importlib.util
import json
import logging
import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Final
from urllib.parse import urlsplit

from strands_rollout import diagnostics
from strands_rollout.diagnostics import DoctorOptions, Finding, error, good, missing, warning
from strands_rollout.files.json_codec import Json

TESTED_COMMIT: Final = "624b824a898ab0ec1fcb4d373004c7f3852bf515"
# the shipped model writes harmless code, which needs no stronger sandbox
_SETTINGS: Final = {
    "max_tool_iterations": 3,
    "episode_workers": 0,
    "executor": {"name": "local", "isolation": "rlimits"},
}
_TIMEOUT_S: Final = 50.0
_REQUIRED_FILES: Final = (
    "train.py",
    "scripts/models/qwen3-8B.sh",
    "slime/rollout/sglang_rollout.py",
    "slime/utils/types.py",
)
_GIT_TIMEOUT_S: Final = 5.0
_CLONE_REMEDY: Final = (
    "work in the image slimerl/slime, or: git clone https://github.com/THUDM/slime && git -C slime checkout "
    f"{TESTED_COMMIT[:8]} && pip install --no-deps -e slime; then name it with SLIME_DIR or --slime-dir"
)
_NAME: Final = "slime episode"
# packages for clusters, and their modules: slime's rollout modules import them, but an episode does not use them
_CLUSTER_MODULES: Final = {
    "ray": ("ray", "ray.util", "ray.util.scheduling_strategies"),
    "sglang": ("sglang", "sglang.srt", "sglang.srt.constants", "sglang.srt.server_args", "sglang.srt.utils"),
    "sglang_router": ("sglang_router",),
    "wandb": ("wandb",),
}
_QUESTION: Final = "What is the perimeter of a rectangle with sides 781 and 435?"
_ANSWER: Final = "2432"
_REMEDY: Final = (
    "to see the log, run: python -m strands_rollout.diagnostics.slime_episode CHECKOUT; this package is tested with "
    f"slime 0.2.4 to 0.3.1 and with commit {TESTED_COMMIT[:8]}"
)


def check_slime(
    options: DoctorOptions, find_package: diagnostics.FindPackage = importlib.util.find_spec
) -> Iterator[Finding]:
    """Check that an importable `slime` is THUDM's, and that the run's checkout of slime is complete."""
    packages = diagnostics.package_folders("slime", find_package)
    folder = _find_checkout(options, find_package)
    if packages and not any(map(_is_slime, packages)):
        found = (
            f"the importable slime at {packages[0]} is not THUDM's: it lacks slime.rollout.sglang_rollout or "
            "slime.utils.types.Sample. The slime of PyPI is an unrelated package"
        )
        yield error("slime package", found, f"pip uninstall slime; then {_CLONE_REMEDY}")
    elif folder is None:
        found = "no slime found: training needs it; the demo and an evaluation against a server do not"
        yield missing("slime", found, _CLONE_REMEDY, needed=options.training)
    if folder is None:
        return
    absent = [name for name in _REQUIRED_FILES if not (folder / name).is_file()]
    if absent:  # an installed package does not contain the scripts
        found = f"{folder} is not a complete checkout of THUDM/slime: it has no {', '.join(absent)}"
        yield error("slime", found, _CLONE_REMEDY)
        return
    version = re.search(r"""\bversion=["']([^"']+)["']""", _read_text(folder / "setup.py"))
    # mark the checkout as safe: git refuses a checkout owned by another user, as in a container
    git = ("git", "-c", "safe.directory=*", "-C", str(folder), "rev-parse", "HEAD")
    answer = (
        diagnostics.run_program(*git, env=options.env, timeout_s=_GIT_TIMEOUT_S) if (folder / ".git").exists() else None
    )
    commit = answer.stdout[:8] if answer is not None and answer.exit_code == 0 else "unknown"
    yield good("slime", f"slime {version[1] if version else 'of unknown version'} at {folder}, commit {commit}")


def check_megatron(
    options: DoctorOptions, find_package: diagnostics.FindPackage = importlib.util.find_spec
) -> Iterator[Finding]:
    """Check that `find_megatron` finds Megatron-LM."""
    found = find_megatron(options, find_package)
    if found is not None:
        yield good("megatron", f"Megatron-LM at {found}")
        return
    remedy = (
        "work in the image slimerl/slime, or set MEGATRON_DIR or --megatron-dir to the folder that has megatron/core"
    )
    named = _named_megatron(options)
    problem = f"{named} has no megatron/core" if named else "no Megatron-LM found"
    because = f"{problem}: training and the conversion of checkpoints need it"
    yield missing("megatron", because, remedy, needed=bool(named) or options.training)


def find_megatron(
    options: DoctorOptions, find_package: diagnostics.FindPackage = importlib.util.find_spec
) -> Path | None:
    """Return the first candidate for Megatron-LM's folder that contains megatron/core; None if none does.

    If `megatron_dir` or MEGATRON_DIR is set, that folder is the only candidate. Otherwise, the candidates are
    Megatron-LM beside slime's checkout, then the importable package. The launch scripts look in the same places.
    """
    named, slime = _named_megatron(options), _find_checkout(options, find_package)
    importable = (package.parent for package in diagnostics.package_folders("megatron", find_package))
    beside = [slime.absolute().parent / "Megatron-LM"] if slime else []
    folders = [named] if named else [*beside, *importable]
    return next((folder for folder in folders if (folder / "megatron" / "core").is_dir()), None)


def _named_megatron(options: DoctorOptions) -> Path | None:
    return options.megatron_dir or options.path_in_env("MEGATRON_DIR")


def _find_checkout(options: DoctorOptions, find_package: diagnostics.FindPackage) -> Path | None:
    packages = filter(_is_slime, diagnostics.package_folders("slime", find_package))
    named = options.slime_dir or options.path_in_env("SLIME_DIR")
    return named or next((package.parent for package in packages), None)


def _is_slime(package: Path) -> bool:
    has_loop = (package / "rollout" / "sglang_rollout.py").is_file()
    return (
        has_loop and re.search(r"^class Sample\b", _read_text(package / "utils" / "types.py"), re.MULTILINE) is not None
    )


def _read_text(file: Path) -> str:
    return file.read_text(errors="replace") if file.is_file() else ""


def check_slime_episode(
    options: DoctorOptions,
    find_package: diagnostics.FindPackage = importlib.util.find_spec,
    timeout_s: float = _TIMEOUT_S,
) -> Iterator[Finding]:
    """Check that slime's rollout loop completes an episode; without a checkout of slime, yield nothing."""
    checkout = _find_checkout(options, find_package)
    if checkout is None or not _is_slime(checkout / "slime"):
        return
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), options.env.get("PYTHONPATH")]))
    env = {**options.env, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    answer = diagnostics.run_program(sys.executable, "-m", __name__, str(checkout), env=env, timeout_s=timeout_s)
    if answer is None or answer.exit_code is None:
        yield error(_NAME, f"slime's loop returned no episode within {timeout_s:g} s", _REMEDY)
        return
    try:
        episode = json.loads(answer.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        fault = (answer.stderr.splitlines() or [answer.printed])[-1]
        yield error(_NAME, f"slime's loop could not be run: {fault}", _REMEDY)
    else:
        yield _episode_finding(episode, training=options.training)


def _episode_finding(episode: Json, *, training: bool) -> Finding:
    if package := episode.get("missing"):
        found = f"no episode was played: slime's rollout needs the package {package!r}, which is not installed"
        return missing(_NAME, found, "run the doctor in slime's image, or install that package", needed=training)
    found = f"slime's loop returned an episode as {episode['status']}"
    if episode["status"] not in ("completed", "truncated"):
        return error(_NAME, f"{found} ({episode['stop_reason']}): {episode['error']}", _REMEDY)
    found += f": {episode['tokens']} tokens, {episode['trained']} of them trained, reward {episode['reward']}"
    if episode["placeholders"]:
        found += f"; not installed, and not needed for an episode: {', '.join(episode['placeholders'])}"
    if episode["violations"]:
        return error(_NAME, f"{found}; slime's trainer can't use it: {'; '.join(episode['violations'])}", _REMEDY)
    if episode["warnings"]:
        return warning(_NAME, f"{found}; {'; '.join(episode['warnings'])}", _REMEDY)
    return good(_NAME, found)


@contextmanager
def make_importable(checkout: Path) -> Iterator[list[str]]:
    """Make slime importable during the block, with placeholders for missing cluster packages.

    Yields the names of the missing packages.
    """
    absent = [package for package in _CLUSTER_MODULES if importlib.util.find_spec(package) is None]
    placeholders = [name for package in absent for name in _CLUSTER_MODULES[package]]
    sys.path.insert(0, str(checkout))
    sys.modules.update({name: _Placeholder(name) for name in placeholders})
    try:
        yield absent
    finally:
        sys.path.remove(str(checkout))
        for name in placeholders:
            sys.modules.pop(name, None)


class _Placeholder(ModuleType):
    """A module whose names without leading "__" are decorators that change nothing."""

    __path__ = []  # noqa: RUF012 - declared by ModuleType
    __version__ = "0.3.1"  # slime up to 0.3.0 chooses the URL of the list of workers by the router's version

    def __getattr__(self, name: str) -> Callable[..., object]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _return_unchanged


def _return_unchanged(value: object = None, **_options: object) -> object:
    return value


class _Arguments(Namespace):
    """slime's arguments; unset arguments are None, as most of slime's defaults are."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


async def _play(checkpoint: Path) -> dict[str, Json]:
    from slime.rollout import sglang_rollout
    from slime.utils.types import Sample

    from strands_rollout.engine import engine_process
    from strands_rollout.samples import facts_of
    from strands_rollout.slime_plugin.sample_contract import contract_violations

    args = _Arguments(
        hf_checkpoint=str(checkpoint),
        sglang_server_concurrency=1,
        rollout_num_gpus=1,
        rollout_num_gpus_per_engine=1,
        rollout_temperature=0.0,
        rollout_top_p=1.0,
        rollout_top_k=-1,
        rollout_max_response_len=1024,
        rollout_skip_special_tokens=False,
        n_samples_per_prompt=1,
        custom_generate_function_path="strands_rollout.generate",
        custom_rm_path="strands_rollout.reward_func",
        reward_key="score",
        strands_rollout=_SETTINGS,
    )
    async with engine_process() as base_url:
        args.sglang_router_ip, args.sglang_router_port = urlsplit(base_url).hostname, urlsplit(base_url).port
        state = sglang_rollout.GenerateState(args)
        group = [Sample(index=0, group_index=0, prompt=[{"role": "user", "content": _QUESTION}], label=_ANSWER)]
        [sample] = await sglang_rollout.generate_and_rm_group(args, group, dict(state.sampling_params))
    facts = facts_of(sample)
    return {
        "status": sample.status.value,
        "stop_reason": facts.stop_reason,
        "error": facts.error,
        "tokens": len(sample.tokens),
        "trained": sum(sample.loss_mask or []),
        "reward": sample.get_reward_value(args) if sample.reward else None,
        "violations": contract_violations(sample, reward_key=args.reward_key, decode=state.tokenizer.decode),
    }


def _main(checkout: Path) -> dict[str, Json]:
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("strands_rollout").addHandler(handler)
    with make_importable(checkout) as placeholders:
        try:
            episode = asyncio.run(_play(diagnostics.SHIPPED_TOKENIZER))
        except ModuleNotFoundError as e:
            if (e.name or "").startswith(("slime", "strands_rollout")):
                raise
            return {"missing": e.name}
    return {**episode, "placeholders": placeholders, "warnings": warnings}


if __name__ == "__main__":
    print(json.dumps(_main(Path(sys.argv[1]))))

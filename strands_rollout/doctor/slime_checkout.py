"""Is the slime here THUDM's, is its checkout the tested one, and where is Megatron?

Finds packages without importing them. The `slime` of PyPI is an unrelated package.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Final

from strands_rollout.doctor.finding import Finding, error, good, lacking, warning
from strands_rollout.doctor.outside_command import ask
from strands_rollout.doctor.python_packages import installed_version
from strands_rollout.doctor.question import Question

TESTED_COMMIT: Final = "624b824a898ab0ec1fcb4d373004c7f3852bf515"
TESTED_VERSION: Final = "0.3.1"
_URL: Final = "https://github.com/THUDM/slime"
_NEEDED: Final = ("train.py", "scripts/models/qwen3-8B.sh", "slime/rollout/sglang_rollout.py", "slime/utils/types.py")
_GIT_S: Final = 5.0
_CLONE: Final = (
    f"work in the image slimerl/slime, or: git clone {_URL} && git -C slime checkout {TESTED_COMMIT[:8]} && "
    "pip install --no-deps -e slime; then name it with SLIME_DIR or --slime-dir"
)
FindPackage = Callable[[str], ModuleSpec | None]


def check_slime(question: Question, find_package: FindPackage = importlib.util.find_spec) -> list[Finding]:
    """Which `slime` would be imported, and which checkout would be run.

    Args:
        question: Names the checkout.
        find_package: Finds what `import` would take, without importing it.
    """
    importable = _package_folders("slime", find_package)
    ours = next((folder for folder in importable if _is_slime(folder)), None)
    findings = [] if ours or not importable else [_wrong_slime(importable[0])]
    named = question.slime_dir or _path_of(question, "SLIME_DIR")
    if named is not None:
        return [*findings, *_check_checkout(named, question)]
    if ours is not None:
        return _check_checkout(ours.parent, question)
    missing = "no slime here: training needs it; the demo and an evaluation against a server do not"
    return findings or [lacking("slime", missing, _CLONE, training=question.training)]


def check_megatron(question: Question, find_package: FindPackage = importlib.util.find_spec) -> list[Finding]:
    """Where Megatron-LM is: as named, else beside slime's checkout as the scripts look for it, else importable."""
    named = question.megatron_dir or _path_of(question, "MEGATRON_DIR")
    if named is not None:
        if (named / "megatron" / "core").is_dir():
            return [good("megatron", f"Megatron-LM at {named}")]
        remedy = "name the folder that holds megatron/core with MEGATRON_DIR or --megatron-dir"
        return [error("megatron", f"{named} has no megatron/core: not a checkout of Megatron-LM", remedy)]
    slime = question.slime_dir or _path_of(question, "SLIME_DIR")
    slimes = [folder.parent for folder in _package_folders("slime", find_package)] if slime is None else [slime]
    beside = [folder.absolute().parent / "Megatron-LM" for folder in slimes]
    importable = [folder.parent for folder in _package_folders("megatron", find_package)]
    for folder in (*beside, *importable):
        if (folder / "megatron" / "core").is_dir():
            return [good("megatron", f"Megatron-LM at {folder}")]
    remedy = "work in the image slimerl/slime, or name a checkout of Megatron-LM with MEGATRON_DIR or --megatron-dir"
    missing = "no Megatron-LM here: training and the conversion of checkpoints need it"
    return [lacking("megatron", missing, remedy, training=question.training)]


def _path_of(question: Question, name: str) -> Path | None:
    value = question.env.get(name)
    return Path(value) if value else None


def _package_folders(name: str, find_package: FindPackage) -> list[Path]:
    try:
        spec = find_package(name)
    except (ImportError, ValueError):
        return []
    if spec is None or (spec.origin is None and name == "slime"):
        return []  # slime is no namespace package: a mere folder of that name stands in nobody's way
    if spec.submodule_search_locations is None:
        return [Path(str(spec.origin))]
    return [Path(folder) for folder in spec.submodule_search_locations]


def _is_slime(package: Path) -> bool:
    types = package / "utils" / "types.py"
    if not types.is_file() or not (package / "rollout" / "sglang_rollout.py").is_file():
        return False
    return re.search(r"^class Sample\b", types.read_text(errors="replace"), re.MULTILINE) is not None


def _wrong_slime(package: Path) -> Finding:
    version = installed_version("slime")
    found = (
        f"the importable slime, {version or 'of no known version'} at {package}, is not THUDM's: it has no "
        "slime.utils.types.Sample. The slime of PyPI is an unrelated package"
    )
    return error("slime package", found, f"pip uninstall slime; then {_CLONE}")


def _check_checkout(folder: Path, question: Question) -> list[Finding]:
    if not folder.is_dir():
        return [error("slime", f"{folder} is no folder; expected a checkout of THUDM/slime", _CLONE)]
    missing = [name for name in _NEEDED if not (folder / name).is_file()]
    if missing == list(_NEEDED):
        return [error("slime", f"{folder} is not a checkout of THUDM/slime: it has no {missing[0]}", _CLONE)]
    findings = [_check_commit(folder, question)]
    if missing:
        # an installed package comes without the scripts
        findings.append(error("slime files", f"{folder} lacks {', '.join(missing)}: not a whole checkout", _CLONE))
    return findings


def _check_commit(folder: Path, question: Question) -> Finding:
    commit, why_not = _commit(folder, question)
    if commit == TESTED_COMMIT:
        return good("slime", f"slime at {folder}, commit {commit[:8]}: the tested one")
    version = _declared_version(folder)
    if commit is None and version == TESTED_VERSION:
        return good("slime", f"slime {version} at {folder}, the tested version; its commit is not known ({why_not})")
    shown = f"commit {commit[:8]}" if commit else f"version {version or 'unknown'} ({why_not})"
    found = f"slime at {folder} is {shown}; tested with {TESTED_COMMIT[:8]} (slime {TESTED_VERSION})"
    remedy = f"git -C {folder} checkout {TESTED_COMMIT[:8]}; or check the flags: strands-rollout doctor --flags SCRIPT"
    return warning("slime", found, remedy)


def _commit(folder: Path, question: Question) -> tuple[str | None, str]:
    """The commit of a checkout; else None, and why not."""
    if not (folder / ".git").exists():
        return None, "no git checkout"
    # a checkout that another user owns, as in a container, is refused by git unless it is called safe
    git = ("git", "-c", "safe.directory=*", "-C", str(folder))
    answer = ask(*git, "rev-parse", "HEAD", env=question.env, limit_s=_GIT_S)
    if answer is None:
        return None, "no git on the PATH"
    if answer.exit_code is None:
        return None, f"git did not answer within {_GIT_S:g} s"
    return (answer.stdout, "") if answer.ok else (None, answer.words)


def _declared_version(folder: Path) -> str | None:
    setup = folder / "setup.py"
    found = re.search(r"""\bversion=["']([^"']+)["']""", setup.read_text(errors="replace")) if setup.is_file() else None
    return found[1] if found else None

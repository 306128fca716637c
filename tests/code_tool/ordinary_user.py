"""An environment in which tests run as an ordinary user: Python, libraries, this package, and its sandbox's tests.

The tests may run as root, with a Python in root's home that other users can't reach. Files are hard links where
possible, to save time and space; directories and the project's files belong to the user.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from attack_targets import remove_tree

import strands_rollout
from strands_rollout.code_tool.local import library_files

USER_ID: Final = 54_321  # belongs to no user
_TESTS: Final = Path(__file__).parents[1]
_NEEDED: Final = ("pytest", "pytest-asyncio", "pytest-timeout", "numpy", "sympy")
_IGNORED: Final = shutil.ignore_patterns(
    "site-packages", "__pycache__", "test", "tests", "idlelib", "*.a", "*.safetensors"
)


class OrdinaryUser:
    """A user who owns a home, a virtual environment and a copy of this project below one folder.

    Args:
        folder: Empty folder that every user can enter.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._python = self._make_environment(self._base_python())
        self._copy_project()
        for place, folders, files in os.walk(folder):
            for path in (Path(place), *(Path(place, file) for file in files)):
                if path.lstat().st_nlink == 1 or path.is_dir():  # files with other links stay root's
                    os.chown(path, USER_ID, USER_ID, follow_symlinks=False)
            del folders

    def results(self, *arguments: str, limit_s: float) -> dict[str, tuple[str, str]]:
        report = self._folder / "home" / "report.xml"
        command = [self._python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *arguments]
        done = subprocess.run(
            command,
            user=USER_ID,
            group=USER_ID,
            extra_groups=[],
            cwd=self._folder / "project",
            env={"PATH": os.defpath, "HOME": str(self._folder / "home"), "LANG": "C.UTF-8"},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        assert report.exists(), done.stdout[-3000:] + done.stderr[-3000:]
        return dict(_outcomes(report))

    def _base_python(self) -> Path:
        """Return the current interpreter if the user can run it, else a copy."""
        interpreter = Path(os.path.realpath(sys.executable))
        with contextlib.suppress(PermissionError):
            subprocess.run(
                [interpreter, "-c", "import math"], user=USER_ID, group=USER_ID, extra_groups=[], cwd="/", check=True
            )
            return interpreter
        prefix = self._folder / "python"
        shutil.copytree(sys.base_prefix, prefix, symlinks=True, ignore=_IGNORED, copy_function=_link)
        return prefix / interpreter.relative_to(os.path.realpath(sys.base_prefix))

    def _make_environment(self, base: Path) -> Path:
        """Create a virtual environment with the tests' libraries and no path to root's files."""
        environment = self._folder / "venv"
        subprocess.run([base, "-m", "venv", "--without-pip", environment], check=True)
        self._site_packages = next(environment.glob("lib/python*/site-packages"))
        for folder, names in library_files(_NEEDED).items():
            for source in (Path(folder, name) for name in names):
                if source.is_dir():
                    shutil.copytree(source, self._site_packages / source.name, copy_function=_link)
                elif source.exists():
                    _link(str(source), str(self._site_packages / source.name))
        return environment / "bin" / "python"

    def _copy_project(self) -> None:
        """Copy the package to site-packages, as an installation does, and the tests to a project folder."""
        package = Path(strands_rollout.__file__).parent
        shutil.copytree(package, self._site_packages / package.name, ignore=_IGNORED)
        project = self._folder / "project"
        shutil.copytree(_TESTS / "code_tool", project / "tests" / "code_tool", ignore=_IGNORED)
        shutil.copytree(_TESTS / "support", project / "tests" / "support", ignore=_IGNORED)
        for shared in _TESTS.glob("*.py"):
            if not shared.name.startswith("test_"):  # conftest.py and modules that the tests import
                shutil.copy(shared, project / "tests")
        shutil.copy(_TESTS.parent / "pyproject.toml", project)
        (self._folder / "home").mkdir()


def _link(source: str, goal: str) -> str:
    """Create a hard link, or a copy if `goal` is on another disk; the file stays root's."""
    try:
        os.link(source, goal)
    except OSError:
        shutil.copy2(source, goal)
    return goal


def _outcomes(report: Path) -> Iterator[tuple[str, tuple[str, str]]]:
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314 - our own file
        problems = [
            (child.tag, child.get("message", "")) for child in case if child.tag in ("failure", "error", "skipped")
        ]
        yield case.get("name", ""), problems[0] if problems else ("passed", "")


@contextlib.contextmanager
def ordinary_user() -> Iterator[OrdinaryUser]:
    folder = Path(tempfile.mkdtemp(prefix="ordinary-user-", dir="/tmp"))
    folder.chmod(0o755)
    try:
        yield OrdinaryUser(folder)
    finally:
        remove_tree(folder)

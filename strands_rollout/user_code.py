"""Load a user's code by its dotted path, or by the path of a Python file; find files that a configuration names.

Every setting and option that names code is resolved here. If the code is missing, the error message has a hint where
possible: the nearest existing name, the searched places, or the names that the module defines.
"""

import difflib
import hashlib
import importlib
import importlib.util
import pkgutil
import re
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import ModuleType
from typing import Final

from strands_rollout.errors import ToolError
from strands_rollout.exits import exits_as_errors

_FILE: Final = re.compile(r"(?P<file>.+\.py)(?::(?P<names>[^\W\d]\w*(?:\.[^\W\d]\w*)*))?")
_MAX_NAMES_SHOWN: Final = 8
_folders: Final[list[Path]] = []  # searched folders: the configurations' folders and the working directory
_modules: Final[dict[Path, ModuleType]] = {}  # imported files, by resolved path
_import_lock: Final = threading.RLock()


def add_config_folder(path: str | Path | None) -> None:
    """From now on, look up files in a configuration's folder, then in the working directory; add both to `sys.path`.

    The folders of earlier configurations come after these two. If `path` is None, only the working directory is added,
    as the last folder, unless it is searched already. If `path` is a link, the folder of the link is searched before
    the folder of its target. Folders already in `sys.path` keep their place; new folders are added at its front.
    """
    own = [] if path is None else [Path(path).absolute().parent, Path(path).resolve().parent]
    folders = list(dict.fromkeys([*own, Path.cwd()]))
    if folders != _folders[: len(folders)]:
        _folders[:] = dict.fromkeys([*folders, *_folders] if own else [*_folders, *folders])
    sys.path[:0] = [str(folder) for folder in folders if str(folder) not in sys.path]


def find_file(path: str) -> Path:
    """Return the file or folder that a configuration names; `path` itself if it does not exist.

    A relative path is looked up in the searched folders in their order (see `add_config_folder`).
    """
    return next((candidate for candidate in _candidates(path) if candidate.exists()), Path(path))


def resolve(path: str) -> object:
    """Import and return the module or attribute at a path.

    Args:
        path: `package.module.attribute` or `package.module:attribute`; or, for a file, `./file.py` or
            `./file.py:attribute`, absolute or relative to a folder that is searched (see `add_config_folder`). A file
            is imported once. If an import statement would find the file by its own name, the module has that name.

    Raises:
        ToolError: The path is malformed or does not exist, or its module can't be imported. The message has the error
            of the import, or a hint where possible.
    """
    if isinstance(path, str) and (match := _FILE.fullmatch(path)):
        found: object = _import_file(match["file"], path)
        names: Sequence[str] = match["names"].split(".") if match["names"] else []
    else:
        found, names = _import_dotted(path)
    for name in names:
        if not hasattr(found, name):
            owner = getattr(found, "__name__", type(found).__name__)
            raise ToolError(f"can't load {path!r}: {owner!r} has no attribute {name!r}{suggest_name(name, found)}")
        found = getattr(found, name)
    return found


def source_file(path: str) -> Path | None:
    """Return the Python file of the module in a path; None for a module without a file.

    Raises:
        ToolError: The module does not exist or can't be imported.
    """
    match = _FILE.fullmatch(path)
    module = _import_file(match["file"], path) if match else _import_dotted(path)[0]
    file = getattr(module, "__file__", None)
    return None if file is None else Path(file)


def suggest_name(name: str, owner: object) -> str:
    """Return a hint for a missing attribute of `owner`: the closest public name.

    If no name is close, the hint for a module is its file and the names that it defines; for any other object, it is
    "". The file shows whether the module is the user's or another module of the same name.
    """
    inside = [module.name for module in pkgutil.iter_modules(getattr(owner, "__path__", ()))]
    public = [known for known in [*dir(owner), *inside] if not known.startswith("_")]
    if close := difflib.get_close_matches(name, public, n=1):
        return f"; did you mean {close[0]!r}?"
    if not isinstance(owner, ModuleType):
        return ""
    own = [known for known in public if getattr(getattr(owner, known, None), "__module__", "") == owner.__name__]
    more = f" and {len(own) - _MAX_NAMES_SHOWN} more" if len(own) > _MAX_NAMES_SHOWN else ""
    shown = ", ".join(own[:_MAX_NAMES_SHOWN]) or "none"
    return f"; {getattr(owner, '__file__', None) or owner.__name__} defines {shown}{more}"


def _import_dotted(path: str) -> tuple[ModuleType, Sequence[str]]:
    """Import the innermost module of a dotted path; return it and the names of attributes after it."""
    if not isinstance(path, str) or not all(part.isidentifier() for part in path.replace(":", ".").split(".")):
        raise ToolError(f"{path!r} is not a dotted path; expected 'package.module.name' or './file.py:name'")
    module_path, _, attributes = path.partition(":")
    names = module_path.split(".")
    found: ModuleType | None = None
    depth = 0
    while depth < len(names):
        module_path = ".".join(names[: depth + 1])
        if found is not None and not hasattr(found, "__path__") and module_path not in sys.modules:
            break  # not a package: the following names are attributes
        if (module := _import_module(module_path, path)) is None:
            break
        found = module
        depth += 1
    if found is None or (attributes and depth < len(names)):
        missing = ".".join(names[: depth + 1])
        raise ToolError(f"can't load {path!r}: there is no module {missing!r}{_suggest_module(names[depth], found)}")
    return found, [*names[depth:], *(attributes.split(".") if attributes else [])]


def _import_module(module_path: str, path: str) -> ModuleType | None:
    """Import a module; return None if it does not exist."""
    try:
        with exits_as_errors(f"importing {module_path!r}"):
            return importlib.import_module(module_path)
    except Exception as e:  # a user's module may raise anything while it is imported
        if isinstance(e, ModuleNotFoundError) and e.name is not None and f"{module_path}.".startswith(f"{e.name}."):
            return None
        raise _import_error(path, module_path, e) from e


def _import_error(path: str, module: str, error: Exception) -> ToolError:
    if isinstance(error, ToolError) and error.__cause__ is not None:  # from `exits_as_errors`: sys.exit() was called
        return ToolError(f"can't load {path!r}: importing {module!r} raised {error.__cause__!r}")
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        needed = f"needs {error.name!r}, and there is no such module{_install_hint(error.name)}"
        return ToolError(f"can't load {path!r}: importing {module!r} {needed}")
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.name == "<module>"]
    # the message of an ImportError usually names a file already
    location = f" ({own[-1].filename}, line {own[-1].lineno})" if own and not isinstance(error, ImportError) else ""
    return ToolError(f"can't load {path!r}: importing {module!r} raised {type(error).__name__}: {error}{location}")


def _import_file(name: str, path: str) -> ModuleType:
    """Import the Python file `name`; errors quote `path`, the path as the user wrote it, with any attribute names."""
    candidates = _candidates(name)
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None:
        existing = [other.stem for file in candidates for other in file.parent.glob("*.py") if other.is_file()]
        near = difflib.get_close_matches(Path(name).stem, existing, n=1)
        hint = f"; did you mean {name.removesuffix(Path(name).name)}{near[0]}.py?" if near else ""
        raise ToolError(f"can't load {path!r}: there is no file {' or '.join(map(str, candidates))}{hint}")
    try:
        with exits_as_errors(f"importing {name!r}"), _import_lock:
            if (file := file.resolve()) not in _modules:
                _modules[file] = _import_resolved(file)
            return _modules[file]
    except Exception as e:  # a user's file may raise anything
        raise _import_error(path, name, e) from e


def _import_resolved(file: Path) -> ModuleType:
    """Import a file under its own name if an import statement would find it, else under a name with its path's hash."""
    folder, name, origin = file.parent, file.stem, None
    while (folder / "__init__.py").is_file():
        folder, name = folder.parent, f"{folder.name}.{name}"
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # so that the file can import its neighbors
    importlib.invalidate_caches()
    with suppress(Exception):  # a user's package may raise anything when it is imported, and a module may have no spec
        origin = getattr(importlib.util.find_spec(name), "origin", None)
    if origin is not None and Path(origin).resolve() == file:
        return importlib.import_module(name)
    # an import statement would find another file of this name
    name = f"{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # noqa: PT018, S101
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    with ExitStack() as failure:
        failure.callback(sys.modules.pop, name)
        spec.loader.exec_module(module)
        failure.pop_all()
    return module


def _candidates(file: str) -> list[Path]:
    return list(dict.fromkeys(folder / Path(file).expanduser() for folder in [*_folders, Path.cwd()]))


def _suggest_module(name: str, package: ModuleType | None) -> str:
    folders = [str(folder) for folder in _candidates("")] if package is None else list(getattr(package, "__path__", ()))
    if close := difflib.get_close_matches(name, [module.name for module in pkgutil.iter_modules(folders)], n=1):
        return f"; did you mean {close[0]!r}?"
    return f", installed or in {' or '.join(folders)}{_install_hint(name)}"


_EXTRAS: Final = {"strands_tools": "tools", "verifiers": "verifiers"}


def _install_hint(module: str) -> str:
    extra = _EXTRAS.get(module.partition(".")[0])
    return "" if extra is None else f"; run: pip install 'strands-rollout[{extra}]'"

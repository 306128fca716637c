"""Finds a user's code by its dotted path, or by the path of a Python file; errors say where it was looked for.

The one resolver of all settings and options that name code.
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
_SHOWN: Final = 8
_folders: Final[list[Path]] = []  # of configurations that were used, the last one's first
_modules: Final[dict[Path, ModuleType]] = {}  # by their files, whose links are resolved
_importing: Final = threading.RLock()


def search_beside(path: str | Path | None) -> None:
    """Find modules and files in a configuration's folder, then in the working directory, as from a script's own."""
    own = [] if path is None else [Path(path).absolute().parent, Path(path).resolve().parent]
    folders = list(dict.fromkeys([*own, Path.cwd()]))
    if folders != _folders[: len(folders)]:
        # where no configuration is named, one that was used before goes before the working directory
        _folders[:] = dict.fromkeys([*folders, *_folders] if own else [*_folders, *folders])
    sys.path[:0] = [str(folder) for folder in folders if str(folder) not in sys.path]


def beside(path: str) -> Path:
    """What a configuration names: relative to its folder, else to the working directory."""
    return next((place for place in _places(path) if place.exists()), Path(path))


def resolve(path: str) -> object:
    """What is at a path.

    Args:
        path: `package.module.attribute` or `package.module:attribute`; or, of a file, `./file.py` or
            `./file.py:attribute`, relative to the configuration's folder or the working directory. A file is imported
            once, under its own name where an import statement would find it by that.

    Raises:
        ToolError: Nothing can be found or imported there. The message says where it was looked for, or what is nearest.
    """
    if isinstance(path, str) and (match := _FILE.fullmatch(path)):
        found: object = _file_module(match["file"], path)
        names: Sequence[str] = match["names"].split(".") if match["names"] else []
    else:
        found, names = _dotted(path)
    for name in names:
        if not hasattr(found, name):
            owner = getattr(found, "__name__", type(found).__name__)
            raise ToolError(f"can't load {path!r}: {owner!r} has no attribute {name!r}{nearest(name, found)}")
        found = getattr(found, name)
    return found


def source_of(path: str) -> Path | None:
    """The Python file that a path names, or names something in; None of a module without one.

    Raises:
        ToolError: As `resolve`.
    """
    match = _FILE.fullmatch(path)
    module = _file_module(match["file"], path) if match else _dotted(path)[0]
    file = getattr(module, "__file__", None)
    return None if file is None else Path(file)


def nearest(name: str, owner: object) -> str:
    """A hint: the closest public name, else what the module defines, and where: another may go by a user's name."""
    inside = [module.name for module in pkgutil.iter_modules(getattr(owner, "__path__", ()))]
    public = [known for known in [*dir(owner), *inside] if not known.startswith("_")]
    if close := difflib.get_close_matches(name, public, n=1):
        return f"; did you mean {close[0]!r}?"
    if not isinstance(owner, ModuleType):
        return ""
    own = [known for known in public if getattr(getattr(owner, known, None), "__module__", "") == owner.__name__]
    return f"; {getattr(owner, '__file__', None) or owner.__name__} holds {', '.join(own[:_SHOWN]) or 'none'}"


def _dotted(path: str) -> tuple[ModuleType, Sequence[str]]:
    """As much of a dotted path as is modules, and the attributes that follow."""
    if not isinstance(path, str) or not all(part.isidentifier() for part in path.replace(":", ".").split(".")):
        raise ToolError(f"{path!r} is not a dotted path; expected 'package.module.name' or './file.py:name'")
    module_path, _, attributes = path.partition(":")
    names = module_path.split(".")
    found: ModuleType | None = None
    depth = 0
    while depth < len(names):
        module_path = ".".join(names[: depth + 1])
        if found is not None and not hasattr(found, "__path__") and module_path not in sys.modules:
            break  # no package, so that what follows are attributes
        if (module := _import(module_path, path)) is None:
            break
        found = module
        depth += 1
    if found is None or (attributes and depth < len(names)):
        missing = ".".join(names[: depth + 1])
        raise ToolError(f"can't load {path!r}: there is no module {missing!r}{_nearest_module(names[depth], found)}")
    return found, [*names[depth:], *(attributes.split(".") if attributes else [])]


def _import(module_path: str, path: str) -> ModuleType | None:
    """The module, or None where no such module exists; a module that exists but fails to import is an error."""
    try:
        with exits_as_errors("it"):
            return importlib.import_module(module_path)
    except Exception as e:  # a user's module may raise anything while it is imported
        if isinstance(e, ModuleNotFoundError) and e.name is not None and f"{module_path}.".startswith(f"{e.name}."):
            return None
        raise _failed(path, module_path, e) from e


def _failed(path: str, module: str, error: Exception) -> ToolError:
    """The error of a module that exists and can't be imported."""
    if isinstance(error, ToolError) and error.__cause__ is not None:  # what sys.exit() was made into
        return ToolError(f"can't load {path!r}: importing {module!r} raised {error.__cause__!r}")
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        needed = f"needs {error.name!r}, and there is no such module{_remedy(error.name)}"
        return ToolError(f"can't load {path!r}: importing {module!r} {needed}")
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.name == "<module>"]
    # of a SyntaxError or ImportError the message says where
    place = f" ({own[-1].filename}, line {own[-1].lineno})" if own and not isinstance(error, ImportError) else ""
    return ToolError(f"can't load {path!r}: importing {module!r} raised {type(error).__name__}: {error}{place}")


def _file_module(name: str, path: str) -> ModuleType:
    places = _places(name)
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        beside = [other.stem for place in places for other in place.parent.glob("*.py") if other.is_file()]
        near = difflib.get_close_matches(Path(name).stem, beside, n=1)
        hint = f"; did you mean {name.removesuffix(Path(name).name)}{near[0]}.py?" if near else ""
        raise ToolError(f"can't load {path!r}: there is no file {' or '.join(map(str, places))}{hint}")
    try:
        with exits_as_errors("it"), _importing:
            if (file := file.resolve()) not in _modules:
                _modules[file] = _imported(file)
            return _modules[file]
    except Exception as e:  # a user's file may raise anything
        raise _failed(path, name, e) from e


def _imported(file: Path) -> ModuleType:
    folder, name, origin = file.parent, file.stem, None
    while (folder / "__init__.py").is_file():
        folder, name = folder.parent, f"{folder.name}.{name}"
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # for what lies beside it
    importlib.invalidate_caches()
    with suppress(Exception):  # a user's package may raise anything when it is imported, and a module may have no spec
        origin = getattr(importlib.util.find_spec(name), "origin", None)
    if origin is not None and Path(origin).resolve() == file:
        return importlib.import_module(name)
    # by that name another file is found
    name = f"{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # noqa: PT018, S101
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    with ExitStack() as failure:
        failure.callback(sys.modules.pop, name)
        spec.loader.exec_module(module)
        failure.pop_all()
    return module


def _places(file: str) -> list[Path]:
    return list(dict.fromkeys(folder / Path(file).expanduser() for folder in [*_folders, Path.cwd()]))


def _nearest_module(name: str, package: ModuleType | None) -> str:
    """A hint where a module is missing: the closest one, or where it was looked for."""
    folders = [str(place) for place in _places("")] if package is None else list(getattr(package, "__path__", ()))
    if close := difflib.get_close_matches(name, [module.name for module in pkgutil.iter_modules(folders)], n=1):
        return f"; did you mean {close[0]!r}?"
    return f", installed or in {' or '.join(folders)}{_remedy(name)}"


def _remedy(module: str) -> str:
    return "; pip install 'strands-rollout[tools]'" if module == "strands_tools" else ""

"""What the template imports and warms up, so that no child has to: a fork starts with all of it in memory."""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Final

# fmt: off
_STANDARD: Final = (
    "array", "ast", "base64", "bisect", "calendar", "cmath", "collections", "contextlib", "copy", "csv",
    "dataclasses", "datetime", "decimal", "enum", "fractions", "functools", "gc", "hashlib", "heapq", "inspect",
    "io", "itertools", "json", "keyword", "linecache", "locale", "math", "numbers", "operator", "pprint", "queue",
    "random", "re", "secrets", "shutil", "statistics", "string", "struct", "tempfile", "textwrap", "threading",
    "time", "timeit", "traceback", "types", "typing", "unicodedata", "uuid", "warnings", "zlib",
)
# fmt: on
_SUBMODULES: Final = {
    "numpy": ["numpy.linalg", "numpy.random", "numpy.fft", "numpy.polynomial", "numpy.ma"],
    "sympy": ["sympy.ntheory.modular", "sympy.solvers.diophantine", "sympy.parsing.sympy_parser"],
}
# what is first used is first loaded and cached: about half of the time that a short sympy program takes
_WARM_UP: Final = {
    "numpy": """
from numpy import *
a = array([[4.0, 1.0], [2.0, 3.0]]); linalg.solve(a, a[0]); linalg.eig(a); (a @ a).sum(); str(a); roots([1, -3, 2])
""",
    "sympy": """
from sympy import *
x, y = symbols("x y"); n = symbols("n", integer=True, positive=True)
str(solve(x**2 - 5*x + 6, x)); solve([x + y - 3, x - y - 1], [x, y]); solve(x**3 - 2*x + 1, x)
str(simplify(sin(x)**2 + cos(x)**2 + (x**2 - 1)/(x - 1))); factor(x**3 - 1); expand((x + y)**4)
integrate(x*exp(x), (x, 0, 1)); diff(sin(x)*x, x); limit(sin(x)/x, x, 0); series(exp(x), x, 0, 3)
summation(n, (n, 1, 10)); Matrix([[1, 2], [3, 4]]).det(); factorint(360); isprime(97); Rational(1, 3) + sqrt(8)
binomial(10, 3); N(pi, 20); latex(x**2/2); gcd(12, 18); divisors(12); Eq(x, 1); nsimplify("0.5"); solveset(x**2 - 1, x)
solve([x**2 + y**2 - 5, x - y - 1], [x, y]); Matrix([[2, 1], [1, 3]]).eigenvals(); Matrix([[2, 1], [1, 3]]).inv()
summation(1/(n*(n + 1)), (n, 1, oo)); reduce_inequalities(x**2 < 4, x); Point(0, 0).distance(Point(3, 4))
f = Function("f"); dsolve(f(x).diff(x) - f(x), f(x))
""",
}
_HARMFUL: Final = {
    *("antigravity", "distutils", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "test", "this", "tkinter", "turtle"),
    *("turtledemo", "venv"),
}


def preload(libraries: Iterable[str]) -> None:
    """Import the libraries and what most programs use, and run a little of numpy and sympy if they are among them.

    Raises:
        ImportError: A library can't be imported.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in _STANDARD:
            importlib.import_module(name)
        for library in libraries:
            importlib.import_module(library)
            for name in _SUBMODULES.get(library, ()):
                with contextlib.suppress(ImportError):  # other versions are cut otherwise
                    importlib.import_module(name)
            with contextlib.suppress(Exception):  # a warm-up is worth no failure
                exec(_WARM_UP.get(library, ""), {})  # noqa: S102 - the constant above


def preload_everything(libraries: Iterable[str]) -> None:
    """Import the whole standard library and all of these libraries: nothing can be imported after a change of root."""
    with warnings.catch_warnings(), Path(os.devnull).open("w") as null, contextlib.redirect_stdout(null):
        warnings.simplefilter("ignore")
        for name in [*sorted(set(sys.stdlib_module_names) - _HARMFUL), *libraries]:
            for module in (name, *_submodules(name)):
                with contextlib.suppress(BaseException):  # what can't be imported here can't be in a child either
                    importlib.import_module(module)


def _submodules(package: str) -> list[str]:
    """Every module in a package, but for its tests and what merely runs when it is imported."""
    with contextlib.suppress(BaseException):  # see above
        importlib.import_module(package)
    places = getattr(sys.modules.get(package), "__path__", [])
    found = []
    for module in pkgutil.iter_modules(places, f"{package}."):
        if module.name.rpartition(".")[2].strip("_") in {"test", "tests", "testing", "main", "conftest", "benchmarks"}:
            continue
        found.append(module.name)
        found += _submodules(module.name) if module.ispkg else []
    return found

"""How the sandbox's own processes are started: this Python, bare, with this package found by its folder.

No site-packages and nothing of the user's: the template must be able to import what it is told to, and no more.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

_PACKAGE_FOLDER: Final = str(Path(__file__).resolve().parents[3])


def python_command(module: str, link: int, settings: Mapping[str, Any]) -> list[str]:
    """A command that runs a module's `main()`; the package can't be imported by its name any more by then.

    Args:
        module: A module of this package that has imported all that it needs of it.
        link: The number of an inherited socket: the first argument.
        settings: In JSON's types: the second argument, as JSON.
    """
    start = f"import sys; sys.path.append({_PACKAGE_FOLDER!r}); from {module} import main; sys.path.pop(); main()"
    return [sys.executable, "-s", "-S", "-P", "-X", "utf8", "-c", start, str(link), json.dumps(settings)]

"""Distinguish a user's files from the files of this package and of libraries."""

import sysconfig
from pathlib import Path
from typing import Final

_PACKAGE: Final = str(Path(__file__).parent)
_STDLIB: Final = sysconfig.get_paths()["stdlib"]


def is_user_file(filename: str) -> bool:
    """Return True if a file belongs neither to a library nor to this package.

    This package's examples count as a user's files, unless the package is in `site-packages`.
    """
    library = "site-packages" in filename or filename.startswith((_STDLIB, "<frozen"))
    return not library and (not filename.startswith(_PACKAGE) or filename.startswith(f"{_PACKAGE}/examples/"))

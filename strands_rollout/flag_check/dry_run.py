"""One of this repository's launch scripts -> the command that it would start, from its own dry run.

Only a script that sources the launch library beside it is run, with --dry-run, which writes nothing. Any other script
is read as text.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from strands_rollout.errors import ConfigError
from strands_rollout.flag_check.launch_text import Command, Reading, ScriptText, read_text
from strands_rollout.flag_check.shell_words import Word
from strands_rollout.flag_check.uses import looks_like_flag

LIBRARY: Final = "slime_launch.sh"
ARGUMENTS: Final = "arguments"  # the library's array of slime's arguments
LIMIT_S: Final = 60.0


def read_script(path: Path, slime_dir: Path | None) -> Reading:
    """Read a launch script.

    Args:
        path: The script.
        slime_dir: slime's checkout, or None.

    Raises:
        ConfigError: The file can't be read, or its dry run fails.
    """
    if path.exists() and not path.is_file():  # a pipe or a device may never end
        raise ConfigError(f"got {path}; expected a regular file, or - for a command on stdin")
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as e:
        raise ConfigError(f"got the script {path}; expected a file that can be read: {e}") from e
    script = ScriptText(text, path, slime_dir)
    if not _is_ours(script, path):
        return read_text(text, path, slime_dir)
    printed = read_text(_dry_run(path, slime_dir), path, slime_dir)
    places = {word.text: word.place for word in reversed(script.words) if looks_like_flag(word.text)}
    commands = [_placed(command, places) for command in printed.commands]
    given = {word.text for command in commands for word in command.words}
    switched = tuple(_segments_without(script, given))
    further = Command(None, (), switched, exact=False)
    how = f"bash {path} --dry-run, and the arrays it may add"
    return Reading(how, (*commands, *([further] if switched else [])), printed.notes)


def _is_ours(script: ScriptText, path: Path) -> bool:
    beside = (path.resolve().parent / LIBRARY).resolve()
    written = {word.text for word in script.words}
    return beside in script.sourced and {"read_options", "--dry-run"} <= written


def _dry_run(path: Path, slime_dir: Path | None) -> str:
    """What the script prints; it runs as a child, without input."""
    environment = dict(os.environ)
    if slime_dir is not None:
        environment["SLIME_DIR"] = str(slime_dir)
    try:
        done = subprocess.run(  # noqa: S603 - a script of this repository's, which then does nothing
            ["bash", str(path), "--dry-run"],  # noqa: S607 - the shell that would start it
            capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as e:
        raise ConfigError(f"bash {path} --dry-run could not be run: {e}") from e
    if done.returncode != 0:
        raise ConfigError(
            f"bash {path} --dry-run ended with {done.returncode}; expected a command: {done.stderr.strip()}"
        )
    return done.stdout


def _placed(command: Command, places: dict[str, str | None]) -> Command:
    """The command with each flag's place in the script instead of in the printed text."""
    return replace(command, words=tuple(replace(word, place=places.get(word.text)) for word in command.words))


def _segments_without(script: ScriptText, given: set[str]) -> Iterator[tuple[Word, ...]]:
    """The flags that other options would switch on, each with its values."""
    for array in script.arrays:
        if array.name == ARGUMENTS:
            for segment in _segments(array.words):
                if segment[0].text not in given:
                    yield segment


def _segments(words: Sequence[Word]) -> Iterator[tuple[Word, ...]]:
    starts = [at for at, word in enumerate(words) if looks_like_flag(word.text)]
    for begin, end in zip(starts, [*starts[1:], len(words)], strict=False):
        yield tuple(words[begin:end])

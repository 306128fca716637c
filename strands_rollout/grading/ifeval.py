"""Check which instructions of IFEval a response follows, with the checkers of lm-evaluation-harness.

IFEval is described in Zhou et al., 2023, arXiv:2311.07911. This module needs the extra `ifeval`. The checkers count
sentences and capital words with NLTK's model punkt_tab, which lm-evaluation-harness downloads on first use. For a
machine without network, run `python -m nltk.downloader punkt_tab` on another machine, copy the folder nltk_data
from there, and set NLTK_DATA to the copy.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from strands_rollout.errors import ConfigError, PromptError

METADATA_KEY: Final = "ifeval"
"""Key in a row's metadata for its instructions: a mapping with google/IFEval's `instruction_id_list` and `kwargs`."""
MAX_RESPONSE_CHARS: Final = 50_000
"""Maximum characters of a response: some checkers take quadratic time, for example for a response of brackets."""
_USING_PUNKT: Final = frozenset({"length_constraints:number_sentences", "change_case:capital_word_frequency"})


@dataclass(frozen=True, slots=True)
class Instructions:
    """The instructions of a prompt.

    Attributes:
        ids: The instructions' names, such as "punctuation:no_comma".
        kwargs: The arguments of each instruction's checker; None stands for an absent argument.
    """

    ids: Sequence[str]
    kwargs: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Instructions:
        """Return the instructions in a row's metadata.

        Raises:
            PromptError: The metadata has no instructions, or not exactly one element of `kwargs` for each.
        """
        found = metadata.get(METADATA_KEY)
        values = found if isinstance(found, Mapping) else {}
        ids, kwargs = values.get("instruction_id_list"), values.get("kwargs")
        if not ids or not isinstance(ids, list) or not isinstance(kwargs, list) or len(ids) != len(kwargs):
            raise PromptError(
                f"the row's metadata has {METADATA_KEY}: {found!r:.100}; expected a mapping with instruction_id_list "
                "and kwargs, two lists of equal length, as data_prep/benchmark.py ifeval writes it"
            )
        return cls(ids, kwargs)

    def check_usable(self) -> None:
        """Check that the checkers of these instructions can run.

        Raises:
            ConfigError: The library, or the NLTK model that a checker needs, is missing.
            PromptError: An instruction is unknown.
        """
        known = _library().instructions_registry.INSTRUCTION_DICT
        if unknown := [name for name in self.ids if name not in known]:
            raise PromptError(f"got the instruction {unknown[0]!r}; expected one of {', '.join(sorted(known))}")
        if _USING_PUNKT.intersection(self.ids) and not _has_punkt():
            raise ConfigError(
                "IFEval's sentence and word counts need NLTK's model punkt_tab, which could not be downloaded; run "
                "python -m nltk.downloader punkt_tab on a machine with network, and set NLTK_DATA to a copy of its "
                "folder nltk_data"
            )

    def followed(self, response: str, prompt: str) -> list[bool]:
        """Return whether the unchanged response follows each instruction (IFEval's strict accuracy).

        A response of more than `MAX_RESPONSE_CHARS` follows no instruction.

        Raises:
            ConfigError: See `check_usable`.
            PromptError: See `check_usable`; or a checker can't be run with its arguments.
        """
        self.check_usable()
        if len(response) > MAX_RESPONSE_CHARS:
            return [False] * len(self.ids)
        return [self._is_followed(number, response, prompt) for number in range(len(self.ids))]

    def _is_followed(self, number: int, response: str, prompt: str) -> bool:
        library, name, kwargs = _library(), self.ids[number], dict(self.kwargs[number] or {})
        example = library.InputExample(key=number, instruction_id_list=[name], prompt=prompt, kwargs=[kwargs])
        try:
            return bool(library.test_instruction_following_strict(example, response).follow_all_instructions)
        except Exception as e:  # a checker may raise anything, also for a response that it does not expect
            try:
                library.test_instruction_following_strict(example, "An answer.")
            except Exception:  # it raises for every response, so the row is at fault
                raise PromptError(f"IFEval's {name} can't be checked with {kwargs!r:.200}: {e}") from e
            return False


# several grading threads may load the library, and a redirection of stdout affects them all
_LOADING: Final = threading.Lock()


@functools.cache
def _library() -> Any:  # noqa: ANN401 - a module without type information
    try:
        with _LOADING, contextlib.redirect_stdout(sys.stderr):  # the import prints messages about a download
            import langdetect
            from lm_eval.tasks.ifeval import utils
    except ModuleNotFoundError as e:
        raise ConfigError(
            f"grading IFEval needs {e.name!r}, which is not installed; run: pip install 'strands-rollout[ifeval]'"
        ) from e
    langdetect.DetectorFactory.seed = 0  # detect the same language each time for the same text
    logging.getLogger("lm_eval.tasks.ifeval").setLevel(logging.CRITICAL)  # it logs whole responses
    return utils


@functools.cache
def _has_punkt() -> bool:
    import nltk

    with contextlib.suppress(LookupError):
        nltk.data.find("tokenizers/punkt_tab/english")
        return True
    return False

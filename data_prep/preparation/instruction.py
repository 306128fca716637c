r"""Find a data set's answer instruction at the beginning or end of a message, and remove it.

The package's system prompt asks for `\boxed{}`. A prompt that asks for an "Answer:" line contradicts it, and a prompt
that asks for a box repeats it. Only whole, known sentences are removed, so that nothing of a problem is lost.

The wordings `_LAST_LINE` and `_OWN_LINE` come from the row that slime shows (docs/en/get_started/usage.md); it was not
checked that the published dapo-math-17k has them. The other wordings are in common use.
"""

import functools
import re
from collections import Counter
from dataclasses import dataclass
from typing import Final

from preparation.rows import Chat

_PLACEHOLDER: Final = r"\$?(?:\\?text\{)?(?:your[ _])?(?:final[ _])?(?:answer|\.\.\.|\\[lc]?dots)?\}?\$?"
_BOX: Final = rf"[`$\"']*\\+(?:boxed|fbox)(?:\s*\{{+\s*{_PLACEHOLDER}\s*\}}+)?[`$\"']*"
_RESPONSE: Final = r"(?:response|answer|output|solution|reply)"
_QUOTE: Final = "[\"'\u201c\u201d\u2018\u2019`*]*"
_STEP_BY_STEP: Final = (
    r"(?:(?:please\s+|let'?s\s+|let\s+us\s+)?(?:think|reason|work|solve\s+(?:this|the\s+problem))(?:\s+it)?"
    r"(?:\s+through)?\s+step[\s-]by[\s-]step,?\s*(?:and|then|\.)\s*)?(?:please\s+|make\s+sure\s+to\s+|remember\s+to\s+)?"
)
_WRITE_VERBS: Final = (
    r"(?:put|write|present|give|output|return|enclose|place|provide|express|state|box)\s+(?:your|the)\s+"
    r"(?:(?:final|numerical|numeric)\s+)?(?:answer|result|response)"
)

# matches a placeholder for the answer, such as $Answer or <final answer>, but no part of a problem, such as $m+n
_ANSWER_PLACEHOLDER: Final = (
    r"[$`]*(?:\\+(?:boxed|fbox)\s*\{+\s*)?[$<\[{(`]*\\?(?:your[ _])?(?:final[ _])?(?:answer|ans|x)[$>\]})`]*"
)

_LAST_LINE: Final = (
    r"(?:solve\s+(?:the\s+following|this)\s+math(?:s|ematics)?\s+(?:problem|question)"
    r"(?:\s+(?:efficiently\s+and\s+clearly|step[\s-]by[\s-]step))?\s*[.:]\s*)?"
    rf"the\s+last\s+line\s+of\s+your\s+{_RESPONSE}\s+(?:should|must)\s+be\s+(?:of|in)\s+the\s+(?:following\s+)?"
    rf"(?:form|format):?\s*{_QUOTE}answer\s*:\s*{_QUOTE}{_ANSWER_PLACEHOLDER}"
    rf"{_QUOTE}(?:\s*\(without\s+quotes\))?{_QUOTE},?\s+where\s+{_QUOTE}{_ANSWER_PLACEHOLDER}{_QUOTE}"
    r"\s+is\s+(?:the|your)\s+(?:final\s+)?"
    r"answer(?:\s+to\s+the\s+(?:problem|question))?(?:\.|(?=\s*(?:\n|\Z)))"
)
_OWN_LINE: Final = (
    r"(?:please\s+)?(?:remember\s+to\s+)?put\s+your\s+(?:final\s+)?answer\s+on\s+(?:its|a|his)\s+(?:own|separate|new)\s+"
    rf"line\s+(?:after|beginning\s+with|starting\s+with)\s+{_QUOTE}answer\s*:?\s*{_QUOTE}"
    r"(?:,?\s*and\s+you\s+do\s+not\s+need\s+to\s+use\s+a\s+\\+boxed\s+command)?\s*\.?"
)
_IN_BOX: Final = (
    rf"{_STEP_BY_STEP}{_WRITE_VERBS}\s+(?:(?:with)?in(?:side)?(?:\s+of)?|as|using|to|with)\s+(?:an?\s+|the\s+)?{_BOX}"
    r"(?:\s+(?:command|notation|environment|format|tag))?\s*\.?"
)
_AFTER_HASHES: Final = rf"{_STEP_BY_STEP}{_WRITE_VERBS}\s+after\s+{_QUOTE}\#{{4}}{_QUOTE}\s*\.?"

KINDS: Final = ("answer_line", "boxed", "hashes")
"""Answer forms that an instruction may ask for."""

_MAX_SENTENCE_CHARS: Final = 600


@dataclass(frozen=True, slots=True)
class _Sentence:
    """A known instruction.

    Attributes:
        kind: One of `KINDS`.
        needle: Lower-case text that every occurrence contains; checked before the patterns, to save time.
        beginning: Pattern of the instruction at the beginning of a text.
        end: Pattern of the instruction at the end of a text.
    """

    kind: str
    needle: str
    beginning: re.Pattern[str]
    end: re.Pattern[str]

    def remove_from(self, text: str) -> str:
        if self.needle not in text.lower():
            return text
        beginning = self.beginning.match(text)
        if beginning:
            return text[beginning.end() :].lstrip()
        end = self.end.search(text, max(0, len(text) - _MAX_SENTENCE_CHARS))
        return text[: end.start()].rstrip() if end else text


def _build_sentence(kind: str, needle: str, words: str) -> _Sentence:
    """Return an instruction that matches whole sentences only, not the end of "Simplify, and give the answer in a box".

    It does not match after a colon or an opening quotation mark either: the problem may quote the sentence.
    """
    beginning = re.compile(rf"\s*(?:{words})(?:(?<=[.:])(?=\s)|(?=\s*\n))", re.IGNORECASE)
    end = re.compile(rf"(?:\A\s*|(?<=[.?!;\n])\s*|(?<=[)\]}}$\"])\s+)(?:{words})\s*\Z", re.IGNORECASE)
    return _Sentence(kind, needle, beginning, end)


_SENTENCES: Final = (
    _build_sentence("answer_line", "the last line", _LAST_LINE),
    _build_sentence("answer_line", "line", _OWN_LINE),
    _build_sentence("boxed", "box", _IN_BOX),
    _build_sentence("hashes", "####", _AFTER_HASHES),
)
_FORM_REQUESTS: Final = {
    kind: re.compile(words, re.IGNORECASE)
    for kind, words in {
        "answer_line": (
            r"\b(?:last\s+line|own\s+line|new\s+line|form(?:at)?|put|write|give|end|finish|conclude|start|begin|respond"
            rf"|state)\b[^.\n]{{0,80}}?{_QUOTE}\banswer{_QUOTE}\s*:"
        ),
        "hashes": (
            r"\b(?:form(?:at)?|put|write|give|output|return|present|end|finish|conclude|after|with|as)\b"
            r"[^.\n]{0,80}?(?<!\#)\#{4}(?!\#)"
        ),
        "tags": r"<answer>",
        "bare": (
            r"\b(?:return|output|respond|reply|answer|print|provide|give|write)(?:\s+with)?\s+(?:only|just|nothing\s+but)\b"
            r"|\bonly\s+(?:return|output|respond|reply|print|provide)\b"
        ),
        "json": r"\b(?:return|output|respond|reply|answer|format|give|write|in|as)\b[^.\n]{0,60}?\bjson\b",
    }.items()
}
"""Patterns of prompts that seem to ask for another answer form than the system prompt does; used for warnings."""


@functools.lru_cache(maxsize=32_768)  # data sets repeat their problems, up to a hundred times
def without_instruction(text: str) -> tuple[str, frozenset[str]]:
    """Return the text without the instructions at its beginning and end, and the kinds of the removed instructions.

    The text is "" if it had nothing but instructions.
    """
    found: set[str] = set()
    previous = None
    while text != previous:  # an instruction may end where another instruction was removed
        previous = text
        for sentence in _SENTENCES:
            shorter = sentence.remove_from(text)
            if shorter != text:
                found.add(sentence.kind)
                text = shorter
    return text, frozenset(found)


def without_instructions(chat: Chat) -> tuple[Chat, frozenset[str]]:
    """Return the chat without the instructions in its system and user messages, and the kinds that were removed.

    A system message that is only an instruction is dropped; a user message that is only an instruction stays.
    """
    kept: Chat = []
    found: set[str] = set()
    for message in chat:
        text, kinds = without_instruction(message["content"])
        if message["role"] == "assistant" or (message["role"] == "user" and not text.strip()):
            kept.append(message)
            continue
        found |= kinds
        if text.strip():
            kept.append({**message, "content": text})
    return kept, frozenset(found)


def requested_forms(chat: Chat) -> frozenset[str]:
    """Return the answer forms, other than a box, that the messages seem to ask for; used for warnings."""
    texts = [message["content"] for message in chat if message["role"] != "assistant"]
    return frozenset(kind for kind, asks in _FORM_REQUESTS.items() if any(map(asks.search, texts)))


class InstructionCount:
    """Counter of the instructions in the written prompts, which also removes them if `removing`."""

    def __init__(self, *, removing: bool) -> None:
        self._removing = removing
        self._prompts = self._prompts_asking = 0
        self._found: Counter[str] = Counter()
        self._requested_kinds: Counter[str] = Counter()
        self._example = ""

    def apply(self, chat: Chat) -> Chat:
        """Count a chat's instructions, and return the chat to write."""
        bare, kinds = without_instructions(chat)
        self._found.update(kinds)
        self._prompts += bool(kinds)
        written = bare if self._removing else chat
        forms = requested_forms(written)
        self._requested_kinds.update(forms)
        self._prompts_asking += bool(forms)
        if forms and not self._example:
            self._example = written[-1]["content"]
        return written

    def facts(self) -> dict[str, object]:
        """Return the manifest's entry: the prompts with an instruction, and those that still ask for an answer form."""
        example = self._example
        return {
            "mode": "remove" if self._removing else "keep",
            "prompts": self._prompts,
            "kinds": {kind: self._found[kind] for kind in KINDS},
            "still_asking": self._prompts_asking,
            "still_asking_kinds": dict(sorted(self._requested_kinds.items())),
            "still_asking_example": example if len(example) <= 300 else f"{example[:150]} ... {example[-150:]}",
        }

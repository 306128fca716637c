r"""Grade multiple choice, as in GPQA: compare only the choices' letters, not their contents.

A letter may stand in a box, in an `"answer"` field of JSON, after `Answer:`, or after "the answer is". Qwen3's model
card asks for the JSON field.
"""

import re
from typing import Final

from strands_rollout.grading import Grade, extract_answer
from strands_rollout.grading.extraction import last_boxed

# possessive quantifiers keep the search linear in the text
_JSON_FIELD: Final = re.compile(r'"answer"\s*+:\s*+"(?P<answer>[^"\n]*+)"', re.IGNORECASE)
_SENTENCE: Final = re.compile(
    r"\banswer\s++is[\s:*_$]*+(?:(?:option|choice)\s++)?"
    r"(?P<answer>\([A-Z]\)|(?-i:[A-Z])(?=[ \t*_$]*+(?:[.,;:)\n]|$)))",
    re.IGNORECASE,
)
_STYLE: Final = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mathit|rm|bf)(?![A-Za-z])")
_MARKUP: Final = " \t\n$*_`'\"{}[]"
_CHOICE: Final = re.compile(
    r"(?:(?:option|choice)\s+)?(?:\((?P<inner>[A-Z])\)|(?P<plain>[A-Z])(?:[).:](?!\w)|$))", re.IGNORECASE
)
# a second letter, joined to the first one: the "and (B)" of "(A) and (B)"
_SECOND: Final = re.compile(
    r"[).:]?[\s*_${}]*+(?P<link>(?:[,;]\s*+)?(?:and\b|or\b|\\?&|/)|[,;]|(?<=\))(?=\())[\s*_${}]*+"
    r"(?:(?:option|choice)\s++)?(?:\((?P<inner>[A-Z])\)|(?P<plain>[A-Z])(?:[).:,;](?!\w)|[\s*_${}]*+$))",
    re.IGNORECASE,
)


def grade_choice(text: str, label: object, *, is_cut: bool = False) -> Grade:
    """Read the letter in an assistant's text and compare it with the label's letter, ignoring case.

    A box takes precedence, then a JSON field, `Answer:`, and "the answer is"; the last of each kind counts. A letter
    before other words counts only if it is in parentheses or before ")", "." or ":" (see `letter_of`). "A and B",
    "(A) and (B)", and a letter within a formula or word are not answers.

    Args:
        text: The assistant's last text, as `spoken_text` or `last_assistant_text` returns it.
        label: The letter of the right choice; None or "" makes every answer wrong, with the method "no_label".
        is_cut: True if the text ends in the middle; see `extract_answer`.

    Raises:
        ValueError: The label does not begin with the letter of a choice.
    """
    right = letter_of(str(label)) if label else ""
    if label and not right:
        raise ValueError(f"got the label {label!r:.80}; expected the letter of the right choice, such as C")
    chosen = _chosen_letter(text, is_cut=is_cut)
    method = "choice" if chosen and right else "empty" if right else "no_label"
    return Grade(correct=bool(chosen) and chosen == right, pred=chosen, label=right, method=method)


def letter_of(answer: str) -> str:
    r"""Return the upper-case letter that begins an answer such as "C", "(C) 12 m", "c." or "\text{C}"; else "".

    Return "" also for two different letters, as in "(A) and (B)" or "A) or B)".
    """
    text = _STYLE.sub("", answer).strip(_MARKUP)
    match = _CHOICE.match(text)
    if not match:
        return ""
    letter = _letter(match)
    second = _SECOND.match(text, match.end())
    return "" if second and _letter(second) != letter else letter


def _letter(match: re.Match[str]) -> str:
    return (match["inner"] or match["plain"]).upper()


def _chosen_letter(text: str, *, is_cut: bool) -> str:
    extracted = extract_answer(text, is_cut=is_cut)  # a box, else an "Answer:" line
    boxed = last_boxed(text)
    if boxed and (is_cut or extracted == boxed):  # an unfinished end of a cut text revokes the box
        return letter_of(extracted)
    fields = list(_JSON_FIELD.finditer(text))
    if fields:
        return letter_of(fields[-1]["answer"])
    if extracted:
        return letter_of(extracted)
    # at the end of a cut text, "is A" may be the beginning of "is A proton"
    sentences = [found for found in _SENTENCE.finditer(text) if not is_cut or found.end() < len(text)]
    if not sentences:
        return ""
    letter, second = letter_of(sentences[-1]["answer"]), _SECOND.match(text, sentences[-1].end())
    # a comma may begin the next clause: "the answer is (A), (B) is too small"
    is_joined = second is not None and second["link"][:1] not in (",", ";") and _letter(second) != letter
    return "" if is_joined else letter

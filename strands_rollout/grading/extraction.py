r"""Finds the answer in an assistant's words: the last `\boxed{...}`, else the last `Answer:` line.

Knows LaTeX braces and a little Markdown, not what an answer means. All functions take time linear in the text.
"""

from __future__ import annotations

import re
from typing import Final

_BOX_TOKEN: Final = re.compile(r"(?P<box>\\(?:boxed|fbox)(?![A-Za-z])\s*(?P<open>\{)?)|\\[{}]|[{}]")
_BARE_BOX: Final = re.compile(r"[^\s${}\\]+")
_ANSWER_LABEL: Final = re.compile(r"\banswer[\s*_`]{0,8}[:\uFF1A][\s*_`]*", re.IGNORECASE)
_MATH_SPAN: Final = re.compile(r"\$\$?([^$]+)\$?\$|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_MARKUP: Final = " \t*_`"
_SEARCHED_CHARS: Final = 50_000  # from the end; what nobody would read to is not searched
_LONGEST_LINE: Final = 1000  # a longer line is no answer, and is not searched for formulas


def extract_answer(text: str) -> str:
    r"""The answer as the text gives it, stripped; "" if it gives none.

    A box with unbalanced braces, or with nothing in it, is not an answer; nor is an `Answer:` with nothing after it. Of
    nested boxes the innermost counts.
    """
    text = text[-_SEARCHED_CHARS:]
    return last_boxed(text) or last_answer_line(text)


def last_boxed(text: str) -> str:
    r"""The content of the last balanced, non-empty `\boxed{...}` or `\fbox{...}`, or the word after a bare `\boxed`."""
    start = end = 0
    open_braces: list[int | None] = []  # where a box's content starts; None for a brace that is not a box's
    first_box = min((at for at in (text.find(r"\boxed"), text.find(r"\fbox")) if at >= 0), default=len(text))
    for token in _BOX_TOKEN.finditer(text, first_box):
        if token["open"] is not None:
            open_braces.append(token.end())
        elif token["box"] is not None:
            bare = _BARE_BOX.match(text, token.end()) if token["box"][-1].isspace() else None
            start, end = bare.span() if bare else (start, end)
        elif token[0] == "{":
            open_braces.append(None)
        elif token[0] == "}" and open_braces:
            opened = open_braces.pop()
            is_innermost = opened is not None and start < opened
            if is_innermost and not text[opened : token.start()].isspace() and opened != token.start():
                start, end = opened or 0, token.start()
    return text[start:end].strip()


def last_answer_line(text: str) -> str:
    """What follows the last "Answer:" (any case, bold or not) up to the end of its line, or of the next that has text.

    Markdown around it, a final full stop and the delimiters of a single formula are taken off.
    """
    if "answer" not in text.lower():
        return ""
    for label in reversed(list(_ANSWER_LABEL.finditer(text))):
        line = text[label.end() :].partition("\n")[0].strip(_MARKUP)
        if line:
            return _formula_of(line)
    return ""


def _formula_of(line: str) -> str:
    """The one formula of a line whose other words hold no digits ("the sum is $42$."), else the line itself."""
    if len(line) > _LONGEST_LINE:
        return line
    spans = list(_MATH_SPAN.finditer(line))
    around = _MATH_SPAN.sub(" ", line)
    if len(spans) == 1 and not any(character.isdigit() for character in around):
        return next(group for group in spans[0].groups() if group is not None).strip()
    return line.rstrip(".").strip(_MARKUP)

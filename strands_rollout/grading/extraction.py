r"""Find an assistant's text without reasoning, calls and tool output, and the answer in it.

`spoken_text` and `last_assistant_text` rely on the markers of ChatML and of Qwen's and Hermes's tool use.
`extract_answer` finds the last `\boxed{...}`, or else the last `Answer:` line. Without either, it accepts a
sentence such as "la respuesta es 42" in the last line, in languages other than English. All functions take time linear
in the text.
"""

import re
from dataclasses import dataclass
from typing import Final

from strands_rollout.grading.phrases import ANSWER_LABEL, ANSWER_SENTENCE, NEGATION, SENTENCE_END

_TURN_START: Final = "<|im_start|>"
_TURN_END: Final = re.compile(r"<\|im_end\|>|<\|endoftext\|>")
_THINK_TAG: Final = re.compile(r"</?think>")
_CALL_OPEN, _CALL_CLOSE = "<tool_call>", "</tool_call>"
_RESULT_OPEN, _RESULT_CLOSE = "<tool_response>", "</tool_response>"
_BOX_TOKEN: Final = re.compile(r"(?P<box>\\(?:boxed|fbox)(?![A-Za-z])\s*(?P<open>\{)?)|\\[{}]|[{}]")
_BARE_BOX: Final = re.compile(r"[^\s${}\\]+")
_UNFINISHED_MARKUP: Final = re.compile(r"(?:<[|/\w:-]+|\\(?:bo(?:xe?)?|fbo?))$")  # the beginning of a tag or a box
_MAX_TAG_CHARS: Final = 40
_MATH_SPAN: Final = re.compile(r"\$\$?([^$]+)\$?\$|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_SIGN: Final = re.compile(r"(?:^|(?<=\s))[-−±<>≤≥]$")  # noqa: RUF001 - a minus
_UNIT: Final = re.compile(r"\s?[%‰°]")
_MARKUP: Final = " \t*_`"
_SEARCHED_CHARS: Final = 50_000  # only the end of a text is searched, to bound the cost of very long texts
_MAX_LINE_CHARS: Final = 1000  # a longer line is not searched for a formula or a sentence


def last_assistant_text(response: str, *, in_reasoning: bool = False) -> str:
    """Return the text of the last assistant turn, found in the decoded text of a whole response.

    Everything up to the last `</tool_response>` counts as tool output or as older text. So a tool's output can't pose
    as the assistant, whatever markers it contains. There are two exceptions, which the text alone can't reveal. Tool
    output may contain a forged `</tool_response>` and be cut after it. A template may mark tool output differently. If
    the text of the last turn is known, pass it to `spoken_text` instead.

    Args:
        response: Decoded response tokens from the first assistant turn to the end, including control tokens.
        in_reasoning: True if the prompt opened `<think>` for the first assistant turn.

    Returns:
        The `spoken_text` of the last assistant turn.
    """
    _, result_close, rest = response.rpartition(_RESULT_CLOSE)
    rest = rest.partition(_RESULT_OPEN)[0]
    first, *later = rest.split(_TURN_START)
    for turn in reversed(later):
        role, _, text = turn.partition("\n")
        if role.strip() == "assistant":
            return spoken_text(text)
    return spoken_text(first, in_reasoning=in_reasoning and not result_close)


def spoken_text(turn: str, *, in_reasoning: bool = False) -> str:
    """Return the stripped text of an assistant turn without reasoning, tool calls and invented tool results.

    Return "" if the reasoning never ends or the turn ends in a tool call. A call is a step, not an answer.

    Args:
        turn: The text of the turn.
        in_reasoning: True if the turn begins inside the reasoning (the prompt opened `<think>`).
    """
    text = _TURN_END.split(turn, maxsplit=1)[0]
    text = _without_reasoning(text, in_reasoning=in_reasoning)
    text = _without_blocks(text, _RESULT_OPEN, _RESULT_CLOSE)[0]
    text, after_last_call = _without_blocks(text, _CALL_OPEN, _CALL_CLOSE)
    return text.strip() if after_last_call.strip() else ""


def _without_reasoning(text: str, *, in_reasoning: bool) -> str:
    """Remove `<think>...</think>`, and all before a stray `</think>`; return "" if the last `<think>` is unclosed."""
    parts: list[str] = []
    start = 0
    for tag in _THINK_TAG.finditer(text):
        if tag[0] == "</think>":
            if not in_reasoning:
                parts.clear()
            start = tag.end()
        elif not in_reasoning:
            parts.append(text[start : tag.start()])
        in_reasoning = tag[0] == "<think>"
    return "" if in_reasoning else "".join([*parts, text[start:]])


def _without_blocks(text: str, opening: str, closing: str) -> tuple[str, str]:
    """Remove blocks from `opening` to `closing` or the end; return the rest, and the part after the last block."""
    parts: list[str] = []
    start = 0
    while (block := text.find(opening, start)) >= 0:
        parts.append(text[start:block])
        end = text.find(closing, block)
        start = len(text) if end < 0 else end + len(closing)
    return "".join([*parts, text[start:]]), text[start:]


def extract_answer(text: str, *, is_cut: bool = False) -> str:
    r"""Return the answer in a text, stripped; "" if there is none.

    An empty box, a box with unbalanced braces, and `Answer:` without text are not answers. Of nested boxes, the
    innermost counts. Only the last 50,000 characters are searched.

    Args:
        text: The assistant's text.
        is_cut: True if the text ends in the middle, for example at a token limit. Then the answer is "" if the end is
            unfinished, such as a line after `Answer:`, an open box or a part of a tag. An empty last box has the same
            effect. Earlier answers do not count in these cases.
    """
    text = text[-_SEARCHED_CHARS:]
    box = _find_box(text)
    if is_cut and (
        box.is_open or _UNFINISHED_MARKUP.search(text[-_MAX_TAG_CHARS:]) or _ends_in_answer_line(text, box.end)
    ):
        return ""
    return text[box.start : box.end].strip() or last_answer_line(text)


def last_boxed(text: str) -> str:
    r"""Return the content of the last complete box, `\boxed{...}`, `\fbox{...}` or `\boxed 42`; "" if there is none."""
    box = _find_box(text)
    return text[box.start : box.end].strip()


@dataclass(frozen=True, slots=True)
class _Box:
    """The position of the last complete box's content; `start` and `end` are 0 if there is no complete box.

    `is_open` is True if a box may be unfinished: a box has no closing brace, or the last box is empty or a bare word at
    the end of the text.
    """

    start: int
    end: int
    is_open: bool


def _find_box(text: str) -> _Box:
    start = end = 0  # the content of the last complete box so far
    is_whole = True  # False if the latest box is open, empty, or a bare word at the end of the text
    open_braces: list[int | None] = []  # where a box's content starts; None for other braces
    first_box = min((at for at in (text.find(r"\boxed"), text.find(r"\fbox")) if at >= 0), default=len(text))
    for token in _BOX_TOKEN.finditer(text, first_box):
        if token["open"] is not None:
            open_braces.append(token.end())
            is_whole = False
        elif token["box"] is not None:
            bare = _BARE_BOX.match(text, token.end()) if token["box"][-1].isspace() else None
            start, end = bare.span() if bare else (start, end)
            is_whole = bare is not None and bare.end() < len(text)
        elif token[0] == "{":
            open_braces.append(None)
        elif token[0] == "}" and open_braces:
            opened = open_braces.pop()
            is_innermost = opened is not None and start < opened
            if is_innermost and not text[opened : token.start()].isspace() and opened != token.start():
                start, end = opened or 0, token.start()
                is_whole = True
    return _Box(start, end, not is_whole or any(opened is not None for opened in open_braces))


def _ends_in_answer_line(text: str, start: int) -> bool:
    labels = list(ANSWER_LABEL.finditer(text, start))
    if labels and "\n" not in text[labels[-1].end() :]:
        return True
    return ANSWER_SENTENCE.search(text[start:].rpartition("\n")[2]) is not None


def last_answer_line(text: str) -> str:
    """Return the text after the last "Answer:" (any case, bold or not) in its line, or in the next line with text.

    "Answer:" is also recognized in other languages. Without such a label, look in the last line for a sentence that
    begins with "the answer is" in a language other than English (see `phrases`). Return the text after these words, or
    "" if there are none. Remove Markdown, words that end the sentence, a final full stop, and the text around a single
    formula.
    """
    for label in reversed(list(ANSWER_LABEL.finditer(text))):
        line = text[label.end() :].partition("\n")[0].strip(_MARKUP)
        if line:
            return _formula_of(line)
    last = text.rstrip().rpartition("\n")[2]
    sentences = list(ANSWER_SENTENCE.finditer(last)) if len(last) <= _MAX_LINE_CHARS else []
    return _whole_formula(last[sentences[-1].end() :]) if sentences else ""


def _formula_of(line: str) -> str:
    """Return the only formula of a line whose other words have no digit and no negation ("the sum is $42$.").

    A sign right before the formula, and a unit right after it, belong to it.
    """
    if len(line) > _MAX_LINE_CHARS:
        return line
    spans = list(_MATH_SPAN.finditer(line))
    around = _MATH_SPAN.sub(" ", line)
    if len(spans) == 1 and not any(character.isdigit() for character in around) and not NEGATION.search(around):
        sign, unit = _SIGN.search(line[: spans[0].start()]), _UNIT.match(line, spans[0].end())
        formula = next(group for group in spans[0].groups() if group is not None).strip()
        return f"{sign[0] if sign else ''}{formula}{unit[0] if unit else ''}"
    return _whole_formula(line)


def _whole_formula(line: str) -> str:
    """Remove Markdown, the sentence's final words and full stop, and the delimiters if the rest is a single formula."""
    answer = SENTENCE_END.sub("", line.strip(_MARKUP).rstrip(".")).strip(_MARKUP)
    formula = _MATH_SPAN.fullmatch(answer)
    return answer if formula is None else next(group for group in formula.groups() if group is not None).strip()

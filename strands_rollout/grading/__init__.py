r"""Grading: an assistant's text and a label in, a verdict out, without slime, samples and scores.

`spoken_text` and `last_assistant_text` leave out reasoning, tool calls and tool output (by the markers of ChatML and of
Qwen's and Hermes's tool use), `extract_answer` finds the last `\boxed{...}`, else the last `Answer:` line, and `grade`
compares it with the label. All take time linear in the text. `slime_example_grade` grades as slime's strands example
does, its faults included: it reads tool output, and only the last 300 characters. Source of its rules: THUDM/slime
624b824a, slime/rollout/rm_hub/math_dapo_utils.py (Minerva's normalisation) and examples/strands_sglang; where that
raises, the answer here is wrong, and the grade says why.
"""

import contextlib
import json
import re
import time
from dataclasses import dataclass
from typing import Final

from strands_rollout.grading.comparison import CPU_LIMIT_S, compare

_TURN_START: Final = "<|im_start|>"
_TURN_END: Final = re.compile(r"<\|im_end\|>|<\|endoftext\|>")
_THINK_TAG: Final = re.compile(r"</?think>")
_CALL_OPEN, _CALL_CLOSE = "<tool_call>", "</tool_call>"
_RESULT_OPEN, _RESULT_CLOSE = "<tool_response>", "</tool_response>"
_BOX_TOKEN: Final = re.compile(r"(?P<box>\\(?:boxed|fbox)(?![A-Za-z])\s*(?P<open>\{)?)|\\[{}]|[{}]")
_BARE_BOX: Final = re.compile(r"[^\s${}\\]+")
_ANSWER_LABEL: Final = re.compile(r"\banswer[\s*_`]{0,8}[:\uFF1A][\s*_`]*", re.IGNORECASE)
_MATH_SPAN: Final = re.compile(r"\$\$?([^$]+)\$?\$|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_MARKUP: Final = " \t*_`"
_SEARCHED_CHARS: Final = 50_000  # from the end, so that a very long text costs no more
_LONGEST_LINE: Final = 1000  # a longer line is no answer, and is not searched for formulas
_DEEPEST_LABEL: Final = 10


def last_assistant_text(response: str, *, in_reasoning: bool = False) -> str:
    """Find the assistant's last words in a whole response of which only the text is known.

    Everything up to the last `</tool_response>` counts as tool output or older, so that a tool's output can't pose as
    the assistant, whatever markers it contains. Text alone can't tell a response cut off inside a tool's output that
    contains a forged `</tool_response>`, nor templates that mark tool output otherwise: where the last turn's own text
    is known, pass that to `spoken_text` instead.

    Args:
        response: Decoded response tokens, control tokens included, from the first assistant turn to the end.
        in_reasoning: Whether the prompt opened `<think>` for the first assistant turn.

    Returns:
        What `spoken_text` returns for the last assistant turn.
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
    """The decoded text of one assistant turn, stripped, without reasoning, tool calls and tool results it made up.

    It is "" when the reasoning never ended, or when the turn ends in a tool call: a step then, not an answer. With
    `in_reasoning`, the prompt had opened `<think>` and the turn begins inside the reasoning.
    """
    said = _TURN_END.split(turn, maxsplit=1)[0]
    said = _without_reasoning(said, in_reasoning=in_reasoning)
    said = _without_blocks(said, _RESULT_OPEN, _RESULT_CLOSE)[0]
    said, after_last_call = _without_blocks(said, _CALL_OPEN, _CALL_CLOSE)
    return said.strip() if after_last_call.strip() else ""


def _without_reasoning(text: str, *, in_reasoning: bool) -> str:
    """Drop `<think>...</think>`; a stray `</think>` ends reasoning from the start, an unclosed `<think>` leaves ""."""
    kept: list[str] = []
    start = 0
    for tag in _THINK_TAG.finditer(text):
        if tag[0] == "</think>":
            if not in_reasoning:
                kept.clear()
            start = tag.end()
        elif not in_reasoning:
            kept.append(text[start : tag.start()])
        in_reasoning = tag[0] == "<think>"
    return "" if in_reasoning else "".join([*kept, text[start:]])


def _without_blocks(text: str, opening: str, closing: str) -> tuple[str, str]:
    """Drop each block, and all after an unclosed one; return the rest, and the part of it after the last block."""
    kept: list[str] = []
    start = 0
    while (block := text.find(opening, start)) >= 0:
        kept.append(text[start:block])
        end = text.find(closing, block)
        start = len(text) if end < 0 else end + len(closing)
    return "".join([*kept, text[start:]]), text[start:]


def extract_answer(text: str) -> str:
    r"""The answer as the text gives it, stripped; "" if it gives none.

    A box with unbalanced braces, or with nothing in it, is not an answer; nor is an `Answer:` with nothing after it. Of
    nested boxes the innermost counts.
    """
    text = text[-_SEARCHED_CHARS:]
    return last_boxed(text) or last_answer_line(text)


def last_boxed(text: str) -> str:
    r"""The content of the last balanced, non-empty `\boxed{...}` or `\fbox{...}`, or the word after a bare `\boxed`."""
    start = end = 0  # of the best box so far
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


@dataclass(frozen=True, slots=True)
class Grade:
    """The verdict on one answer.

    Attributes:
        correct: Whether it is right.
        pred: The answer as the assistant wrote it; "" for none.
        label: The label that it was compared with; of several, the one that it equals, else the first.
        method: What decided; see `Comparison.method`.
    """

    correct: bool
    pred: str
    label: str
    method: str


def grade(text: str, label: object, cpu_s: float = CPU_LIMIT_S) -> Grade:
    """Extract the answer from what an assistant said and compare it with the label.

    Args:
        text: The assistant's last words, as `spoken_text` or `last_assistant_text` gives them.
        label: Text, a number, or a list of alternatives of which any is right; None or "" makes every answer wrong.
        cpu_s: CPU seconds that the comparisons may take; the answer is wrong when they are used up.
    """
    pred = extract_answer(text)
    labels = label_texts(label) or ("",)
    methods: list[str] = []
    until = time.thread_time() + cpu_s
    for wanted in labels:
        comparison = compare(pred, wanted, until - time.thread_time())
        if comparison.equal:
            return Grade(correct=True, pred=pred, label=wanted, method=comparison.method)
        methods.append(comparison.method)
        if time.thread_time() > until:  # a label of very many alternatives
            methods[0] = "algebra_timeout"
            break
    return Grade(correct=False, pred=pred, label=labels[0], method=methods[0])


def label_texts(label: object, depth: int = 0) -> tuple[str, ...]:
    r"""The answers that a label allows, as text.

    Labels are what data sets hold: "42", 42, 42.0, "\boxed{42}", "... #### 42" (GSM8K), ["42", "forty-two"], '["42"]'.

    Raises:
        ValueError: It holds lists in lists without end.
    """
    if depth > _DEEPEST_LABEL:
        raise ValueError(f"the label holds lists more than {_DEEPEST_LABEL} deep, or itself; expected text or a number")
    if hasattr(label, "tolist"):  # a NumPy scalar or array
        label = label.tolist()
    if isinstance(label, bytes):
        label = label.decode(errors="replace")
    if isinstance(label, str):
        with contextlib.suppress(ValueError, RecursionError):
            alternatives = json.loads(label) if label.lstrip().startswith('["') else None
            if isinstance(alternatives, list):
                return label_texts(alternatives, depth + 1)
        return (last_boxed(label) or label.rpartition("####")[2].strip(),)
    if isinstance(label, list | tuple | set | frozenset):
        return tuple(text for item in label for text in label_texts(item, depth + 1) if text)
    is_missing = label is None or label != label
    return () if is_missing else (str(label),)


NO_ANSWER: Final = "[INVALID]"
_SEEN_CHARS: Final = 300
_SEEN_CHARS_STRICT: Final = 100
_LONGEST_LABEL: Final = 1000  # slime's patterns take time that grows with its square
_ANSWER: Final = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_BOX: Final = r"\boxed{"
_REWRITES: Final = (
    *(("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text")),
    *((r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}")),
)
_DROPPED: Final = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", r"\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3"),
    *("\\text{\n}", r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
    *("<|im_end|>", "<|endoftext|>"),
)
_UNWRAPPED: Final = (
    (re.compile(r".*?\$(.*?)\$.*"), r"$\1$"),
    (re.compile(r"\\text\{(.*?)\}"), r"\1"),
    (re.compile(r"\\textbf\{(.*?)\}"), r"\1"),
    (re.compile(r"\\overline\{(.*?)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


@dataclass(frozen=True, slots=True)
class DapoGrade:
    """What slime's example makes of a response.

    Attributes:
        score: 1.0, or at most -0.6: shaped by the tool iterations.
        correct: Whether the answer was right.
        pred: The normalised answer; "" where slime's is None.
        error: Why slime would have raised; "" where it would not.
    """

    score: float
    correct: bool
    pred: str
    error: str = ""


def slime_example_grade(response: str, label: object, tool_iterations: float) -> DapoGrade:
    """Grade like slime's strands example: by the last "Answer:", or where there is none by the last box."""
    correct, pred, error = False, "", ""
    length = len(str(label))
    if length > _LONGEST_LABEL:
        label, error = "", f"ValueError: a label of {length} characters; expected at most {_LONGEST_LABEL}"
    try:
        correct, pred = _by_answer_line(response[-_SEEN_CHARS:], label or "")
        if pred == NO_ANSWER:
            correct, pred = _by_box(response[-_SEEN_CHARS_STRICT:], label or "")
    except (ValueError, OverflowError) as e:  # a label that is not a number
        error = error or f"{type(e).__name__}: {e}"
    score = 1.0 if correct else min(-0.6, -1.0 + (tool_iterations - 2) / 2 * 0.1)
    return DapoGrade(score, correct, pred, error)


def _by_answer_line(tail: str, label: object) -> tuple[bool, str]:
    answers: list[str] = _ANSWER.findall(tail)
    pred = _normalised(answers[-1] if answers else NO_ANSWER)
    return pred == str(int(float(_normalised(str(label))))), pred


def _by_box(tail: str, label: object) -> tuple[bool, str]:
    """The content of the last box must be the label itself, so that a label that is not text is never equal."""
    start = tail.rfind(_BOX)
    depth = 0
    for end in range(start, len(tail)) if start >= 0 else ():
        depth += (tail[end] == "{") - (tail[end] == "}")
        if tail[end] == "}" and depth == 0:
            pred = tail[start + len(_BOX) : end]
            return pred == label, pred
    return False, ""


def _normalised(answer: str) -> str:
    answer = answer.rpartition("=")[2]
    for old, new in (*_REWRITES, *((dropped, "") for dropped in _DROPPED)):
        answer = answer.replace(old, new)
    for pattern, replacement in _UNWRAPPED:
        answer = pattern.sub(replacement, answer)
    answer = answer.replace("$", "")
    digits = answer.replace(",", "")
    return (digits if digits.isdigit() else answer).strip()

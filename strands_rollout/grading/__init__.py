r"""Grade an assistant's answer by comparing it with a label. Grading needs neither slime nor samples.

`extraction` finds the assistant's text without reasoning, tool calls and tool output, and the answer in this text.
`labels` finds the answers that a label allows, and `grade` compares the answer with each of them. Extraction takes
time linear in the text. `choices` grades multiple choice, and `ifeval` checks the instructions of IFEval.

`slime_example_grade` grades as slime's strands example does, including its faults: it reads tool output, and only the
last 300 characters. Source of its rules: THUDM/slime 624b824a, slime/rollout/rm_hub/math_dapo_utils.py (Minerva's
normalization) and examples/strands_sglang. If slime would raise an error, the answer is wrong, and the grade's
`error` has the text of that error.
"""

import re
import time
from dataclasses import dataclass
from typing import Final

from strands_rollout.grading.comparison import CPU_LIMIT_S, compare
from strands_rollout.grading.extraction import extract_answer, last_assistant_text, spoken_text
from strands_rollout.grading.labels import ContainerLabel, container_label, label_texts

__all__ = [
    "ContainerLabel",
    "Grade",
    "container_label",
    "extract_answer",
    "grade",
    "label_texts",
    "last_assistant_text",
    "slime_example_grade",
    "spoken_text",
]


@dataclass(frozen=True, slots=True)
class Grade:
    """The verdict on an answer.

    Attributes:
        correct: True if the answer is right.
        pred: The extracted answer (from `grade_choice`, its letter); "" for none.
        label: The alternative of the label that equals the answer, else the first alternative. From `grade_choice`: the
            label's letter. "" if there is no label.
        method: The rule that decided; see `Comparison.method`. From `grade_choice`: "choice", "empty" (no answer) or
            "no_label".
    """

    correct: bool
    pred: str
    label: str
    method: str


def grade(text: str, label: object, cpu_s: float = CPU_LIMIT_S, *, is_cut: bool = False) -> Grade:
    """Extract the answer from an assistant's text and compare it with the label.

    Args:
        text: The assistant's last text, as `spoken_text` or `last_assistant_text` returns it.
        label: A text, a number, or a list of alternatives, any of which is right; None or "" makes every answer wrong.
        cpu_s: CPU seconds for all comparisons; an answer that needs more is wrong.
        is_cut: True if the text ends in the middle; see `extract_answer`.

    Raises:
        ValueError: The label can't be read; see `label_texts`.
    """
    pred = extract_answer(text, is_cut=is_cut)
    # compare before the label is parsed as a list: the text of a list may itself be the answer
    if pred and isinstance(label, str) and pred == label.strip():
        return Grade(correct=True, pred=pred, label=pred, method="exact")
    labels = label_texts(label) or ("",)
    methods: list[str] = []
    deadline = time.thread_time() + cpu_s
    for alternative in labels:
        comparison = compare(pred, alternative, deadline - time.thread_time())
        if comparison.equal:
            return Grade(correct=True, pred=pred, label=alternative, method=comparison.method)
        methods.append(comparison.method)
        if time.thread_time() > deadline:  # a label may have very many alternatives
            methods[0] = "algebra_timeout"
            break
    return Grade(correct=False, pred=pred, label=labels[0], method=methods[0])


# the rules of slime's strands example
NO_ANSWER: Final = "[INVALID]"
_SEEN_CHARS: Final = 300
_SEEN_CHARS_STRICT: Final = 100
_MAX_LABEL_CHARS: Final = 1000  # slime's patterns take quadratic time in the label
_ANSWER: Final = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_BOX: Final = r"\boxed{"
_REWRITES: Final = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    (r"\$", ""),
    (r"\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (r",\text{and}", ","),
    (r"\text{and}", ","),
    (r"\text{m}", r"\text{}"),
)
_REMOVED_TEXTS: Final = (
    "square",
    "ways",
    "integers",
    "dollars",
    "mph",
    "inches",
    "hours",
    "km",
    "units",
    r"\ldots",
    "sue",
    "points",
    "feet",
    "minutes",
    "digits",
    "cents",
    "degrees",
    "cm",
    "gm",
    "pounds",
    "meters",
    "meals",
    "edges",
    "students",
    "childrentickets",
    "multiples",
    r"\text{s}",
    r"\text{.}",
    "\\text{\ns}",
    r"\text{}^2",
    r"\text{}^3",
    "\\text{\n}",
    r"\text{}",
    r"\mathrm{th}",
    r"^\circ",
    r"^{\circ}",
    r"\;",
    r",\!",
    "{,}",
    '"',
    r"\dots",
    "<|im_end|>",
    "<|endoftext|>",
)
_PATTERN_REWRITES: Final = (
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
    """The grade of slime's strands example.

    Attributes:
        score: 1.0 if the answer is right; else -1.1 plus 0.05 per tool iteration, at most -0.6.
        correct: True if the answer is right.
        pred: The answer as compared with the label; "" if slime would return None, or if there is an `error`.
        error: The error that slime would have raised, or an error about an overlong label; "" if none.
    """

    score: float
    correct: bool
    pred: str
    error: str = ""


def slime_example_grade(response: str, label: object, tool_iterations: float) -> DapoGrade:
    """Grade as slime's strands example does: by the text after the last "Answer:", else by the last box."""
    correct, pred, error = False, "", ""
    length = len(str(label))
    if length > _MAX_LABEL_CHARS:
        label, error = "", f"ValueError: a label of {length} characters; expected at most {_MAX_LABEL_CHARS}"
    try:
        correct, pred = _by_answer_line(response[-_SEEN_CHARS:], label or "")
        if pred == NO_ANSWER:
            correct, pred = _by_box(response[-_SEEN_CHARS_STRICT:], label or "")
    except (ValueError, OverflowError) as e:  # a label that is not a finite number
        error = error or f"{type(e).__name__}: {e}"
    score = 1.0 if correct else min(-0.6, -1.0 + (tool_iterations - 2) / 2 * 0.1)
    return DapoGrade(score, correct, pred, error)


def _by_answer_line(tail: str, label: object) -> tuple[bool, str]:
    """Compare the text after the last "Answer:" with the label's integer part; return the verdict and the text."""
    answers: list[str] = _ANSWER.findall(tail)
    pred = _normalize(answers[-1] if answers else NO_ANSWER)
    return pred == str(int(float(_normalize(str(label))))), pred


def _by_box(tail: str, label: object) -> tuple[bool, str]:
    """Compare the content of the last box with the label; return the verdict and the content.

    A label that is not a string never equals the content.
    """
    start = tail.rfind(_BOX)
    depth = 0
    for end in range(start, len(tail)) if start >= 0 else ():
        depth += (tail[end] == "{") - (tail[end] == "}")
        if tail[end] == "}" and depth == 0:
            pred = tail[start + len(_BOX) : end]
            return pred == label, pred
    return False, ""


def _normalize(answer: str) -> str:
    """Normalize an answer as slime's `normalize_final_answer` does."""
    answer = answer.rpartition("=")[2]
    for old, new in (*_REWRITES, *((removed, "") for removed in _REMOVED_TEXTS)):
        answer = answer.replace(old, new)
    for pattern, replacement in _PATTERN_REWRITES:
        answer = pattern.sub(replacement, answer)
    answer = answer.replace("$", "")
    digits = answer.replace(",", "")
    return (digits if digits.isdigit() else answer).strip()

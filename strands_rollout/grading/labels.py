r"""Find the answers that a label allows; describe labels that look like lists.

A list holds alternatives, any of which is right. The printed text of a list holds alternatives too, because tables and
JSON lines often contain this text instead of the list. Such texts are:

- lists with an item in quotes, perhaps nested, as Python, pandas, NumPy and JSON write them: `['34', '35']`, `["34"]`,
  `('34',)`, `{'34'}`, `['34' '35']`, `[np.str_('34')]`;
- calls of NumPy with any items: `array([34, 35])`, `[np.int64(34), np.int64(35)]`;
- numbers in square brackets without commas, as NumPy prints them: `[34 35]`;
- any of these in an outer pair of quotes from CSV or JSON: `"[""34"", ""35""]"`, `"[\"34\"]"`.

Other text in brackets is mathematics: `[1, 2]` is an interval, a vector or an ordered list, `(1, 2)` a pair, `\{1, 2\}`
a set, `[[1, 2], [3, 4]]` a matrix, and `[34]` is 34. Text that begins like a list of quoted items but is none, such as
a printed mapping, equals only the same text.
"""

import re
from dataclasses import dataclass
from typing import Final, Literal

from strands_rollout.grading.extraction import last_boxed

_MAX_LABEL_DEPTH: Final = 10
_SHOWN_CHARS: Final = 80
_LIST_TOKEN: Final = re.compile(
    r"(?P<call>(?:np\.|numpy\.)\w++\(|array\()|(?P<open>[\[({])|(?P<close>[\])}])|(?P<comma>\s*+,)|(?P<space>\s++)"
    r"""|(?P<quoted>[bu]?(?:'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+"))"""
    r"|(?P<number>[+-]?(?:\d++\.?\d*+|\.\d++)(?:[eE][+-]?\d++)?)"
    r"|(?P<absent>(?:None|null|nan|NaN)\b)|(?P<dtype>dtype=[^()\[\]]*+)",
    re.DOTALL,
)
_QUOTES: Final = "'\""
_ITEMS: Final = frozenset({"quoted", "number", "absent", "dtype"})
_UNESCAPED_COMMAND: Final = re.compile(r"(?<!\\)(?:\\\\)*+\\(?!u[\da-fA-F]{4}|x[\da-fA-F]{2})[A-Za-z]{2}")
_ESCAPE: Final = re.compile(r"\\(?:u(?P<four>[\da-fA-F]{4})|x(?P<two>[\da-fA-F]{2})|(?P<one>.))", re.DOTALL)
_CONTROL_CHARACTERS: Final = {"n": "\n", "t": "\t", "r": "\r"}
_LIST_OF_FORMULAS: Final = re.compile(r"\[[^\[\],]*+,[^\[\]]*+\]")
_CONTAINER: Final = re.compile(r"""(?:[\[({]\s*+['"]|array\()""")


def label_texts(label: object, depth: int = 0) -> tuple[str, ...]:
    r"""Return the answers that a label allows, as strings; an empty tuple for None, NaN and an empty list.

    Accepts what data sets contain: "42", 42, 42.0, "\boxed{42}", "... #### 42" (GSM8K), ["42", "forty-two"], "['42']".

    Raises:
        ValueError: A list contains itself or is nested too deeply, or an integer has more than 4,300 digits. A label
            that is a string never raises.
    """
    if hasattr(label, "tolist"):  # a NumPy scalar or array
        label = label.tolist()
    if isinstance(label, bytes):
        label = label.decode(errors="replace")
    if isinstance(label, str):
        items = listed_items(label) if depth < _MAX_LABEL_DEPTH else None
        if items is not None:
            return tuple(text for item in items for text in label_texts(item, depth + 1) if text)
        return (last_boxed(label) or label.rpartition("####")[2].strip(),)
    if depth > _MAX_LABEL_DEPTH:
        raise ValueError(
            f"the label is a list that is nested more than {_MAX_LABEL_DEPTH} levels deep or contains itself; expected "
            "a text, a number, or a list of these"
        )
    if isinstance(label, list | tuple | set | frozenset):
        return tuple(text for item in label for text in label_texts(item, depth + 1) if text)
    is_missing = label is None or label != label
    return () if is_missing else (str(label),)


def listed_items(text: str) -> list[str] | None:
    """Return the items of a text that is a printed list, with nested lists flattened; None for any other text."""
    text = text.strip()
    forms = [text]  # as it is, and without an outer pair of quotes
    if len(text) > 1 and text[0] == text[-1] and text[0] in _QUOTES:
        forms += [text[1:-1].replace(text[0] * 2, text[0]), _unquote(text)]
    elif '""' in text:
        forms.append(text.replace('""', '"'))
    return next((items for form in forms if (items := _parse_items(form.strip())) is not None), None)


def _parse_items(text: str) -> list[str] | None:
    """Return the items of a printed list that has no quotes around it; None for any other text."""
    items: list[str] = []
    kinds: set[str] = set()
    position, depth, deepest, previous_kind = 0, 0, 0, ""
    while position < len(text):
        token = _LIST_TOKEN.match(text, position)
        kind = token.lastgroup if token else None
        is_separated = previous_kind not in _ITEMS or kind in ("close", "comma", "space")
        if token is None or kind is None or not is_separated or (depth == 0 and kind not in ("open", "call")):
            return None
        depth += (kind in ("open", "call")) - (kind == "close")
        deepest = max(deepest, depth)
        if kind == "quoted":
            items.append(_unquote(token[0]))
        elif kind == "number":
            items.append(token[0])
        kinds.add(kind)
        position, previous_kind = token.end(), kind
        if depth == 0 and position < len(text):  # more than one container
            return None
    is_numpy_array = (
        text.startswith("[") and deepest == 1 and len(items) > 1 and not kinds & {"comma", "absent", "dtype"}
    )
    return items if text and depth == 0 and (kinds & {"quoted", "call"} or is_numpy_array) else None


def _unquote(literal: str) -> str:
    r"""Return the content of a string literal; LaTeX whose backslashes are not escaped stays as it is."""
    inner = literal.removeprefix("b").removeprefix("u")[1:-1]
    if _UNESCAPED_COMMAND.search(inner):
        return inner
    plain = _ESCAPE.sub(_replace_escape, inner)
    return plain.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # join JSON's surrogate pairs


def _replace_escape(escape: re.Match[str]) -> str:
    code = escape["four"] or escape["two"]
    return chr(int(code, 16)) if code else _CONTROL_CHARACTERS.get(escape["one"], escape["one"])


@dataclass(frozen=True, slots=True)
class ContainerLabel:
    """Reading of a label that looks like a printed list or mapping.

    Attributes:
        kind: "alternatives" (any is right), "mathematics", or "unreadable" (only the same text equals the label).
        meaning: A predicate for a message, such as "is the text of a list, read as '34'".
    """

    kind: Literal["alternatives", "mathematics", "unreadable"]
    meaning: str


def container_label(label: object) -> ContainerLabel | None:
    """Return how a label that looks like a printed list or mapping is read; None for any other label."""
    if not isinstance(label, str):
        return None
    text = label.strip()
    if listed_items(text) is not None:
        answers = [repr(answer)[:_SHOWN_CHARS] for answer in label_texts(text)]
        more = [f"{len(answers) - 3} more"] if len(answers) > 3 else []
        shown = " and ".join([*answers[:3], *more]) or "an empty list, which no answer equals"
        rule = ", any of which is right" if len(answers) > 1 else ""
        return ContainerLabel("alternatives", f"is the text of a list, read as {shown}{rule}")
    if _CONTAINER.match(text):
        meaning = "looks like the text of a list or mapping that can't be read: only the same text equals it"
        return ContainerLabel("unreadable", meaning)
    if _LIST_OF_FORMULAS.fullmatch(text):
        meaning = 'is read as mathematics (an interval, a vector or a list); write alternatives as ["1", "2"]'
        return ContainerLabel("mathematics", meaning)
    return None

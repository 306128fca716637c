"""Forms of labels: which texts of containers are lists of alternatives, and which are mathematics."""

import json
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strands_rollout.grading import container_label, grade, label_texts

UNHURRIED = settings(deadline=None)  # for a busy machine


def is_right(answer: str, label: object) -> bool:
    return grade(rf"\boxed{{{answer}}}", label).correct


@pytest.mark.parametrize(
    ("label", "texts"),
    [
        (42, ("42",)),
        (42.0, ("42.0",)),
        ("42", ("42",)),
        (r"\boxed{42}", ("42",)),
        ("6*7=<<6*7=42>>42\n#### 42", ("42",)),
        (["42", 43], ("42", "43")),
        (None, ()),
        ([], ()),
        ("", ("",)),
    ],
)
def test_label_texts_of_every_type(label: object, texts: tuple[str, ...]) -> None:
    assert label_texts(label) == texts


@pytest.mark.parametrize(
    ("label", "texts"),
    [
        ("['34']", ("34",)),
        ('["34"]', ("34",)),
        ('[ "34" ]', ("34",)),
        ('  ["34", "35"]\n', ("34", "35")),
        ("['34', '35',]", ("34", "35")),
        ("('34',)", ("34",)),
        ("{'34', '35'}", ("34", "35")),
        ("['34', 35, None, nan]", ("34", "35")),
        ("['34' '35']", ("34", "35")),
        ("['34'\n '35']", ("34", "35")),
        ("[34 35]", ("34", "35")),
        ("[ 34. -35.5]", ("34.", "-35.5")),
        ("array(['34'], dtype=object)", ("34",)),
        ("array(['34', '35'],\n      dtype='<U2')", ("34", "35")),
        ("np.array([34, 35])", ("34", "35")),
        ("[np.str_('34'), np.str_('35')]", ("34", "35")),
        ("[np.int64(34), np.float64(35.0)]", ("34", "35.0")),
        ("[array(['34'], dtype=object)]", ("34",)),
        ("[b'34']", ("34",)),
        ("[['34'], ['35']]", ("34", "35")),
        ('[["34"]]', ("34",)),
        ("[\"['34']\"]", ("34",)),
        (["['34', '35']", "36"], ("34", "35", "36")),
        (r"['\\frac{1}{2}']", (r"\frac{1}{2}",)),
        (r"['\frac{1}{2}']", (r"\frac{1}{2}",)),
        (r'["\\boxed{34}"]', ("34",)),
        ("['so\\n#### 34']", ("34",)),
        (r"""["it's", 'say "hi"', 'it\'s']""", ("it's", 'say "hi"', "it's")),
        (r'["\u00e9t\u00e9 \ud83d\ude00"]', ("été \U0001f600",)),
        ("['']", ()),
        ("\"['34', '35']\"", ("34", "35")),
        ('"[""34"", ""35""]"', ("34", "35")),
        ('[""34"", ""35""]', ("34", "35")),
        (json.dumps(json.dumps(["34", r"\frac{1}{2}"])), ("34", r"\frac{1}{2}")),
        ("'[''34'']'", ("34",)),
        ('["", "34"]', ("34",)),
    ],
)
def test_label_texts_reads_lists_as_alternatives(label: Any, texts: tuple[str, ...]) -> None:
    assert label_texts(label) == texts
    for text in texts:
        assert is_right(text, label)
    assert not is_right("33", label)


@pytest.mark.parametrize(
    "label",
    [
        "[1, 2]",
        "[1,2]",
        "(1, 2)",
        "[1, 2)",
        r"\{1, 2\}",
        "[[1, 2], [3, 4]]",
        "[[1 2]\n [3 4]]",
        r"[0, \infty)",
        "(1, 2), (3, 4)",
        "[34]",
        "[x y]",
        "(f'(x), g'(x))",
        "[5', 6']",
        "(34 35)",
        "1 2",
        "[a, b]",
        "[]",
        "['34'",
        "['1' '2' ... '9']",
        '{"a": "34"}',
        "['34'], ['35']",
        "['34'] or ['35']",
        "('a' or 'b')",
        "['a''b']",
        '["broken',
        "array([1, 2]",
        "[1e5x]",
    ],
)
def test_label_texts_keeps_other_text_in_brackets(label: str) -> None:
    assert label_texts(label) == (label,)


@pytest.mark.parametrize("answer", ["1", "2", "1, 2", "(1, 2)", "[2, 1]", r"\{1, 2\}"])
def test_grade_interval_label_keeps_its_meaning(answer: str) -> None:
    assert is_right("[1, 2]", "[1, 2]")
    assert is_right(r"1 \le x \le 2", "[1, 2]")
    assert not is_right(answer, "[1, 2]")


@pytest.mark.parametrize("label", ["['34', '35']", '["34", "35"]', "[34 35]", "array(['34', '35'], dtype=object)"])
def test_grade_list_label_equals_itself_but_no_joined_items(label: str) -> None:
    assert is_right(label, label)
    for wrong in ("3435", "34 35", "34, 35", "(34, 35)", "[34, 35]", "['34', '36']", "'3'"):
        assert not is_right(wrong, label)


@UNHURRIED
@given(st.lists(st.text(st.characters(exclude_categories=["C"]), min_size=1).map(str.strip).filter(bool), min_size=1))
def test_label_texts_reads_back_python_numpy_and_json(items: list[str]) -> None:
    plain = [item for item in items if not {*"\\#"} & {*item} and label_texts(item) == (item,)]
    wanted = tuple(plain)
    array = np.array(plain, dtype=object)
    for text in (
        str(plain),
        json.dumps(plain),
        repr(array),
        np.array2string(array, threshold=10**6),
        str(tuple(plain)),
    ):
        assert not plain or label_texts(text) == wanted


@UNHURRIED
@given(st.lists(st.sampled_from(["[", "]", "(", ")", "'", '"', "\\", "34", " ", ",", "a", "array(", "np.x(", "\\u12"])))
def test_label_texts_never_raises(parts: list[str]) -> None:
    text = "".join(parts)
    assert isinstance(label_texts(text), tuple)
    container_label(text)


@pytest.mark.parametrize("piece", ["[", "['", "['a' ", "['\\", "['a", "[1 ", "[1,", "np.a(", "array(", "[ ", "{'a', "])
def test_label_texts_takes_linear_time(piece: str) -> None:
    started = time.process_time()
    for text in (piece * (400_000 // len(piece)), piece[:1] + piece[1:] * 200_000):
        label_texts(text)
        container_label(text)
    assert time.process_time() - started < 4.0


@pytest.mark.parametrize(
    ("label", "kind", "words"),
    [
        ("['34', '35']", "alternatives", "read as '34' and '35', any of which is right"),
        ("[34 35]", "alternatives", "read as '34' and '35', any of which is right"),
        ("['34']", "alternatives", "read as '34'"),
        ("['1', '2', '3', '4', '5']", "alternatives", "read as '1' and '2' and '3' and 2 more,"),
        ("['']", "alternatives", "an empty list, which no answer equals"),
        ("[1, 2]", "mathematics", "is read as mathematics"),
        ("[1, 2, 3]", "mathematics", "is read as mathematics"),
        ('{"a": "34"}', "unreadable", "only the same text equals it"),
        ("['34'", "unreadable", "only the same text equals it"),
        ("['1' '2' ... '9']", "unreadable", "only the same text equals it"),
    ],
)
def test_container_label_describes_containers(label: str, kind: str, words: str) -> None:
    described = container_label(label)
    assert described is not None
    assert (described.kind, words in described.meaning) == (kind, True)


@pytest.mark.parametrize("label", ["34", "(1, 2)", r"\{1\}", "[0, 1)", "", None, 34, ["34"], {"a": 1}, "f(x) = [x]"])
def test_container_label_is_none_for_other_labels(label: object) -> None:
    assert container_label(label) is None

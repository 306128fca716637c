"""The shop example: its two tools, its configuration and its rows."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import TOOL_CALL, run
from hypothesis import given
from hypothesis import strategies as st

from strands_rollout.agent.tool_loading import load_tools
from strands_rollout.examples.shop import MAX_BITS, MAX_CHARS, PRICES, calculate, look_up_price
from strands_rollout.settings import read_config_file

REPOSITORY = Path(__file__).parents[2]
CONFIG = REPOSITORY / "configs/shop.yaml"
ROWS = REPOSITORY / "strands_rollout/examples/shop.jsonl"
ANSWER = "The answer is \\boxed{150}.<|im_end|>"

# Written from the questions alone, without a look at the templates.
SOLUTIONS: list[tuple[str, Callable[..., int]]] = [
    (r"What do (\d+) ITEM cost\?", lambda a, x: int(a) * PRICES[x]),
    (
        r"What do (\d+) ITEM and (\d+) ITEM cost\?",
        lambda a, x, b, y: int(a) * PRICES[x] + int(b) * PRICES[y],
    ),
    (
        r"\w+ buys (\d+) ITEM and pays with (\d+) dollars\..*",
        lambda a, x, m: int(m) - int(a) * PRICES[x],
    ),
    (
        r"How much change from (\d+) dollars does \w+ get for (\d+) ITEM and (\d+) ITEM\?",
        lambda m, a, x, b, y: int(m) - int(a) * PRICES[x] - int(b) * PRICES[y],
    ),
    (
        r"How many dollars more do (\d+) ITEM cost than (\d+) ITEM\?",
        lambda a, x, b, y: int(a) * PRICES[x] - int(b) * PRICES[y],
    ),
    (
        r"A box holds (\d+) ITEM and (\d+) ITEM\. What do (\d+) boxes cost\?",
        lambda a, x, b, y, n: int(n) * (int(a) * PRICES[x] + int(b) * PRICES[y]),
    ),
    (
        r"\w+ buys (\d+) ITEM every day\. How many dollars is that in (\d+) days\?",
        lambda a, x, n: sum(int(a) * PRICES[x] for _ in range(int(n))),
    ),
    (
        r"The cost of (\d+) ITEM is divided by (\d+)\. What is that, rounded down\?",
        lambda a, x, n: int(int(a) * PRICES[x] / int(n)),
    ),
]
ITEM = r"pieces of item (\d+)"
SIGNS = ["+", "-", "*", "//", "%"]
EXPRESSIONS = st.recursive(
    st.integers(0, 9999).map(str),
    lambda inner: (
        st.builds(lambda left, sign, right: f"({left} {sign} {right})", inner, st.sampled_from(SIGNS), inner)
        | inner.map(lambda operand: f"-{operand}")
    ),
    max_leaves=6,
).filter(lambda expression: len(expression) <= MAX_CHARS)


def call(name: str, **arguments: str) -> str:
    return TOOL_CALL.format(name=name, arguments=json.dumps(arguments))


def test_a_price_is_that_of_one_piece() -> None:
    assert look_up_price(item="35") == "21"
    assert look_up_price(item=" 35 ") == "21"


@pytest.mark.parametrize(
    ("item", "words"),
    [("355", r"no item number '355'. Did you mean 35\?"), ("lamp" * 99, "Its items are 13, 14, .*")],
)
def test_an_unknown_item_is_an_error_that_names_what_there_is(item: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        look_up_price(item=item)
    assert len(str(error.value)) < MAX_CHARS + 300


@given(expression=EXPRESSIONS)
def test_the_calculator_calculates_as_python_does(expression: str) -> None:
    try:
        expected = str(eval(expression))
    except ZeroDivisionError:
        with pytest.raises(ValueError, match="divided by zero"):
            calculate(expression=expression)
    else:
        assert calculate(expression=expression) == expected


def test_powers_are_calculated_where_they_stay_small() -> None:
    assert calculate(expression="(-3) ** 3 + 2 ** 100") == str((-3) ** 3 + 2**100)
    assert calculate(expression="0 ** 0 + 1 ** 256") == "2"


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("9 ** 9 ** 9", f"at most {MAX_BITS} bits"),
        ("2 ** -1", "no integer"),
        ("9" * 199, f"at most {MAX_BITS} bits"),
        ("(9 ** 80) * (9 ** 80)", f"at most {MAX_BITS} bits"),
        ("1 // 0", "divided by zero"),
        ("1 % (2 - 2)", "divided by zero"),
        ("7 / 2", "'7 / 2' is not allowed"),
        ("3(4)", r"'3\(4\)' is not allowed"),
        ("()", r"'\(\)' is not allowed"),
        ("*1", "'\\*1' is (no expression|not allowed)"),
        ("1 +", "is no expression"),
        ("", "is no expression"),
        ("__import__('os').abort()", "other signs"),
        ("1 if 1 else 2", "other signs"),
        ("1_000", "other signs"),
        ("٣", "other signs"),
        ("2.5", "other signs"),
        ("(" * 100 + ")" * 101, "at most 200 are allowed"),
        ("(" * 100 + "1" + ")" * 99, "is no expression"),
    ],
)
def test_what_is_no_small_calculation_is_refused(expression: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        calculate(expression=expression)


def test_the_deepest_expression_is_calculated() -> None:
    assert calculate(expression="-" * 199 + "1") == "-1"
    assert calculate(expression="(" * 99 + "1" + ")" * 99) == "1"


def test_the_configuration_names_both_tools_and_no_other() -> None:
    assert [tool.tool_name for tool in load_tools(read_config_file(CONFIG).tools)] == ["look_up_price", "calculate"]


async def test_an_episode_calls_both_tools_and_is_told_its_mistakes(shipped_tokenizer: Any) -> None:
    question = "What do 2 pieces of item 46 and 3 pieces of item 35 cost?"
    script = [
        call("look_up_price", item="355"),
        call("look_up_price", item="46"),
        call("calculate", expression="2 * 51 + x"),
        call("calculate", expression="2 * 51 + 48"),
        ANSWER,
    ]
    settings = yaml.safe_load(CONFIG.read_text())["strands_rollout"]
    done = await run(shipped_tokenizer, script, prompt=question, settings=settings)
    assert done.sample.status is done.sample.Status.COMPLETED
    shown = [shipped_tokenizer.decode(done.context_ids_after(turn)) for turn in range(4)]
    assert "Did you mean 35?" in shown[0]
    assert "\n51\n" in shown[1]
    assert "other signs" in shown[2]
    assert "\n150\n" in shown[3]
    assert (done.facts["tool_calls"], done.facts["tool_errors"]) == (4, 2)


def test_each_kind_of_question_has_a_row_whose_label_is_the_independent_solution() -> None:
    kinds = []
    for row in map(json.loads, ROWS.read_text().splitlines()):
        (message,) = row["prompt"]
        found = [
            (kind, str(solve(*match.groups())))
            for kind, (pattern, solve) in enumerate(SOLUTIONS)
            if (match := re.fullmatch(pattern.replace("ITEM", ITEM), message["content"]))
        ]
        assert [label for _, label in found] == [row["label"]], row
        kinds += [kind for kind, _ in found]
    assert kinds == list(range(len(SOLUTIONS)))

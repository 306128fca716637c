"""The shop example: its two tools and its configuration."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import TOOL_CALL, run
from hypothesis import given
from hypothesis import strategies as st

from strands_rollout.examples.shop import MAX_BITS, MAX_CHARS, calculate, look_up_price

REPOSITORY = Path(__file__).parents[2]
CONFIG = REPOSITORY / "configs/shop.yaml"
ANSWER = "The answer is \\boxed{150}.<|im_end|>"
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


def test_look_up_price_of_one_piece() -> None:
    assert (look_up_price(item="35"), look_up_price(item=" 35 ")) == ("21", "21")


@pytest.mark.parametrize(
    ("item", "words"), [("355", r"no item number '355'. Did you mean 35\?"), ("lamp" * 99, "Its items are 13, 14, .*")]
)
def test_look_up_price_unknown_item_names_the_known_ones(item: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        look_up_price(item=item)
    assert len(str(error.value)) < MAX_CHARS + 300


@given(expression=EXPRESSIONS)
def test_calculate_equals_python(expression: str) -> None:
    try:
        expected = str(eval(expression))
    except ZeroDivisionError:
        with pytest.raises(ValueError, match="divided by zero"):
            calculate(expression=expression)
    else:
        assert calculate(expression=expression) == expected


def test_calculate_small_powers() -> None:
    assert calculate(expression="(-3) ** 3 + 2 ** 100") == str((-3) ** 3 + 2**100)
    assert calculate(expression="0 ** 0 + 1 ** 256") == "2"


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("9 ** 9 ** 9", f"at most {MAX_BITS} bits"),
        ("2 ** -1", "not an integer"),
        ("9" * 199, f"at most {MAX_BITS} bits"),
        ("(9 ** 80) * (9 ** 80)", f"at most {MAX_BITS} bits"),
        ("1 // 0", "divided by zero"),
        ("7 / 2", "'7 / 2' is not allowed"),
        ("3(4)", r"'3\(4\)' is not allowed"),
        ("*1", "'\\*1' is not (an expression|allowed)"),
        ("1 +", "is not an expression"),
        ("", "is not an expression"),
        ("__import__('os').abort()", "other characters"),
        ("٣", "other characters"),
        ("2.5", "other characters"),
        ("(" * 100 + ")" * 101, "at most 200 are allowed"),
        ("(" * 100 + "1" + ")" * 99, "is not an expression"),
    ],
)
def test_calculate_refuses_all_but_small_calculations(expression: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        calculate(expression=expression)


def test_calculate_deepest_expression() -> None:
    assert (calculate(expression="-" * 199 + "1"), calculate(expression="(" * 99 + "1" + ")" * 99)) == ("-1", "1")


async def test_shop_episode_calls_both_tools_and_reads_errors(shipped_tokenizer: Any) -> None:
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
    assert "other characters" in shown[2]
    assert "\n150\n" in shown[3]
    assert (done.facts["tool_calls"], done.facts["tool_errors"]) == (4, 2)

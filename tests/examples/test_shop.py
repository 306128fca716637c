"""The shop: its two tools, its configuration, its rows, and the small model that was trained for it."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import TOOL_CALL, run
from hypothesis import given
from hypothesis import strategies as st

from strands_rollout.chat_template import ChatTemplate
from strands_rollout.config_file import read_config_file
from strands_rollout.dataset_rows import load_rows
from strands_rollout.engine_process import engine_process
from strands_rollout.evaluate import RunPlan, Summary, evaluate, slime_sampling_params
from strands_rollout.shop import MAX_BITS, MAX_CHARS, PRICES, calculate, look_up_price
from strands_rollout.tool_loading import load_tools

REPOSITORY = Path(__file__).parents[1]
CONFIG = REPOSITORY / "configs/shop.yaml"
DATA = REPOSITORY / "strands_rollout/data"
MODEL = DATA / "shop_model"
CHECKPOINT = REPOSITORY / "strands_rollout/engine/checkpoint"
RETRAIN = "retrain with: python scripts/train_shipped_model.py --task shop"
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


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def questions(name: str) -> list[str]:
    return [row["prompt"][0]["content"] for row in rows(name)]


def facts(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((MODEL / name).read_text())
    return value


def settings() -> dict[str, Any]:
    value: dict[str, Any] = yaml.safe_load(CONFIG.read_text())["strands_rollout"]
    return value


@pytest.fixture(scope="module")
def task() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(REPOSITORY / "scripts"))
        yield importlib.import_module("shipped_model.shop").shop_task()


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


async def test_an_episode_is_what_the_model_was_trained_on(task: Any, shipped_tokenizer: Any) -> None:
    question = "What do 2 pieces of item 46 and 3 pieces of item 35 cost?"
    script = [
        call("look_up_price", item="355"),
        call("look_up_price", item="46"),
        call("calculate", expression="2 * 51 + x"),
        call("calculate", expression="2 * 51 + 48"),
        ANSWER,
    ]
    done = await run(shipped_tokenizer, script, prompt=question, settings=settings())
    template = ChatTemplate(shipped_tokenizer)
    assert done.sample.status is done.sample.Status.COMPLETED
    assert done.fake.requests[0].input_ids == task.prompt.prompt_ids(template, question)
    answer_turns = importlib.import_module("shipped_model.tool_answers").answer_turns
    answers = await asyncio.to_thread(answer_turns, script, task.open_tools)
    assert [each[0][:7] for each in answers[:4]] == ["Error: ", "51", "Error: ", "150"]
    for turn, answer in enumerate(answers[:4]):
        assert done.context_ids_after(turn) == task.prompt.tool_answer_ids(template, answer)
    assert done.facts["tool_errors"] == 2


@pytest.mark.parametrize("name", ["shop_train.jsonl", "shop_held_out.jsonl"])
def test_rows_are_a_user_message_and_a_positive_label(name: str) -> None:
    for row in rows(name):
        assert list(row) == ["prompt", "label"]
        (message,) = row["prompt"]
        assert message["role"] == "user"
        assert row["label"] == str(int(row["label"]))
        assert int(row["label"]) > 0


def test_the_files_have_the_promised_sizes_and_no_question_twice() -> None:
    everything = questions("shop_train.jsonl") + questions("shop_held_out.jsonl")
    assert len(questions("shop_held_out.jsonl")) == 256
    assert len(everything) == len(set(everything)) == 2256


def test_labels_equal_an_independent_solution() -> None:
    checked = dict.fromkeys(range(len(SOLUTIONS)), 0)
    for row in rows("shop_train.jsonl") + rows("shop_held_out.jsonl"):
        for kind, (pattern, solve) in enumerate(SOLUTIONS):
            match = re.fullmatch(pattern.replace("ITEM", ITEM), row["prompt"][0]["content"])
            if match:
                assert str(solve(*match.groups())) == row["label"], row
                checked[kind] += 1
    assert all(count > 10 for count in checked.values()), checked


def test_the_rows_are_written_by_the_models_seed_alone_and_share_no_numbers(task: Any) -> None:
    plan = facts("training.json")["plan"]
    split = task.split(*(plan[key] for key in ("seed", "held_out_rows", "validation_rows", "problems")))
    assert task.rows_of(split.held_out) == rows("shop_held_out.jsonl")
    assert task.rows_of(split.training[: plan["training_rows"]]) == rows("shop_train.jsonl")
    keys = [{problem.key for problem in part} for part in (split.held_out, split.validation, split.training)]
    assert sum(map(len, keys)) == len(set.union(*keys)) == 256 + plan["validation_rows"] + plan["problems"]


def test_the_model_was_trained_on_the_prompt_and_the_tools_as_they_are(task: Any) -> None:
    assert facts("config.json")["prompts_sha256"] == task.prompts_sha256, (
        f"the prompt of {CONFIG.name} or a tool's description has changed since the model was trained; {RETRAIN}"
    )


def test_the_model_shares_the_shipped_tokenizer_and_leaves_room_to_learn() -> None:
    names = {path.name for path in CHECKPOINT.iterdir()}
    assert {path.name for path in MODEL.iterdir()} == names
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (MODEL / name).read_bytes() == (CHECKPOINT / name).read_bytes()
    held_out = facts("training.json")["held_out"]
    assert 0.5 <= held_out["accuracy"] <= 0.8
    assert held_out["episodes"] >= 1024
    assert held_out["tool_calls_per_episode"] > 2


@pytest.mark.parametrize(
    ("count", "least", "most"), [(12, 0.2, 1.0), pytest.param(256, 0.5, 0.8, marks=pytest.mark.slow)]
)
async def test_the_model_plays_the_shop_on_the_embedded_engine(count: int, least: float, most: float) -> None:
    held_out = load_rows(DATA / "shop_held_out.jsonl")[:count]
    async with engine_process(MODEL) as url:
        plan = RunPlan(url, MODEL, slime_sampling_params(1.0, 1024), seed=1, settings=settings())
        summary = Summary.of(await evaluate(held_out, plan))
    assert summary.ok
    assert least <= summary.accuracy <= most
    assert summary.tool_calls >= 2 * count

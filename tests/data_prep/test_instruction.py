"""A data set's own answer instruction: taken off at the edges of a prompt, and nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prep_support import PREFIX, SUFFIX, chat
from preparation.instruction import InstructionCount, still_asks, without_instruction, without_instructions

from strands_rollout.settings import SYSTEM_PROMPT

PROBLEM = "Find $m+n$ where $\\frac{m}{n}$ is the probability that two cards match."
BEGINNINGS = [
    PREFIX,
    PREFIX.replace("$Answer (without quotes)", "\\boxed{$Answer}"),
    PREFIX.replace("\n\n", "\n"),
    PREFIX.removeprefix("Solve the following math problem step by step. "),
    "Solve the following math problem efficiently and clearly. The last line of your response should be of the "
    "following format: 'Answer: $ANSWER' (without quotes) where $ANSWER is the final answer.\n",
    "The last line of your response must be of the form 'Answer: <answer>' where <answer> is your final answer.\n",
    'The last line of your response should be of the form Answer: "$Answer" (without quotes) where "$Answer" is the '
    "answer to the problem.\n",
    "Please reason step by step, and put your final answer within \\boxed{}.\n\n",
]
ENDINGS = {
    SUFFIX: "answer_line",
    "\n\nRemember to put your answer on its own line after “Answer:”": "answer_line",
    '\n\nRemember to put your answer on its own line after "Answer:", and you do not need to use a \\boxed command.': (
        "answer_line"
    ),
    " Please reason step by step, and put your final answer within \\boxed{}.": "boxed",
    "\nPlease put your final answer within $\\boxed{}$.": "boxed",
    "\nLet's think step by step and output the final answer within \\boxed{}.": "boxed",
    "\nPresent the answer as \\boxed{your answer}": "boxed",
    ' Let\'s think step by step and output the final answer after "####".': "hashes",
}


@pytest.mark.parametrize("beginning", ["", *BEGINNINGS])
@pytest.mark.parametrize(("ending", "kind"), [("", ""), *ENDINGS.items()])
def test_instructions_around_the_problem_are_taken_off_and_named(beginning: str, ending: str, kind: str) -> None:
    text, kinds = without_instruction(beginning + PROBLEM + ending)
    assert text == PROBLEM
    assert kinds >= ({kind} - {""})
    assert without_instruction(f"{beginning}{PROBLEM} Put your final answer within \\boxed{{}}.{ending}")[0] == PROBLEM


@pytest.mark.parametrize(
    "text",
    [
        'A form reads "Question: 7 times 8. Answer: __". What belongs on the line?',
        "The last line of a poem has 7 words. Answer: how many letters has its first line, if each word has 5?",
        "Give your answer as \\boxed{m+n} where m and n are relatively prime.",
        "Put your final answer in lowest terms within \\boxed{}.",
        "The boxed numbers are 3 and 4. Put the answer in the box.",
        "Remember to put your answer on its own line after the others in the table. How many lines has it?",
        "Answer: 12 is the answer to which of the 5 questions?",
        "Put your final answer within \\boxed{} as a fraction. What is half of a third?",
        "Simplify the sum 1/2 + 1/3, and give the final answer in \\boxed{}.",
        "The last line of your response should be of the form Answer: $m+n where $m/n$ is the answer to the problem.",
        "The last line of your answer must be of the form Answer: $p where p/q is the answer. Find p and q.",
        f"{PROBLEM}\nThe last line of your response should be of the form Answer: $m+n where $m/n$ is the answer.",
        "A man writes: put your final answer within \\boxed{}.",
        'How many words has "put your final answer within \\boxed{}."',
        "Find the answer.",
        "",
    ],
)
def test_words_of_a_problem_are_never_touched(text: str) -> None:
    assert without_instruction(text) == (text, frozenset())


@given(st.text(alphabet=st.sampled_from("ab1 .:\n${}\\Answer"), max_size=60))
def test_what_stands_between_the_instructions_is_left(text: str) -> None:
    wrapped = f"{PREFIX}Q{text}Q{SUFFIX}"
    assert without_instruction(wrapped)[0] == f"Q{text}Q"


def test_the_default_system_prompt_asks_for_what_is_left_to_ask_for() -> None:
    system = [{"role": "system", "content": SYSTEM_PROMPT}]
    assert "\\boxed{}" in SYSTEM_PROMPT
    assert without_instructions(system) == (system, frozenset())
    assert not still_asks(system)


def test_a_long_text_takes_no_longer_than_its_length_allows() -> None:
    text = "please reason step by step, and put your final answer " * 20_000
    assert without_instruction(text)[0] == text


def test_a_system_message_that_is_only_an_instruction_goes_and_a_users_message_stays() -> None:
    boxed = "Please reason step by step, and put your final answer within \\boxed{}."
    given_chat = [{"role": "system", "content": boxed}, *chat(PROBLEM)]
    assert without_instructions(given_chat) == (chat(PROBLEM), {"boxed"})
    assert without_instructions(chat(boxed)) == (chat(boxed), frozenset())


@pytest.mark.parametrize(
    ("asks", "kind"),
    [
        ("The last line of your response should be of the form Answer: $m+n where $m/n$ is the answer.", "answer_line"),
        ("At the very end, write a line with Answer: followed by the number.", "answer_line"),
        ("End your response with #### 12, say.", "hashes"),
        ("Put the number between <answer> and </answer>.", "tags"),
        ("Return only the number.", "bare"),
        ("Respond with just the integer.", "bare"),
        ("Give the result as a JSON object.", "json"),
    ],
)
def test_instructions_that_contradict_the_system_prompt_stay_and_are_counted_with_an_example(
    asks: str, kind: str
) -> None:
    count = InstructionCount(removing=True)
    text = f"{PROBLEM} {asks}"
    assert count.apply(chat(text)) == chat(text)
    facts = count.facts()
    assert (facts["still_asking_kinds"], facts["still_asking_example"]) == ({kind: 1}, text)


@pytest.mark.parametrize("removing", [True, False])
def test_the_instruction_is_counted_by_prompt_and_kind_whether_it_is_removed_or_kept(removing: bool) -> None:
    count, text = InstructionCount(removing=removing), PREFIX + PROBLEM + SUFFIX
    assert count.apply(chat(text)) == chat(PROBLEM if removing else text)
    assert count.apply(chat(PROBLEM)) == chat(PROBLEM)
    facts = count.facts()
    assert (facts["mode"], facts["prompts"], facts["still_asking"]) == (("keep", "remove")[removing], 1, not removing)
    assert facts["kinds"] == {"answer_line": 1, "boxed": 0, "hashes": 0}


@pytest.mark.parametrize(
    "text",
    [
        "Jason writes the answer in the box. How many boxes are there if only every third holds one?",
        "#### Problem 3\nHow many are there?",
        "He gives just half of the 12 apples away; only Anna returns hers.",
    ],
)
def test_words_of_a_problem_are_no_such_instruction(text: str) -> None:
    assert not still_asks(chat(text)) - {"bare"}

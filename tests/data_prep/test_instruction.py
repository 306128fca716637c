"""A data set's own answer instruction: removed only at the edges of a prompt."""

import pytest
from prep_support import PREFIX, SUFFIX, chat
from preparation.instruction import InstructionCount, without_instruction

PROBLEM = "Find $m+n$ where $\\frac{m}{n}$ is the probability that two cards match."
BEGINNINGS = [
    PREFIX,
    PREFIX.replace("$Answer (without quotes)", "\\boxed{$Answer}"),
    "Solve the following math problem efficiently and clearly. The last line of your response should be of the "
    "following format: 'Answer: $ANSWER' (without quotes) where $ANSWER is the final answer.\n",
    'The last line of your response should be of the form Answer: "$Answer" (without quotes) where "$Answer" is the '
    "answer to the problem.\n",
    "Please reason step by step, and put your final answer within \\boxed{}.\n\n",
]
ENDINGS = {
    SUFFIX: "answer_line",
    '\n\nRemember to put your answer on its own line after "Answer:", and you do not need to use a \\boxed command.': (
        "answer_line"
    ),
    " Please reason step by step, and put your final answer within \\boxed{}.": "boxed",
    "\nLet's think step by step and output the final answer within \\boxed{}.": "boxed",
    ' Let\'s think step by step and output the final answer after "####".': "hashes",
}


@pytest.mark.parametrize("beginning", ["", *BEGINNINGS])
@pytest.mark.parametrize(("ending", "kind"), [("", ""), *ENDINGS.items()])
def test_without_instruction_removes_instructions_at_the_edges(beginning: str, ending: str, kind: str) -> None:
    text, kinds = without_instruction(beginning + PROBLEM + ending)
    assert text == PROBLEM
    assert kinds >= ({kind} - {""})
    assert without_instruction(f"{beginning}{PROBLEM} Put your final answer within \\boxed{{}}.{ending}")[0] == PROBLEM


@pytest.mark.parametrize(
    "text",
    [
        'A form reads "Question: 7 times 8. Answer: __". What belongs on the line?',
        "Give your answer as \\boxed{m+n} where m and n are relatively prime.",
        "The boxed numbers are 3 and 4. Put the answer in the box.",
        "Answer: 12 is the answer to which of the 5 questions?",
        "Simplify the sum 1/2 + 1/3, and give the final answer in \\boxed{}.",
        "The last line of your response should be of the form Answer: $m+n where $m/n$ is the answer to the problem.",
        "A man writes: put your final answer within \\boxed{}.",
        "",
    ],
)
def test_without_instruction_leaves_the_problem_unchanged(text: str) -> None:
    assert without_instruction(text) == (text, frozenset())


def test_without_instruction_handles_a_long_text() -> None:
    text = "please reason step by step, and put your final answer " * 20_000
    assert without_instruction(text)[0] == text


@pytest.mark.parametrize(
    ("asks", "kind"),
    [
        ("The last line of your response should be of the form Answer: $m+n where $m/n$ is the answer.", "answer_line"),
        ("End your response with #### 12, say.", "hashes"),
        ("Put the number between <answer> and </answer>.", "tags"),
        ("Return only the number.", "bare"),
        ("Give the result as a JSON object.", "json"),
    ],
)
def test_instruction_count_keeps_contradicting_instructions(asks, kind) -> None:
    count = InstructionCount(removing=True)
    text = f"{PROBLEM} {asks}"
    assert count.apply(chat(text)) == chat(text)
    facts = count.facts()
    assert (facts["still_asking_kinds"], facts["still_asking_example"]) == ({kind: 1}, text)

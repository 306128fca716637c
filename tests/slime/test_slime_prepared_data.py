"""slime's own data set class reads the files of data_prep, and an agent can start with the rows."""

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from strands_rollout.play.rows import take_rows
from strands_rollout.settings import SYSTEM_PROMPT
from strands_rollout.slime_plugin.inputs import EpisodePrompt, to_episode_prompt
from strands_rollout.template.chat_template import ChatTemplate

pytestmark = pytest.mark.slime

SCRIPT = Path(__file__).parents[2] / "data_prep/dapo_math_17k.py"
ASKS = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\nRemember to put your answer on its "
    'own line after "Answer:".'
)
PROBLEMS = ["A baker fills 6 trays with 17 rolls each. How many rolls?", "How many corners have 9 squares in all?"]


@pytest.fixture
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    rows = [
        {"prompt": [{"role": "user", "content": ASKS.format(text)}], "label": label, "metadata": {"source_name": "own"}}
        for text, label in zip(PROBLEMS, ["102", "036"], strict=True)
    ]
    pq.write_table(pa.Table.from_pylist(rows * 3), folder / "source.parquet")
    arguments = ["--from", str(folder / "source.parquet"), "--out", str(folder / "prepared.jsonl")]
    environment = {**os.environ, "HF_HOME": str(folder / "home")}
    subprocess.run([sys.executable, str(SCRIPT), *arguments], env=environment, check=True, capture_output=True)
    return folder / "prepared.jsonl"


def test_prepared_data_is_read_alike_by_slime_and_package(prepared, shipped_tokenizer) -> None:
    from slime.utils.data import Dataset

    samples = Dataset(str(prepared), None, None, None, prompt_key="prompt", label_key="label").samples
    assert [(sample.prompt, sample.label, sample.metadata) for sample in samples] == [
        ([{"role": "user", "content": text}], label, {"source_name": "own"})
        for text, label in zip(PROBLEMS, ["102", "36"], strict=True)
    ]
    sample = samples[0]
    started = to_episode_prompt(sample.prompt, SYSTEM_PROMPT, ChatTemplate(shipped_tokenizer))
    assert started == EpisodePrompt(SYSTEM_PROMPT, [{"role": "user", "content": [{"text": PROBLEMS[0]}]}])
    (row,) = take_rows(prepared, 1)
    assert (row.prompt, row.label) == (sample.prompt, sample.label)

"""The plan of an evaluation: usable rows, the commands' options, slime's file of data sets."""

import functools
import json
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from evaluation_stage import write_problems

from strands_rollout.errors import ConfigError, PromptError
from strands_rollout.evaluation.plan import DataFile, EvalSet, read_eval_config
from strands_rollout.evaluation.results import settings_identity
from strands_rollout.play.engine import shipped_model_note
from strands_rollout.play.options import Sampling
from strands_rollout.play.rows import load_rows
from strands_rollout.settings import RolloutSettings

GOOD = {"prompt": "What is 17 * 2?", "label": "34"}


def load(folder: Path, *rows: dict[str, Any], limit: int | None = None) -> EvalSet:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return EvalSet.load(DataFile("rows", path), Sampling(1, 64), limit=limit)


@pytest.mark.parametrize("label", [None, [], ["", None], "#### ", {"answer": "34"}])
def test_eval_set_refuses_a_label_that_no_answer_equals(tmp_path, label):
    with pytest.raises(PromptError, match=r"rows\.jsonl:2: got the label .*, which no answer equals"):
        load(tmp_path, GOOD, {**GOOD, "label": label})
    assert len(load(tmp_path, GOOD, {**GOOD, "label": label}, limit=1).rows) == 1, "rows after the limit are unchecked"


def test_eval_set_names_the_limit_that_selects_no_row(tmp_path):
    with pytest.raises(ConfigError, match=r"limit=0 selects none of the 1 rows of .*; expected one or more$"):
        load(tmp_path, GOOD, limit=0)


@pytest.mark.parametrize(
    "prompt", [" ", None, [], 34, [{"role": "user", "content": ""}], [{"role": "tool", "content": "a"}]]
)
def test_eval_set_refuses_an_unusable_prompt(tmp_path, prompt):
    with pytest.raises(PromptError, match=r"rows\.jsonl:2: got "):
        load(tmp_path, GOOD, {**GOOD, "prompt": prompt})


def test_eval_set_keeps_a_rows_metadata(tmp_path):
    first, second = load(tmp_path, {**GOOD, "metadata": {"source": "mine"}}, {**GOOD, "metadata": None}).rows
    assert (first.metadata, second.metadata) == ({"source": "mine"}, {})
    with pytest.raises(PromptError, match=r"rows\.jsonl:1: got metadata='mine'; expected an object"):
        load(tmp_path, {**GOOD, "metadata": "mine"})


def test_load_rows_reads_tables_by_column(tmp_path):
    chat = [{"role": "user", "content": "What is 7 * 1?"}]
    rows = [{"ask": chat, "gold": {"is": label}, "metadata": {"source": "mine"}} for label in (7, 8)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    for kind in ("parquet", "json"):
        first, second = load_rows(tmp_path / f"rows.{kind}", prompt_key="ask", label_key="gold.is")
        assert (first.prompt, first.label, second.label, first.metadata) == (chat, 7, 8, {"source": "mine"})
    path = tmp_path / "rows.csv"
    path.write_text('\ufeffask,is\n"What, is\n7?",007\n', encoding="utf-8")
    assert [(row.prompt, row.label, row.line) for row in load_rows(path, prompt_key="ask", label_key="is")] == [
        ("What, is\n7?", "007", 2)
    ]
    with pytest.raises(
        PromptError, match="got the keys ask, is, and no 'prompt': name the prompt's key with --input-key"
    ):
        load_rows(path)
    with pytest.raises(PromptError, match="no 'label': name the label's key with --label-key, or set a reward"):
        load_rows(path, prompt_key="ask")
    assert load_rows(path, prompt_key="ask", needs_label=False)[0].label is None


def test_load_rows_reads_parquet_without_datasets(tmp_path, monkeypatch):
    rows = [{"prompt": "1 + 1?", "label": "2", "metadata": {"source": "mine"}}] * 2
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert [(row.label, row.line, row.metadata) for row in load_rows(tmp_path / "rows.parquet")] == [
        ("2", 1, {"source": "mine"}),
        ("2", 2, {"source": "mine"}),
    ]
    (tmp_path / "broken.parquet").write_text("no table")
    with pytest.raises(PromptError, match=r"can't read .*broken\.parquet as a data set: ArrowInvalid: "):
        load_rows(tmp_path / "broken.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(PromptError, match=r"rows\.parquet needs 'pyarrow'; run: pip install 'strands-rollout\[data\]'"):
        load_rows(tmp_path / "rows.parquet")


CSV = """prompt,label,metadata
"1 +
1?",2,"{""source"": ""mine""}"

2 + 2?,4,
"""


def test_load_rows_csv_metadata_and_line_numbers(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(CSV)
    first, second = load_rows(path)
    assert (first.line, first.metadata, second.line, second.metadata) == (2, {"source": "mine"}, 5, {})


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("3?,3,mine", "6: got metadata='mine'; expected a JSON object, such as .*; or rename the column"),
        ("3?,3,[1]", r"6: got metadata='\[1\]'; expected a JSON object"),
        ("What, is 3?,3,", "6: got 4 fields; expected 3, as in the first line; put values with commas into quotes"),
        ("3?", "6: got the keys prompt, and no 'label': .*; expected a line with the columns prompt and label"),
    ],
)
def test_load_rows_csv_error_names_line_and_remedy(tmp_path, row, words):
    path = tmp_path / "rows.csv"
    path.write_text(f"{CSV}{row}\n")
    with pytest.raises(PromptError, match=rf"rows\.csv:{words}") as refused:
        load_rows(path)
    assert "JSON object like" not in str(refused.value)


def test_load_rows_empty_file_error_shows_the_format(tmp_path):
    for name, content, words in [
        ("rows.csv", "prompt,label\n", "expected a first line with the columns' names, and one line per row"),
        ("rows.jsonl", "\n", r"expected at least one row \(JSONL has a JSON object per line\)"),
    ]:
        (tmp_path / name).write_text(content)
        with pytest.raises(PromptError, match=f"has no rows; {words}"):
            load_rows(tmp_path / name)


def test_load_rows_from_the_hub_by_configuration_and_split(tmp_path, monkeypatch):
    """A local folder with the same layout stands in for the hub."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "hub" / "sums"
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(json.dumps({"prompt": f"of {split}", "label": "7"}) + "\n")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    honest = datasets.load_dataset
    place = functools.partial(honest, str(folder), cache_dir=str(tmp_path / "cache"))
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config, split: place(config, split=split))
    assert load_rows(Path("me/sums@test"))[0].prompt == "of test"
    with pytest.raises(PromptError, match="has the splits train, test; name one, as in me/sums@train"):
        load_rows(Path("me/sums"))


@pytest.mark.parametrize("content", [b'"\\ud800"', b'"\xff"', b"[" * 100_000])
def test_load_rows_names_the_unreadable_line(tmp_path, content):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a", "label": ' + content + b"}\n")
    with pytest.raises(PromptError, match=r"rows\.jsonl:1: "):
        load_rows(path)


DEFAULT = Sampling(samples=16, max_new_tokens=16384)


def config(folder: Path, entries: Any, defaults: Any = None, **more: Any) -> Path:
    path = folder / "eval.yaml"
    path.write_text(yaml.safe_dump({"eval": {"defaults": defaults, "datasets": entries, **more}}))
    return path


def read(path: Path, notes: list[str] | None = None, limit: int | None = None) -> list[EvalSet]:
    return read_eval_config(path, DEFAULT, limit=limit, on_note=(notes if notes is not None else []).append)


def test_eval_config_entry_overrides_file_and_options(tmp_path):
    data = str(write_problems(tmp_path))
    entries = [
        {"name": "a", "path": data, "temperature": 0.6, "n_samples_per_eval_prompt": 2, "stop": ["END"]},
        {"name": "b", "path": data},
    ]
    first, second = read(config(tmp_path, entries, {"temperature": 0.8, "top_p": 0.9, "max_response_len": 300}))
    assert (first.name, first.sampling.samples, second.name, second.sampling.samples) == ("a", 2, "b", 16)
    given = {"temperature": 0.6, "top_p": 0.9, "top_k": -1, "max_new_tokens": 300, "stop": ["END"]}
    assert first.sampling.params.items() >= given.items()
    assert second.sampling.params["temperature"] == 0.8
    assert second.sampling.params["stop"] is None


def test_eval_config_data_sets_as_a_mapping(tmp_path):
    data = str(write_problems(tmp_path))
    path = tmp_path / "eval.yaml"
    path.write_text(yaml.safe_dump({"datasets": {"a": {"path": data}, "b": {"path": data, "min_new_tokens": 2}}}))
    first, second = read(path)
    assert (first.name, second.name, second.sampling.params["min_new_tokens"]) == ("a", "b", 2)
    assert "min_new_tokens" not in first.sampling.params


@pytest.mark.parametrize(("part", "labels"), [("", "012345"), ("@[1:3]", "12"), ("@[-2:]", "45"), ("@[1:]", "1234")])
def test_eval_config_path_selects_rows_as_in_slime(tmp_path, part, labels):
    data = write_problems(tmp_path, 6)
    (chosen,) = read(config(tmp_path, [{"name": "a", "path": f"{data}{part}"}]), limit=4 if part == "@[1:]" else None)
    assert [row.label for row in chosen.rows] == list(labels)


def test_eval_config_notes_ignored_keys_once(tmp_path):
    data = str(write_problems(tmp_path))
    notes: list[str] = []
    read(config(tmp_path, [{"name": name, "path": data} for name in "ab"], {"rm_type": "math", "tool_key": "t"}), notes)
    assert [note.partition(": ")[2] for note in notes] == [
        "rm_type has no meaning here and is ignored",
        "tool_key has no meaning here and is ignored",
    ]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"temperatur": 1}, "unknown key temperatur; did you mean 'temperature'?"),
        ({"temperature": -1}, "got temperature=-1"),
        ({"top_k": "many"}, "got top_k='many'"),
        ({"path": None}, "got path=None"),
        ({"path": "sums.jsonl@[7:9]"}, r"\[7:9\] selects none of the 3 rows of sums.jsonl"),
        ({"path": "sums.jsonl@[7:]"}, r"\[7:\] selects none of the 3 rows of sums.jsonl"),
        ({"path": "sums.jsonl@[:0]"}, r"\[:0\] selects none of the 3 rows of sums.jsonl"),
        ({"path": "rows.csv"}, "expected a .jsonl or .parquet file"),
        ({"path": "${oc.env:NO_SUCH_VARIABLE}/rows.jsonl"}, "NO_SUCH_VARIABLE"),
        ({"multimodal_keys": {"image": "images"}}, "multimodal_keys.*can't be evaluated here"),
        ({"apply_chat_template": True}, "got apply_chat_template=True; .*can't be evaluated here"),
        ({"custom_rm_path": "my.reward"}, "got custom_rm_path='my.reward'; .*'strands_rollout.reward_func'"),
    ],
)
def test_eval_config_refuses_an_impossible_entry(tmp_path, entry, words, monkeypatch):
    write_problems(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=words):
        read(config(tmp_path, [{"name": "a", "path": "sums.jsonl", **entry}]))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("eval: {datasets: []}", "no eval.datasets"),
        ("eval: {default: {}, datasets: [{name: a, path: b}]}", "unknown key default; did you mean 'defaults'?"),
        ("eval: {datasets: [1]}", r"got datasets\.0=1; expected: a mapping"),
        ("eval: {datasets: [{name: a, path: b}, {name: a, path: c}]}", "expected different names"),
        ("a: [", r"^\S+eval\.yaml can't be read as YAML: "),
        (None, r"^can't read \S+eval\.yaml: No such file or directory$"),
    ],
)
def test_eval_config_refuses_a_file_of_another_form(tmp_path, content, words):
    path = tmp_path / "eval.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        read(path)


def test_eval_config_reads_the_shipped_file(tmp_path, monkeypatch):
    for name in ("aime-2024", "aime-2025", "gsm8k-test"):
        write_problems(tmp_path, name=f"{name}.jsonl")
    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    notes: list[str] = []
    sets = read(Path(__file__).parents[2] / "configs" / "aime_eval.yaml", notes)
    assert [chosen.name for chosen in sets] == ["aime-2024", "aime-2025", "gsm8k-test"]
    assert sets[0].file.path == tmp_path / "aime-2024.jsonl", "references in the file are resolved as in slime"
    assert notes == []


@pytest.mark.parametrize(
    "settings",
    [
        {"executor": {"name": "sandbox_fusion", "headers": {"authorization": "TOKEN"}}},
        {"tools": [{"name": "mine", "url": "http://127.0.0.1/mcp", "headers": {"authorization": "TOKEN"}}]},
        {"agent_command": {"command": "my-agent {prompt}", "env": {"API_KEY": "TOKEN"}}},
        {"environment": "strands_env", "environment_factory": "a.b", "environment_config": {"api_key": "TOKEN"}},
    ],
    ids=["executor", "MCP server", "command", "environment"],
)
def test_settings_identity_records_options_as_a_checksum(settings):
    def recorded(token: str) -> str:
        given = json.loads(json.dumps(settings).replace("TOKEN", token))
        return json.dumps(settings_identity(RolloutSettings.model_validate(given)))

    assert recorded("one") == recorded("one") != recorded("two")
    assert '"one"' not in recorded("one")


@pytest.mark.parametrize("changed", [{"tools": ()}, {"system_prompt": "You keep a shop."}, {"environment": "a.World"}])
def test_shipped_model_note_names_changed_settings(changed):
    settings, config = RolloutSettings(**changed), Path("my.yaml")
    note = shipped_model_note(settings, config, None, None)
    assert f"not with your {next(iter(changed))}." in note
    assert "strands-rollout try my.yaml --script FILE" in note
    assert "(strands-rollout try --script FILE, or --you)" in shipped_model_note(settings, None, None, None)
    assert shipped_model_note(RolloutSettings(executor="local"), config, None, None) is None
    assert shipped_model_note(settings, config, "http://127.0.0.1:1", None) is None
    assert shipped_model_note(settings, config, None, Path("another")) is None

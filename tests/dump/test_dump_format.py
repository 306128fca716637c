"""The dump format: round trips of samples, errors of broken lines and files, masked secrets."""

import copy
import gzip
import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from full_disk import limit_file_size
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strands_rollout.dump import DumpWriter, TokenTexts, read_dump, write_dump
from strands_rollout.dump.files import recorded_tokenizer
from strands_rollout.dump.record import DumpRecord, read_line, record_line
from strands_rollout.errors import ConfigError, DumpError
from strands_rollout.samples import Sample


def sample(**changes: Any) -> Sample:
    values = {
        "index": 3,
        "prompt": [{"role": "user", "content": "17 * 2?"}],
        "tokens": [1, 2, 3, 4],
        "response_length": 3,
        "loss_mask": [1, 0, 1],
        "rollout_log_probs": [-0.1, 0.0, -2.5e-07],
        "reward": {"score": 1.0},
        "status": Sample.Status.TRUNCATED,
        "metadata": {"strands_rollout": {"turns": 2, "spans": [[0, 1, 2, "7"], [1, 3, 4, None]]}},
    }
    return Sample(**(values | changes))


def round_trip(written: Any) -> Any:
    return read_line(record_line(DumpRecord.from_sample(written)), "here").to_sample()


_PLAIN_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.binary())
    | st.text(st.characters(codec=None, exclude_categories=())),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.just("$map"), inner)
    ),
    max_leaves=12,
)


def _is_identical(first: Any, second: Any) -> bool:
    """Return whether values and their types are equal on every level; 1, 1.0 and True differ."""
    return repr(first) == repr(second)


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(
    tokens=st.lists(st.integers(0, 2**31), min_size=1),
    logprobs=st.lists(st.floats()),
    reward=_PLAIN_VALUES,
    metadata=st.dictionaries(st.text(), _PLAIN_VALUES),
)
def test_record_line_round_trips_samples(tokens: list[int], logprobs: list[float], reward: Any, metadata: Any) -> None:
    written = sample(tokens=tokens, rollout_log_probs=logprobs, reward=reward, label=(reward,), train_metadata=None)
    written.metadata = {"user": [metadata, 1.5]}
    written.trace = {"events": [1]}  # slime's tracing adds this attribute
    read = round_trip(written)
    assert _is_identical(read.to_dict(), {**written.to_dict(), "metadata": read.metadata})
    assert _is_identical(read.metadata["user"][1], 1.5)


def test_record_line_round_trips_values_that_json_lacks() -> None:
    experts = np.arange(12, dtype=np.int32).reshape(2, 3, 2)[:, ::2]
    written = sample(rollout_routed_experts=experts, metadata={"loss": np.float32(0.1)})
    written.rollout_log_probs = [math.nan, -math.inf, 0.0]
    line = record_line(DumpRecord.from_sample(written))
    assert b"NaN" not in line
    read = read_line(line, "here").to_sample()
    assert math.isnan(read.rollout_log_probs[0])
    assert read.rollout_log_probs[1:] == [-math.inf, 0.0]
    assert read.rollout_routed_experts.dtype == np.int32
    assert np.array_equal(read.rollout_routed_experts, experts)
    assert _is_identical(read.metadata["loss"], np.float32(0.1))


@pytest.mark.parametrize("value_type", ["builtins.object", "PIL.Image.Image"])
def test_record_line_error_names_value_type_and_sample(value_type: str) -> None:
    value = object() if value_type == "builtins.object" else pytest.importorskip("PIL.Image").new("CMYK", (2, 2))
    with pytest.raises(
        DumpError, match=rf"sample index=3: metadata holds {re.escape(value_type)}; expected plain values"
    ):
        record_line(DumpRecord.from_sample(sample(metadata={"it": value})))


@pytest.mark.parametrize("field", ["label", "metadata", "reward"])
@pytest.mark.parametrize("depth", [300, 5000, None])
def test_record_line_refuses_cyclic_or_deep_values(field: str, depth: int | None) -> None:
    nested: list[Any] = []
    nested.extend([nested] if depth is None else [])
    for _ in range(depth or 0):
        nested = [nested]
    with pytest.raises(DumpError, match="sample index=3"):
        record_line(DumpRecord.from_sample(sample(**{field: {"value": nested}})))


def test_record_line_masks_only_secrets() -> None:
    metadata = {
        "api_key": "sk-1",
        "headers": {"Authorization": "Bearer abc", "x-api-key": "abc"},
        "url": "http://me:abc@host/x",
        "answer_key": "B",
        "token_ids": [1, 2],
        "wandb_api_key": "",
        "strands_rollout": {
            "resume": {"messages": [{"content": "http://me:text@host/"}]},
            "error": "ftp://me:abc@host",
        },
    }
    line = record_line(DumpRecord.from_sample(sample(metadata=metadata)))
    assert b"abc" not in line
    assert b"sk-1" not in line
    read = read_line(line, "here").to_sample().metadata
    assert (read["answer_key"], read["token_ids"]) == ("B", [1, 2])
    assert read["strands_rollout"]["resume"] == metadata["strands_rollout"]["resume"]  # type: ignore[index]


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz"])
def test_read_dump_returns_what_write_dump_wrote(name: str, tmp_path: Path) -> None:
    long_label = hashlib.sha512().hexdigest() * 5000  # longer than one read of the file
    written = [sample(index=index, label=long_label if index == 2 else None) for index in range(5)]
    write_dump(tmp_path / name, written)
    found = list(read_dump(tmp_path / name))
    assert [record.to_sample().to_dict() for record in found] == [each.to_dict() for each in written]
    assert found[4].where == f"{tmp_path / name}:5"
    assert ((tmp_path / name).read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz"])
def test_read_dump_reads_a_live_dump_to_its_last_whole_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    with DumpWriter(path) as writer:
        for index in range(3):
            writer.write(sample(index=index, label=hashlib.sha512(bytes([index])).hexdigest()))
        assert [record.values["index"] for record in read_dump(path)] == [0, 1, 2]
        partial_dump = path.read_bytes()[:-30]
    path.write_bytes(partial_dump)
    assert [record.values["index"] for record in read_dump(path)] == [0, 1]


@pytest.mark.parametrize("name", ["full.jsonl", "full.jsonl.gz"])
def test_dump_writer_full_disk_keeps_whole_lines(tmp_path: Path, name: str) -> None:
    path, noise = tmp_path / name, np.random.default_rng(0).bytes(20_000).hex()  # gzip can't compress noise

    def write() -> None:
        with limit_file_size(4096), DumpWriter(path) as writer:
            writer.write(sample())
            writer.write(sample(response=noise))

    with pytest.raises(
        DumpError, match=f"can't write to .*{name}: (No space|File too large).*earlier samples are kept"
    ):
        write()
    assert len(list(read_dump(path))) == 1


def test_read_dump_names_the_number_of_a_broken_line(tmp_path: Path) -> None:
    line = record_line(DumpRecord.from_sample(sample()))
    path = tmp_path / "run.jsonl"
    path.write_bytes(line + b"\n" + line[:50] + b"\n" + line)
    with pytest.raises(DumpError, match=r"run\.jsonl:3 is broken"):
        list(read_dump(path))


INVALID_TOKENS = {
    b'{"$array": ["O", [1], ""]}': "expected numbers",
    b'{"$new": 1}': r"\$new",
    b'{"$array": ["<f4", [2000000000, 0], ""]}': "expected at most 1048576 rows",
    b'{"$array": ["<f4", [-2, -2], "AAAAAA=="]}': "damaged",
    b'{"$int": "%s"}' % (b"9" * 10_000): "damaged",
    b"[" * 100_000: "broken",
}
INVALID_LINES = {
    b"[]": "holds list; expected one sample",
    b"{}": "is not a sample",
    b'{"strands_rollout_dump": {"version": 2}}': "has the dump version 2; this release reads 1: use a newer release",
    b'{"strands_rollout_dump": {"version": "2"}}': "has the dump version '2'; expected 1: the line is damaged",
    b'{"strands_rollout_dump": {"version": 0}}': "has the dump version 0; expected 1: the line is damaged",
    b'{"strands_rollout_dump": {}}': "has the dump version None; expected 1: the line is damaged",
    b'{"strands_rollout_dump": 2}': "has strands_rollout_dump=2; expected an object with version 1: the line",
    b'{"strands_rollout_dump": {"version": 1, "token_texts": 5}, "status": "failed", "tokens": []}': "broken",
} | {
    b'{"strands_rollout_dump": {"version": 1}, "status": "failed", "tokens": %s}' % tokens: error
    for tokens, error in INVALID_TOKENS.items()
}


@pytest.mark.parametrize(("line", "error"), INVALID_LINES.items(), ids=range(len(INVALID_LINES)))
def test_read_line_error_names_the_reason(line: bytes, error: str) -> None:
    with pytest.raises(DumpError, match=error):
        read_line(line, "here")


def test_read_line_keeps_keys_of_later_releases() -> None:
    values = json.loads(record_line(DumpRecord.from_sample(sample())))
    values["strands_rollout_dump"]["new"] = 1
    values["later"] = {"x": 1}
    assert read_line(json.dumps(values).encode(), "here").values["later"] == {"x": 1}


def test_write_dump_overwrites_no_file(tmp_path: Path) -> None:
    write_dump(tmp_path / "run.jsonl", [])
    with pytest.raises(DumpError, match="File exists"):
        write_dump(tmp_path / "run.jsonl", [])
    with pytest.raises(DumpError, match=r"ends in \.jsonl or \.jsonl\.gz"):
        write_dump(tmp_path / "run.txt", [])


def test_read_dump_reads_samples_without_the_format(tmp_path: Path) -> None:
    path = tmp_path / "old.jsonl"
    path.write_text(json.dumps(sample().to_dict() | {"reward": {"score": 2**70}}) + "\n")
    (found,) = read_dump(path)
    assert (found.source, found.to_sample().to_dict()) == ("samples", sample(reward={"score": 2**70}).to_dict())


def test_read_dump_reads_eval_results(tmp_path: Path) -> None:
    position = {"data_set": "aime", "problem": 4, "number": 1}
    line = position | {"status": "completed", "stop_reason": "completed", "reward": {"acc": 1.0}, "response": "34"}
    line |= {"response_tokens": 9, "turns": 2, "seconds": 1.5, "violations": ["odd"]}
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(line) + "\n" + json.dumps(line | {"sample": sample().to_dict()}) + "\n")
    without_tokens, with_tokens = read_dump(path)
    assert (without_tokens.source, without_tokens.has_tokens, without_tokens.violations) == ("eval", False, ("odd",))
    assert (without_tokens.facts.turns, without_tokens.facts.duration_s, without_tokens.to_sample().response) == (
        2,
        1.5,
        "34",
    )
    assert (with_tokens.to_sample().tokens, with_tokens.values["metadata"]["eval"]) == ([1, 2, 3, 4], position)


def test_read_dump_reads_the_dumps_of_a_folder_in_order(tmp_path: Path) -> None:
    write_dump(tmp_path / "rollout_10.jsonl", [sample(index=10)])
    write_dump(tmp_path / "rollout_2.jsonl.gz", [sample(index=2)])
    (tmp_path / "steps.jsonl").write_text('{"step": 1, "loss": 0.1}\n')
    (tmp_path / "options.json").write_text("{}")
    assert [record.values["index"] for record in read_dump(tmp_path)] == [2, 10]
    (tmp_path / "newer.jsonl").write_text('{"strands_rollout_dump": {"version": 2}}\n')
    with pytest.raises(DumpError, match="use a newer release"):
        list(read_dump(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DumpError, match="holds no dump"):
        list(read_dump(tmp_path / "empty"))


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz"])
def test_read_dump_refuses_an_endless_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strands_rollout.dump.files._MAX_LINE_BYTES", 1 << 20)
    path, endless = tmp_path / name, b"x" * (2 << 20)
    path.write_bytes(gzip.compress(endless) if path.suffix == ".gz" else endless)
    with pytest.raises(DumpError, match=r":1 has more than 1048576 bytes"):
        list(read_dump(path))


def test_read_dump_refuses_files_that_are_not_gzip(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl.gz").write_bytes(b"nothing packed")
    with pytest.raises(DumpError, match="expected gzip"):
        list(read_dump(tmp_path / "run.jsonl.gz"))
    with pytest.raises(DumpError, match="No such file"):
        list(read_dump(tmp_path / "absent.jsonl"))


def test_token_texts_are_in_the_dump(shipped_tokenizer: Any, tmp_path: Path) -> None:
    ids = shipped_tokenizer.encode("<tool_call> caf\u00e9 \u20ac", add_special_tokens=False)
    written = sample(tokens=[*ids, 10**6], response_length=1, loss_mask=[1], rollout_log_probs=[0.0])
    write_dump(tmp_path / "run.jsonl", [written], TokenTexts(shipped_tokenizer))
    (found,) = read_dump(tmp_path / "run.jsonl")
    assert b"".join(found.token_texts[token] for token in ids).decode() == "<tool_call> caf\u00e9 \u20ac"
    assert 10**6 not in found.token_texts


def test_recorded_tokenizer_without_a_name_is_no_folder(shipped_tokenizer: Any, tmp_path: Path) -> None:
    nameless = copy.copy(shipped_tokenizer)
    nameless.name_or_path = ""
    write_dump(tmp_path / "run.jsonl", [sample()], TokenTexts(nameless))
    with pytest.raises(ConfigError, match="names the tokenizer '', which is not a folder .* --tokenizer DIR"):
        recorded_tokenizer(tmp_path / "run.jsonl")


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_record_line_round_trips_images(mode: str) -> None:
    image = pytest.importorskip("PIL.Image").effect_noise((7, 5), 50).convert("L" if mode == "I;16" else mode)
    image = image.convert("I").convert(mode) if mode == "I;16" else image
    written = sample(prompt=[{"role": "user", "content": [{"type": "image", "image": image}]}])
    written.multimodal_inputs = {"images": [image]}
    read = round_trip(written)
    for found in (read.multimodal_inputs["images"][0], read.prompt[0]["content"][0]["image"]):
        assert (found.mode, found.size, found.tobytes()) == (image.mode, image.size, image.tobytes())

"""What is written comes back the same, a line at a time; broken lines are named and secrets never leave."""

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
from strands_rollout.dump.record import DumpRecord, read_line, record_line
from strands_rollout.errors import DumpError
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


def read_back(made: Any) -> Any:
    return read_line(record_line(DumpRecord.from_sample(made)), "here").to_sample()


_PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.binary())
    | st.text(st.characters(codec=None, exclude_categories=())),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.just("$map"), inner)
    ),
    max_leaves=12,
)


def _same(first: Any, second: Any) -> bool:
    """Equal, and of the same types all the way down; 1, 1.0 and True are not."""
    return repr(first) == repr(second)


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(
    tokens=st.lists(st.integers(0, 2**31), min_size=1),
    logprobs=st.lists(st.floats()),
    reward=_PLAIN,
    metadata=st.dictionaries(st.text(), _PLAIN),
)
def test_a_sample_comes_back_whole(tokens: list[int], logprobs: list[float], reward: Any, metadata: Any) -> None:
    made = sample(tokens=tokens, rollout_log_probs=logprobs, reward=reward, label=(reward,), train_metadata=None)
    made.metadata = {"user": [metadata, 1.5]}
    made.trace = {"events": [1]}  # as slime's tracing hangs it on a sample
    back = read_back(made)
    assert _same(back.to_dict(), {**made.to_dict(), "metadata": back.metadata})
    assert _same(back.metadata["user"][1], 1.5)


def test_what_json_has_no_form_for_comes_back_with_its_type() -> None:
    experts = np.arange(12, dtype=np.int32).reshape(2, 3, 2)[:, ::2]
    made = sample(rollout_routed_experts=experts, metadata={"loss": np.float32(0.1)})
    made.rollout_log_probs = [math.nan, -math.inf, 0.0]
    line = record_line(DumpRecord.from_sample(made))
    assert b"NaN" not in line
    back = read_line(line, "here").to_sample()
    assert math.isnan(back.rollout_log_probs[0])
    assert back.rollout_log_probs[1:] == [-math.inf, 0.0]
    assert back.rollout_routed_experts.dtype == np.int32
    assert np.array_equal(back.rollout_routed_experts, experts)
    assert _same(back.metadata["loss"], np.float32(0.1))


@pytest.mark.parametrize("held", ["builtins.object", "PIL.Image.Image"])
def test_a_value_without_a_form_is_named_with_its_sample(held: str) -> None:
    value = object() if held == "builtins.object" else pytest.importorskip("PIL.Image").new("CMYK", (2, 2))
    with pytest.raises(DumpError, match=rf"sample index=3: metadata holds {re.escape(held)}; expected plain values"):
        record_line(DumpRecord.from_sample(sample(metadata={"it": value})))


@pytest.mark.parametrize("field", ["label", "metadata", "reward"])
@pytest.mark.parametrize("depth", [300, 5000, None])
def test_a_value_within_itself_or_nested_too_deeply_is_refused(field: str, depth: int | None) -> None:
    held: list[Any] = []
    held.extend([held] if depth is None else [])
    for _ in range(depth or 0):
        held = [held]
    with pytest.raises(DumpError, match="sample index=3"):
        record_line(DumpRecord.from_sample(sample(**{field: {"held": held}})))


def test_secrets_are_masked_and_nothing_else_is() -> None:
    metadata = {
        "api_key": "sk-1",
        "headers": {"Authorization": "Bearer abc", "x-api-key": "abc"},
        "url": "http://me:abc@host/x",
        "answer_key": "B",
        "token_ids": [1, 2],
        "wandb_api_key": "",
        "strands_rollout": {
            "resume": {"messages": [{"content": "http://me:said@host/"}]},
            "error": "ftp://me:abc@host",
        },
    }
    line = record_line(DumpRecord.from_sample(sample(metadata=metadata)))
    assert b"abc" not in line
    assert b"sk-1" not in line
    back = read_line(line, "here").to_sample().metadata
    assert (back["answer_key"], back["token_ids"]) == ("B", [1, 2])
    assert back["strands_rollout"]["resume"] == metadata["strands_rollout"]["resume"]  # type: ignore[index]


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz"])
def test_a_dump_is_read_as_it_was_written(name: str, tmp_path: Path) -> None:
    long = hashlib.sha512().hexdigest() * 5000  # more than is read at once
    made = [sample(index=index, label=long if index == 2 else None) for index in range(5)]
    write_dump(tmp_path / name, made)
    found = list(read_dump(tmp_path / name))
    assert [record.to_sample().to_dict() for record in found] == [one.to_dict() for one in made]
    assert found[4].where == f"{tmp_path / name}:5"
    assert ((tmp_path / name).read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz"])
def test_a_live_dump_is_read_up_to_its_last_whole_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    with DumpWriter(path) as writer:
        for index in range(3):
            writer.write(sample(index=index, label=hashlib.sha512(bytes([index])).hexdigest()))
        assert [record.values["index"] for record in read_dump(path)] == [0, 1, 2]
        half = path.read_bytes()[:-30]
    path.write_bytes(half)
    assert [record.values["index"] for record in read_dump(path)] == [0, 1]


@pytest.mark.parametrize("name", ["full.jsonl", "full.jsonl.gz"])
def test_a_full_disk_is_said_at_the_sample_that_it_cuts(tmp_path: Path, name: str) -> None:
    path, noise = tmp_path / name, np.random.default_rng(0).bytes(20_000).hex()  # which gzip keeps as it is

    def write() -> None:
        with limit_file_size(4096), DumpWriter(path) as writer:
            writer.write(sample())
            writer.write(sample(response=noise))

    with pytest.raises(DumpError, match=f"can't write to .*{name}: (No space|File too large).*what is there is kept"):
        write()
    assert len(list(read_dump(path))) == 1


def test_a_broken_line_is_named_by_its_number(tmp_path: Path) -> None:
    line = record_line(DumpRecord.from_sample(sample()))
    path = tmp_path / "run.jsonl"
    path.write_bytes(line + b"\n" + line[:50] + b"\n" + line)
    with pytest.raises(DumpError, match=r"run\.jsonl:3 is broken"):
        list(read_dump(path))


OF_TOKENS = {
    b'{"$array": ["O", [1], ""]}': "expected numbers",
    b'{"$new": 1}': r"\$new",
    b'{"$array": ["<f4", [2000000000, 0], ""]}': "holds nothing",
    b'{"$array": ["<f4", [-2, -2], "AAAAAA=="]}': "damaged",
    b'{"$int": "%s"}' % (b"9" * 10_000): "damaged",
    b"[" * 100_000: "broken",
}
NO_SAMPLES = {
    b"[]": "holds list; expected one sample",
    b"{}": "is no sample",
    b'{"strands_rollout_dump": {"version": 2}}': "of dump version 2; this release reads 1: use a newer one",
    b'{"strands_rollout_dump": {"version": 1, "token_texts": 5}, "status": "failed", "tokens": []}': "broken",
} | {
    b'{"strands_rollout_dump": {"version": 1}, "status": "failed", "tokens": %s}' % tokens: words
    for tokens, words in OF_TOKENS.items()
}


@pytest.mark.parametrize(("line", "words"), NO_SAMPLES.items(), ids=range(len(NO_SAMPLES)))
def test_a_line_that_is_no_sample_says_why(line: bytes, words: str) -> None:
    with pytest.raises(DumpError, match=words):
        read_line(line, "here")


def test_new_keys_of_a_later_release_are_left_unread() -> None:
    values = json.loads(record_line(DumpRecord.from_sample(sample())))
    values["strands_rollout_dump"]["new"] = 1
    values["later"] = {"x": 1}
    assert read_line(json.dumps(values).encode(), "here").values["later"] == {"x": 1}


def test_a_dump_is_never_written_over(tmp_path: Path) -> None:
    write_dump(tmp_path / "run.jsonl", [])
    with pytest.raises(DumpError, match="File exists"):
        write_dump(tmp_path / "run.jsonl", [])
    with pytest.raises(DumpError, match=r"ends in \.jsonl or \.jsonl\.gz"):
        write_dump(tmp_path / "run.txt", [])


def test_samples_of_before_the_format_are_read(tmp_path: Path) -> None:
    path = tmp_path / "old.jsonl"
    path.write_text(json.dumps(sample().to_dict() | {"reward": {"score": 2**70}}) + "\n")
    (found,) = read_dump(path)
    assert (found.source, found.to_sample().to_dict()) == ("samples", sample(reward={"score": 2**70}).to_dict())


def test_results_of_eval_are_read_with_and_without_tokens(tmp_path: Path) -> None:
    place = {"data_set": "aime", "problem": 4, "number": 1}
    line = place | {"status": "completed", "stop_reason": "completed", "reward": {"acc": 1.0}, "response": "34"}
    line |= {"response_tokens": 9, "turns": 2, "seconds": 1.5, "violations": ["odd"]}
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(line) + "\n" + json.dumps(line | {"sample": sample().to_dict()}) + "\n")
    bare, whole = read_dump(path)
    assert (bare.source, bare.has_tokens, bare.violations) == ("eval", False, ("odd",))
    assert (bare.facts.turns, bare.facts.duration_s, bare.to_sample().response) == (2, 1.5, "34")
    assert (whole.to_sample().tokens, whole.values["metadata"]["eval"]) == ([1, 2, 3, 4], place)


def test_a_folder_is_all_dumps_in_it_in_their_order(tmp_path: Path) -> None:
    write_dump(tmp_path / "rollout_10.jsonl", [sample(index=10)])
    write_dump(tmp_path / "rollout_2.jsonl.gz", [sample(index=2)])
    (tmp_path / "steps.jsonl").write_text('{"step": 1, "loss": 0.1}\n')
    (tmp_path / "options.json").write_text("{}")
    assert [record.values["index"] for record in read_dump(tmp_path)] == [2, 10]
    (tmp_path / "newer.jsonl").write_text('{"strands_rollout_dump": {"version": 2}}\n')
    with pytest.raises(DumpError, match="use a newer one"):
        list(read_dump(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DumpError, match="holds no dump"):
        list(read_dump(tmp_path / "empty"))


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz"])
def test_a_line_without_an_end_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strands_rollout.dump.files._MAX_LINE_BYTES", 1 << 20)
    path, endless = tmp_path / name, b"x" * (2 << 20)
    path.write_bytes(gzip.compress(endless) if path.suffix == ".gz" else endless)
    with pytest.raises(DumpError, match=r":1 has more than 1048576 bytes"):
        list(read_dump(path))


def test_a_file_that_is_not_gzip_is_told(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl.gz").write_bytes(b"nothing packed")
    with pytest.raises(DumpError, match="expected gzip"):
        list(read_dump(tmp_path / "run.jsonl.gz"))
    with pytest.raises(DumpError, match="No such file"):
        list(read_dump(tmp_path / "absent.jsonl"))


def test_texts_of_tokens_travel_with_their_sample(shipped_tokenizer: Any, tmp_path: Path) -> None:
    ids = shipped_tokenizer.encode("<tool_call> caf\u00e9 \u20ac", add_special_tokens=False)
    made = sample(tokens=[*ids, 10**6], response_length=1, loss_mask=[1], rollout_log_probs=[0.0])
    write_dump(tmp_path / "run.jsonl", [made], TokenTexts(shipped_tokenizer))
    (found,) = read_dump(tmp_path / "run.jsonl")
    assert b"".join(found.token_texts[token] for token in ids).decode() == "<tool_call> caf\u00e9 \u20ac"
    assert 10**6 not in found.token_texts


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_images_come_back_with_their_pixels(mode: str) -> None:
    image = pytest.importorskip("PIL.Image").effect_noise((7, 5), 50).convert("L" if mode == "I;16" else mode)
    image = image.convert("I").convert(mode) if mode == "I;16" else image
    made = sample(prompt=[{"role": "user", "content": [{"type": "image", "image": image}]}])
    made.multimodal_inputs = {"images": [image]}
    back = read_back(made)
    for found in (back.multimodal_inputs["images"][0], back.prompt[0]["content"][0]["image"]):
        assert (found.mode, found.size, found.tobytes()) == (image.mode, image.size, image.tobytes())

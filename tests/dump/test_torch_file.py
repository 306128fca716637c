"""slime's debug files are read without torch; a pickle that asks for more than values is refused before it runs."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strands_rollout.dump import read_dump
from strands_rollout.errors import DumpError
from strands_rollout.samples import Sample


def saved(path: Path, content: Any, *, compression: int = zipfile.ZIP_STORED) -> Path:
    """A file as torch.save lays it out."""
    return packed(path, pickle.dumps(content, protocol=2), compression=compression)


def packed(path: Path, data: bytes, *, compression: int = zipfile.ZIP_STORED, **storages: bytes) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("rollout/data.pkl", data)
        archive.writestr("rollout/byteorder", "little")
        for key, value in storages.items():
            archive.writestr(f"rollout/data/{key.removeprefix('s')}", value)
    return path


def values(**changes: Any) -> dict[str, Any]:
    made = Sample(tokens=[1, 2], response_length=1, loss_mask=[1], rollout_log_probs=[-0.5])
    return made.to_dict() | changes


def test_samples_come_back_with_arrays_and_bytes(tmp_path: Path) -> None:
    metadata = {
        "raw": b"\x00\xff",
        "none": b"",
        "set": {1},
        "loss": np.float32(0.5),
        "pair": (1, 2.5),
        "big": np.arange(3, dtype=">i4"),
    }
    experts = np.asfortranarray(np.arange(6, dtype=np.int32).reshape(2, 3))
    made = values(rollout_routed_experts=experts, metadata=metadata, status="failed")
    (found,) = read_dump(saved(tmp_path / "3.pt", {"rollout_id": 3, "samples": [made]}))
    assert found.source == "slime"
    assert found.where.endswith("3.pt[0]")
    sample = found.to_sample()
    assert sample.status is Sample.Status.FAILED
    assert np.array_equal(sample.rollout_routed_experts, experts)
    assert sample.metadata["big"].tolist() == [0, 1, 2]
    assert {**sample.metadata, "big": None} == {**metadata, "big": None}


class _Runs:
    def __init__(self, function: Any, *args: Any) -> None:
        self.asked = (function, args)

    def __reduce__(self) -> Any:
        return self.asked


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (eval, ("open('/tmp/ran', 'w')",)),
        (exec, ("1",)),
        (__import__, ("os",)),
        (getattr, (1, "real")),
        (io.open, ("/tmp/ran",)),
        (pickle.loads, (b"N.",)),
        (Sample, ()),
        (np.load, ("x",)),
    ],
)
def test_a_pickle_that_calls_anything_is_refused_by_name(function: Any, args: Any, tmp_path: Path) -> None:
    path = saved(tmp_path / "x.pt", {"samples": [values(label=_Runs(function, *args))]})
    with pytest.raises(DumpError, match=r"x\.pt: it asks for \S+, which is not read"):
        list(read_dump(path))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        # an array of objects, a storage beside its folder, a tensor beyond its storage, one that would fill the memory
        (b"\x80\x02cnumpy\ndtype\n(X\x01\x00\x00\x00OtR.", "expected numbers"),
        (
            b"\x80\x02(X\x07\x00\x00\x00storagectorch\nIntStorage\nX\x04\x00\x00\x00../0X\x03\x00\x00\x00cpuK\x02tQ.",
            "storage",
        ),
        (b"%sK\x01K\x02\x85K\x01\x85tR.", "size"),
        (b"%sK\x00(J\xff\xff\xff\x7ftK\x00\x85tR.", "got a tensor"),
        # what makes the values can't be changed
        (b"\x80\x02ccollections\nOrderedDict\n}b.", "it changes"),
        (b"\x80\x02ctorch\nIntStorage\n}b.", "it changes"),
        (b"\x80\x02cposix\nsystem\n(X\x02\x00\x00\x00idtR.", "asks for posix.system"),
        (b"\x80\x02nonsense", "opcode"),
        (b"\x80\x02K", "damaged"),
    ],
)
def test_hostile_pickles_are_refused_in_words(data: bytes, words: str, tmp_path: Path) -> None:
    storage = b"(X\x07\x00\x00\x00storagectorch\nIntStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x02tQ"
    data = data.replace(b"%s", b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage)
    path = packed(tmp_path / "x.pt", data, s0=bytes(8))
    with pytest.raises(DumpError, match=words):
        list(read_dump(path))


HUGE = b"J\xff\xff\xff\x7f"  # 2,147,483,647
BELOW = b"J\xff\xff\xff\xff"  # -1
BEYOND = b"\x8a\x09" + bytes(8) + b"\x01"  # 2 ** 64
SAMPLES = b"\x80\x02}X\x07\x00\x00\x00samples"


def storage(key: bytes = b"0", count: bytes = b"K\x02", kind: bytes = b"Int") -> bytes:
    return b"(X\x07\x00\x00\x00storagectorch\n%sStorage\nX\x01\x00\x00\x00%sN%stQ" % (kind, key, count)


def array(*shape: bytes, kind: bytes = b"i4") -> bytes:
    """An array without bytes."""
    dtype = b"cnumpy\ndtype\n(X%c\x00\x00\x00%stR" % (len(kind), kind)
    return b"cnumpy\nndarray\n)R(K\x01(%st%s\x89C\x00tb" % (b"".join(shape), dtype)


def tensor(offset: bytes, size: bytes, stride: bytes, of: bytes | None = None) -> bytes:
    made = storage() if of is None else of
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(%s%s(%st(%sttR." % (made, offset, size, stride)


HOSTILE = {
    "an empty array in the place of a storage": (
        tensor(b"K\x00", b"K\x40", b"K\x01", of=array(b"K\x40", b"K\x00")),
        "in _Array; expected a storage",
    ),
    "an empty array of billions in the place of a storage": (
        tensor(b"K\x00", HUGE, b"K\x01", of=array(HUGE, b"K\x00")),
        "holds nothing",
    ),
    "a list in the place of a storage": (tensor(b"K\x00", b"K\x01", b"K\x01", of=b"]"), "in list"),
    "billions of empty rows": (b"\x80\x02" + array(HUGE, b"K\x00") + b".", "holds nothing"),
    "billions of empty rows in a tensor": (tensor(b"K\x00", HUGE + b"K\x00", b"K\x01K\x01"), "holds nothing"),
    "a length below zero": (tensor(b"K\x00", BELOW, b"K\x01"), "whole numbers from 0"),
    "two lengths below zero": (tensor(b"K\x00", BELOW * 2, b"K\x01K\x01"), "whole numbers from 0"),
    "a stride below zero": (tensor(b"K\x01", b"K\x02", BELOW), "whole numbers from 0"),
    "an offset below zero": (tensor(BELOW, b"K\x02", b"K\x01"), "whole numbers from 0"),
    "an offset beyond the storage": (tensor(HUGE, b"K\x01", b"K\x01"), "got a tensor of size"),
    "a length beyond 64 bits": (tensor(b"K\x00", BEYOND, b"K\x00"), "got a tensor of size"),
    "lengths whose product overflows": (tensor(b"K\x00", HUGE * 4, b"K\x00" * 4), "got a tensor of size"),
    "a stride of zero": (tensor(b"K\x00", HUGE, b"K\x00"), "got a tensor of size"),
    "a stride beyond the storage": (tensor(b"K\x00", b"K\x02", b"K\x02"), "got a tensor of size"),
    "a stride beyond 64 bits": (tensor(b"K\x00", b"K\x02", BEYOND), "got a tensor of size"),
    "a length that is no integer": (tensor(b"K\x00", b"G" + bytes(8), b"K\x01"), "whole numbers from 0"),
    "a length that is a boolean": (tensor(b"K\x00", b"\x88", b"K\x01"), "whole numbers from 0"),
    "more dimensions than arrays have": (tensor(b"K\x00", b"K\x01" * 99, b"K\x01" * 99), "at most 32"),
    "fewer strides than lengths": (tensor(b"K\x00", b"K\x01", b""), "with stride"),
    "a storage of another length": (b"\x80\x02" + storage(count=b"K\x03") + b".", "expected 3"),
    "a storage of a negative length": (b"\x80\x02" + storage(count=BELOW) + b".", "expected -1"),
    "a storage of wider numbers": (b"\x80\x02" + storage(kind=b"Long") + b".", "expected 2"),
    "a storage that is not there": (b"\x80\x02" + storage(key=b"9") + b".", "damaged"),
    "a changed storage": (b"\x80\x02" + storage() + b"}b.", "it changes"),
    "an array told that it is another": (b"\x80\x02" + array(b"K\x00") + b"(K\x01K\x05\x85NNNtb.", "don't fit"),
    "a type of many parts": (b"\x80\x02" + array(b"K\x00", kind=b"f4,," * 30) + b".", "expected numbers"),
    "an index of the memo": (b"\x80\x02]r\xff\xff\xff\xff.", "holds no samples"),
    "references to references": (
        SAMPLES + b"]q\x00" + b"".join(b"](h%ch%ceq%c" % (i, i, i + 1) for i in range(60)) + b"s.",
        "expected a mapping",
    ),
    "pairs of pairs": (
        b"\x80\x02K\x01\x85q\x00" + b"".join(b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(60)) + b".",
        "stand for",
    ),
    "keys in keys": (b"\x80\x02}(N" + b"\x85" * 200_000 + b"K\x01u.", "as a key"),
    "members of a set in each other": (b"\x80\x04\x8f(N" + b"\x85" * 200_000 + b"\x90.", "as a key"),
    "a list that holds itself": (b"\x80\x02]q\x00h\x00a.", "holds itself"),
    "lists in lists": (b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".", "levels deep"),
    "a frame beyond the end": (b"\x80\x04\x95" + b"\xff" * 7 + b"\x7f.", "damaged"),
    "a buffer of any size": (b"\x80\x05\x96" + b"\xff" * 7 + b"\x7f.", "opcode"),
    "an extension": (b"\x80\x02\x82\x01.", "opcode"),
    "an item of an array": (b"\x80\x02" + array(b"K\x00") + b"K\x00K\x01s.", "expected a mapping"),
}


@pytest.mark.parametrize(("data", "words"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_pickle_that_would_read_or_fill_the_memory_is_refused(data: bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(DumpError, match=words):
        list(read_dump(packed(tmp_path / "x.pt", data, s0=bytes(8))))


def test_tensors_may_not_copy_a_storage_over_and_over(tmp_path: Path) -> None:
    many = b"".join(tensor(b"K\x00", b"J\x00\x00\x02\x00", b"K\x01", of=b"h\x00")[2:-1] for _ in range(100))
    data = b"\x80\x02(" + storage(count=b"J\x00\x00\x02\x00") + b"q\x00" + many + b"t."
    with pytest.raises(DumpError, match="far larger than the file"):
        list(read_dump(packed(tmp_path / "x.pt", data, s0=bytes(1 << 19))))


def test_what_is_no_regular_file_is_told_at_once(tmp_path: Path) -> None:
    for name in ("x.pt", "x.jsonl", "x.jsonl.gz"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(DumpError, match="a named pipe; expected a regular file"):
            list(read_dump(tmp_path / name))


FUZZ = """
import random, resource, sys
from pathlib import Path
from strands_rollout.dump import read_dump
from strands_rollout.errors import DumpError
from test_torch_file import packed, pickled_seeds
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
rng, path, read, refused = random.Random(int(sys.argv[2])), Path(sys.argv[1]), 0, 0
seeds = pickled_seeds()
for _ in range(int(sys.argv[3])):
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.randint(1, 5)):
        at = rng.randrange(len(data))
        cut = rng.choice((0, 0, 1, 1, rng.randint(1, 8)))
        put = (b"J\\xff\\xff\\xff\\x7f", b"K\\x00", b"\\x85", b"(", b"t", b"r\\xff\\xff\\xff\\xff", rng.randbytes(1))
        data[at : at + cut] = rng.choice((*put, data[at : at + rng.randint(1, 30)]))
    packed(path, bytes(data) or b".", s0=bytes(8))
    if rng.random() < 0.2:
        raw = bytearray(path.read_bytes())
        raw[rng.randrange(len(raw))] = rng.randrange(256)
        path.write_bytes(raw)
    try:
        for record in read_dump(path):
            record.to_sample()
        read += 1
    except DumpError:
        refused += 1
print(read, refused)
"""


def pickled_seeds() -> list[bytes]:
    """Pickles of samples with all that they may hold."""
    metadata = {"raw": b"\xff", "set": {1}, "loss": np.float32(0.5), "pair": (1, 2.5), "of": np.arange(3, dtype=">i4")}
    made = {"rollout_id": 3, "samples": [values(metadata=metadata, rollout_routed_experts=np.ones((2, 3)))] * 2}
    with_tensor = tensor(b"K\x00", b"K\x01K\x02", b"K\x02K\x01")[2:-1]
    sample = b"](}(X\x06\x00\x00\x00statusX\x09\x00\x00\x00completedX\x06\x00\x00\x00tokens%sue" % with_tensor
    return [*(pickle.dumps(made, protocol=protocol) for protocol in (2, 3, 4)), SAMPLES + sample + b"s."]


@pytest.mark.parametrize(("seed", "rounds"), [(1, 300), pytest.param(2, 20_000, marks=pytest.mark.slow)])
def test_a_damaged_file_is_read_or_refused_and_nothing_else(seed: int, rounds: int, tmp_path: Path) -> None:
    paths = os.pathsep.join(
        [str(Path(__file__).parents[2]), str(Path(__file__).parents[1]), str(Path(__file__).parent)]
    )
    run = [sys.executable, "-c", FUZZ, str(tmp_path / "x.pt"), str(seed), str(rounds)]
    done = subprocess.run(
        run, capture_output=True, text=True, check=False, timeout=600, env={**os.environ, "PYTHONPATH": paths}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    read, refused = map(int, done.stdout.split())
    assert read > 0
    assert refused > rounds / 3


def test_files_of_another_kind_are_told(tmp_path: Path) -> None:
    (tmp_path / "old.pt").write_bytes(pickle.dumps({"samples": []}))
    with pytest.raises(DumpError, match=r"no file of torch\.save"):
        list(read_dump(tmp_path / "old.pt"))
    with pytest.raises(DumpError, match="compressed"):
        list(read_dump(saved(tmp_path / "z.pt", {"samples": []}, compression=zipfile.ZIP_DEFLATED)))
    with pytest.raises(DumpError, match="holds no samples"):
        list(read_dump(saved(tmp_path / "model.pt", {"weight": 1})))
    with pytest.raises(DumpError, match="is no sample"):
        list(read_dump(saved(tmp_path / "odd.pt", {"samples": [1]})))


@pytest.mark.torch
def test_what_torch_writes_is_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    made = values(
        rollout_routed_experts=torch.arange(12, dtype=torch.int32).reshape(2, 3, 2),
        metadata={"view": torch.arange(12.0).reshape(3, 4)[1:, ::2], "raw": b"\xff", "flag": torch.tensor(data=True)},
    )
    torch.save({"rollout_id": 1, "samples": [made]}, tmp_path / "1.pt")
    (found,) = read_dump(tmp_path / "1.pt")
    assert np.array_equal(found.values["rollout_routed_experts"], made["rollout_routed_experts"].numpy())
    assert found.values["metadata"]["view"].tolist() == [[4.0, 6.0], [8.0, 10.0]]
    assert bool(found.values["metadata"]["flag"]) is True


def test_torchs_old_format_is_told_with_a_remedy(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"samples": []}, tmp_path / "1.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(DumpError, match=r"torch's old format.*torch\.save\(torch\.load\("):
        list(read_dump(tmp_path / "1.pt"))


def test_an_old_file_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    (tmp_path / "1.pt").write_bytes(bytes.fromhex("80028a0a6cfc9c46f9206aa850192e") + b"\x80\x02M\xe9\x03.")
    with pytest.raises(DumpError, match="torch's old format"):
        list(read_dump(tmp_path / "1.pt"))

"""slime's debug files, read without torch; a pickle that contains more than values is refused before it runs."""

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strands_rollout.dump import read_dump
from strands_rollout.errors import DumpError
from strands_rollout.samples import Sample


def write_pickle(path: Path, content: Any, *, compression: int = zipfile.ZIP_STORED) -> Path:
    return write_archive(path, pickle.dumps(content, protocol=2), compression=compression)


def write_archive(path: Path, data: bytes, *, compression: int = zipfile.ZIP_STORED, **storages: bytes) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("rollout/data.pkl", data)
        archive.writestr("rollout/byteorder", "little")
        for key, value in storages.items():
            archive.writestr(f"rollout/data/{key.removeprefix('s')}", value)
    return path


def values(**changes: Any) -> dict[str, Any]:
    sample = Sample(tokens=[1, 2], response_length=1, loss_mask=[1], rollout_log_probs=[-0.5])
    return sample.to_dict() | changes


def test_read_dump_torch_file_round_trips_arrays_and_bytes(tmp_path: Path) -> None:
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
    (found,) = read_dump(write_pickle(tmp_path / "3.pt", {"rollout_id": 3, "samples": [made]}))
    assert found.source == "slime"
    assert found.where.endswith("3.pt[0]")
    sample = found.to_sample()
    assert sample.status is Sample.Status.FAILED
    assert np.array_equal(sample.rollout_routed_experts, experts)
    assert sample.metadata["big"].tolist() == [0, 1, 2]
    assert {**sample.metadata, "big": None} == {**metadata, "big": None}


class _CallsOnLoad:
    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


CALLS = [(eval, ("open('/tmp/ran', 'w')",)), (__import__, ("os",)), (getattr, (1, "real")), (pickle.loads, (b"N.",))]


@pytest.mark.parametrize(("function", "args"), CALLS)
def test_read_dump_torch_file_refuses_calls(function: Any, args: Any, tmp_path: Path) -> None:
    path = write_pickle(tmp_path / "x.pt", {"samples": [values(label=_CallsOnLoad(function, *args))]})
    with pytest.raises(DumpError, match=r"x\.pt: it names \S+, which is not supported"):
        list(read_dump(path))


HUGE = b"J\xff\xff\xff\x7f"  # 2,147,483,647
NEGATIVE = b"J\xff\xff\xff\xff"  # -1


def storage(key: bytes = b"0", count: bytes = b"K\x02") -> bytes:
    return b"(X\x07\x00\x00\x00storagectorch\nIntStorage\nX\x01\x00\x00\x00%sN%stQ" % (key, count)


def array(*shape: bytes) -> bytes:
    dtype = b"cnumpy\ndtype\n(X\x02\x00\x00\x00i4tR"
    return b"cnumpy\nndarray\n)R(K\x01(%st%s\x89C\x00tb" % (b"".join(shape), dtype)


def tensor(offset: bytes, size: bytes, stride: bytes, of: bytes | None = None) -> bytes:
    source = storage() if of is None else of
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(%s%s(%st(%sttR." % (source, offset, size, stride)


ZERO, ONE, TWO = b"K\x00", b"K\x01", b"K\x02"
P2 = b"\x80\x02"
OUTSIDE = b"(X\x07\x00\x00\x00storagectorch\nIntStorage\nX\x04\x00\x00\x00../0X\x03\x00\x00\x00cpuK\x02tQ"
DAMAGED_PICKLES = {
    "an array of objects": (P2 + b"cnumpy\ndtype\n(X\x01\x00\x00\x00OtR.", "expected numbers"),
    "a storage beside its folder": (P2 + OUTSIDE + b".", "storage"),
    "nonsense": (P2 + b"nonsense", "damaged"),
    "an array as a storage": (tensor(ZERO, b"K@", ONE, of=array(b"K@", ZERO)), "without the storage of its numbers"),
    "a negative length": (tensor(ZERO, NEGATIVE, ONE), "whole numbers from 0"),
    "a negative stride": (tensor(ONE, TWO, NEGATIVE), "whole numbers from 0"),
    "a negative offset": (tensor(NEGATIVE, TWO, ONE), "whole numbers from 0"),
    "a stride of zero": (tensor(ZERO, HUGE, ZERO), "it has a tensor of size"),
    "a storage of another length": (P2 + storage(count=b"K\x03") + b".", "expected 3"),
    "a missing storage": (P2 + storage(key=b"9") + b".", "damaged"),
    "a changed storage": (P2 + storage() + b"}b.", "not a NumPy array"),
    "a changed function": (P2 + b"c_codecs\nencode\n}b.", "not a NumPy array"),
    "an array with another's state": (P2 + array(ZERO) + b"(K\x01K\x05\x85NNNtb.", "as many bytes as the shape needs"),
}


@pytest.mark.parametrize(("data", "error"), DAMAGED_PICKLES.values(), ids=DAMAGED_PICKLES.keys())
def test_read_dump_torch_file_refuses_damaged_storages(data: bytes, error: str, tmp_path: Path) -> None:
    with pytest.raises(DumpError, match=error):
        list(read_dump(write_archive(tmp_path / "x.pt", data, s0=bytes(8))))


def test_read_dump_refuses_named_pipes(tmp_path: Path) -> None:
    for name in ("x.pt", "x.jsonl", "x.jsonl.gz"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(DumpError, match="a named pipe; expected a regular file"):
            list(read_dump(tmp_path / name))


def test_read_dump_torch_file_error_names_the_kind(tmp_path: Path) -> None:
    (tmp_path / "old.pt").write_bytes(pickle.dumps({"samples": []}))
    refused_files = {
        tmp_path / "old.pt": r"not a file of torch\.save",
        write_pickle(tmp_path / "z.pt", {"samples": []}, compression=zipfile.ZIP_DEFLATED): "compressed",
        write_pickle(tmp_path / "model.pt", {"weight": 1}): "holds no samples",
        write_pickle(tmp_path / "odd.pt", {"samples": [1]}): "is not a sample",
    }
    for path, error in refused_files.items():
        with pytest.raises(DumpError, match=error):
            list(read_dump(path))


@pytest.mark.torch
def test_read_dump_reads_files_of_torch_save(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    made = values(
        rollout_routed_experts=torch.arange(12, dtype=torch.int32).reshape(2, 3, 2),
        metadata={"view": torch.arange(12.0).reshape(3, 4)[1:, ::2], "raw": b"\xff", "flag": torch.tensor(data=True)},
    )
    torch.save({"rollout_id": 1, "samples": [made]}, tmp_path / "1.pt")
    torch.save({"samples": []}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(DumpError, match="torch's old format"):
        list(read_dump(tmp_path / "old.pt"))
    (found,) = read_dump(tmp_path / "1.pt")
    assert np.array_equal(found.values["rollout_routed_experts"], made["rollout_routed_experts"].numpy())
    assert found.values["metadata"]["view"].tolist() == [[4.0, 6.0], [8.0, 10.0]]
    assert bool(found.values["metadata"]["flag"]) is True

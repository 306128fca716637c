"""slime's debug files are read without torch; a pickle that asks for more than values is refused before it runs."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strands_rollout.dump import read_dump
from strands_rollout.errors import DumpError
from strands_rollout.sample_type import Sample


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
        (b"\x80\x02nonsense", "damaged"),
    ],
)
def test_hostile_pickles_are_refused_in_words(data: bytes, words: str, tmp_path: Path) -> None:
    storage = b"(X\x07\x00\x00\x00storagectorch\nIntStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x02tQ"
    data = data.replace(b"%s", b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage)
    path = packed(tmp_path / "x.pt", data, s0=bytes(8))
    with pytest.raises(DumpError, match=words):
        list(read_dump(path))


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

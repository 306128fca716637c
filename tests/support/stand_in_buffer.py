"""A data source with a buffer, as slime's: new groups of samples, and groups that came back unfinished, first.

What comes back may be kept in every form in which a buffer may keep it. Safe to call from several threads.
"""

from __future__ import annotations

import copy
import json
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from strands_rollout import Sample

Group = list[Any]


def _through_json(sample: Any) -> Any:
    return Sample.from_dict(json.loads(json.dumps(sample.to_dict())))


KEPT_AS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "itself": lambda sample: sample,
    "deepcopy": copy.deepcopy,
    "pickle": lambda sample: pickle.loads(pickle.dumps(sample)),  # noqa: S301 - its own
    "json": _through_json,
}


class Buffer:
    """The source.

    Args:
        prompts: (prompt, label) of one group after the other; endless, or the source dries up.
        samples_per_group: As slime's n_samples_per_prompt.
        kept_as: How a group lies in the buffer; one of `KEPT_AS`.

    Attributes:
        handed_out: Groups that are new, and groups that were here before.
    """

    def __init__(self, prompts: Iterator[tuple[str, Any]], *, samples_per_group: int, kept_as: str = "itself") -> None:
        self._prompts, self._samples_per_group, self._keep = prompts, samples_per_group, KEPT_AS[kept_as]
        self._lock = threading.Lock()
        self._kept: list[Group] = []
        self._groups = self._samples = 0
        self.handed_out = {"new": 0, "again": 0}

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, count: int) -> list[Group]:
        """So many groups, those that were kept first; fewer where no prompts are left."""
        with self._lock:
            groups, self._kept = self._kept[:count], self._kept[count:]
            self.handed_out["again"] += len(groups)
            while len(groups) < count and (group := self._new_group()):
                self.handed_out["new"] += 1
                groups.append(group)
            return groups

    def add(self, group: Group) -> None:
        """Keep a group."""
        kept = [self._keep(sample) for sample in group]
        with self._lock:
            self._kept.append(kept)

    def _new_group(self) -> Group:
        row = next(self._prompts, None)
        if row is None:
            return []
        prompt, label = row
        first, self._samples = self._samples, self._samples + self._samples_per_group
        self._groups += 1
        return [
            Sample(prompt=prompt, label=label, index=index, group_index=self._groups - 1)
            for index in range(first, self._samples)
        ]

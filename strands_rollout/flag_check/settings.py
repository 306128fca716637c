"""The values that a command gives flags, as far as they are certain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from strands_rollout.flag_check.findings import Finding, Severity
from strands_rollout.flag_check.uses import Use

_BY_DEFAULT: Final = {
    "--n-samples-per-prompt": 1.0,
    "--kl-coef": 0.0,
    "--kl-loss-coef": 0.0,
    "--rollout-num-gpus-per-engine": 1.0,
}


class Settings:
    """The last use of each flag of a command.

    Args:
        uses: In order.
        complete: Whether there are no more than these.
    """

    def __init__(self, uses: Sequence[Use], *, complete: bool) -> None:
        self.last = {use.name: use for use in uses}
        self.complete = complete

    def has(self, *names: str) -> bool:
        """Whether all are given."""
        return all(name in self.last for name in names)

    def lacks(self, *names: str) -> bool:
        """Whether none is given, for certain."""
        return self.complete and not any(name in self.last for name in names)

    def text(self, name: str) -> str | None:
        """A flag's value, if it is known."""
        use = self.last.get(name)
        if use is None or use.dynamic or any(word.dynamic for word in use.values[:1]):
            return None
        return use.joined if use.joined is not None else (use.values[0].text if use.values else None)

    def count(self, name: str) -> int | None:
        """How many words a flag's value has, if that is known."""
        use = self.last.get(name)
        if use is None or use.splits:
            return None
        return len(use.values) if use.joined is None else 1

    def number(self, name: str) -> float | None:
        """A flag's value or default as a number, if it is known."""
        if name not in self.last:
            return _BY_DEFAULT.get(name) if self.complete else None
        try:
            return float(self.text(name) or "")
        except ValueError:
            return None

    def finding(self, name: str, problem: str, severity: Severity = "error") -> Finding:
        """A finding at a flag."""
        use = self.last.get(name)
        return Finding(severity, name, use.where if use else None, problem)

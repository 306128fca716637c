"""What is wrong with a command's flags."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault.

    Attributes:
        severity: "error" if the run would stop or do something else than was written; "warning" if it may.
        flag: The flag as it was written.
        where: "FILE:LINE", or None where no file is known.
        problem: A sentence.
        nearest: The known flag that was likely meant, or None.
    """

    severity: Severity
    flag: str
    where: str | None
    problem: str
    nearest: str | None = None

    def line(self) -> str:
        """The finding in one line of a report."""
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.severity}: {self.flag}: {self.problem}"

    def doubted(self, unless: str) -> Finding:
        """The same as a warning, since what follows in words may keep it from being one."""
        return replace(self, severity="warning", problem=f"{self.problem}{unless}")


@dataclass(frozen=True, slots=True)
class Findings:
    """The faults of a command.

    Attributes:
        flags: How many flags were judged.
        findings: The faults, errors first.
    """

    flags: int
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether no fault is an error."""
        return all(finding.severity != "error" for finding in self.findings)

    def rows(self) -> list[dict[str, str | None]]:
        """The faults as values of JSON."""
        return [asdict(finding) for finding in self.findings]


def gathered(parts: list[Findings]) -> Findings:
    """Several commands' faults as one, none twice, errors first."""
    unique = dict.fromkeys(finding for part in parts for finding in part.findings)
    return Findings(sum(part.flags for part in parts), tuple(sorted(unique, key=lambda f: f.severity != "error")))

"""What `dbo-fx doctor` found, as values that print and become JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dbo_fx.tables import Block, Table, plain


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: What.
        state: `ok`, `missing`, `untested` or `broken`.
        found: What was found: a version, a path, a duration.
        mend: What would mend it; empty where nothing has to be.
        core: Whether the core needs it.
    """

    name: str
    state: str
    found: str
    mend: str = ""
    core: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "name": self.name,
            "state": self.state,
            "found": self.found,
            "mend": self.mend or None,
            "core": self.core,
        }


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything that `dbo-fx doctor` looked at, by section."""

    sections: dict[str, tuple[Finding, ...]]

    @property
    def ok(self) -> bool:
        """Whether the core works."""
        return not any(f.core and f.state in ("missing", "broken") for f in self.findings)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings."""
        return tuple(f for section in self.sections.values() for f in section)

    def blocks(self) -> list[Block]:
        """Tables, one for each section, and the verdict."""
        found: list[Block] = []
        for title, findings in self.sections.items():
            rows = tuple((f.name, f.state, f.found, f.mend) for f in findings)
            found += [Table(("", "state", "found", "what to do"), rows, title), ""]
        broken = [f.name for f in self.findings if f.core and f.state in ("missing", "broken")]
        verdict = f"the core does not work: {', '.join(broken)}" if broken else "the core works"
        return [*found, verdict]

    def __str__(self) -> str:
        """Aligned text."""
        return plain(self.blocks()).rstrip("\n")

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        sections = {title: [f.to_json() for f in fs] for title, fs in self.sections.items()}
        return {"ok": self.ok, **sections}

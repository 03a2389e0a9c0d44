"""What a check of data found: facts, and what is wrong, for people and for programs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from fulgurite.errors import UserError

Severity = Literal["fault", "warning"]
_SHOWN = 5  # items of a list; the report has all


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, or worth a look.

    Args:
        severity: a fault makes results wrong or stops a run; a warning may be meant so
        topic: one word for programs
        text: one sentence for people
        items: what it is about: each an image with ``split``, ``path`` and ``label``, perhaps a ``reason``, or several ``images``
    """

    severity: Severity
    topic: str
    text: str
    items: list[dict[str, Any]] = field(default_factory=list)

    def lines(self, limit: int = _SHOWN) -> list[str]:
        """Return the text, and at most so many items below it."""
        shown = [f"  {_item(one)}" for one in self.items[:limit]]
        more = [f"  ... and {len(self.items) - limit:,} more"] if len(self.items) > limit else []
        return [f"{self.severity}: {self.text}", *shown, *more]


@dataclass
class Findings:
    """All that a check found.

    Args:
        facts: plain values for programs, by topic
        rows: (topic, text) for people
        findings: what is wrong, or worth a look
    """

    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[tuple[str, str]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def faults(self) -> list[Finding]:
        """What makes results wrong or stops a run."""
        return [finding for finding in self.findings if finding.severity == "fault"]

    @property
    def warnings(self) -> list[Finding]:
        """What may be meant so."""
        return [finding for finding in self.findings if finding.severity == "warning"]

    def add(self, severity: Severity, topic: str, text: str, items: list[dict[str, Any]] | None = None) -> None:
        """Remember what is wrong."""
        self.findings.append(Finding(severity, topic, text, items or []))

    def to_text(self) -> str:
        """Return what people read: the rows, the warnings, and last, where a terminal ends, the faults."""
        lines = [f"{topic:<12}{text}" for topic, text in self.rows]
        for finding in (*self.warnings, *self.faults):
            lines += finding.lines()
        return "\n".join(map(printable, lines))

    def to_json(self) -> str:
        """Return a JSON document of ASCII characters, whole lists in it."""
        parts = {"faults": self.faults, "warnings": self.warnings}
        document = self.facts | {name: [asdict(finding) for finding in found] for name, found in parts.items()}
        return json.dumps(document, indent=1)

    def write(self, path: Path) -> None:
        """Write the JSON document.

        Raises:
            UserError: if it cannot be written
        """
        try:
            path.write_text(self.to_json() + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from error


def printable(text: str) -> str:
    """Escape what a terminal cannot show: file names may hold line breaks, and bytes that are no UTF-8."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def label_text(label: str | list[str]) -> str:
    """Return a label, or any number of them, as one text."""
    return label if isinstance(label, str) else "|".join(label) or "no label"


def _item(item: dict[str, Any]) -> str:
    if "images" in item:
        images = item["images"]
        more = [f"... and {len(images) - _SHOWN:,} more"] if len(images) > _SHOWN else []
        return "  =  ".join([*map(_image, images[:_SHOWN]), *more])
    return str(item.get("reason") or _image(item))


def _image(image: dict[str, Any]) -> str:
    return f"{image['path']} ({image['split']}: {label_text(image['label'])})"

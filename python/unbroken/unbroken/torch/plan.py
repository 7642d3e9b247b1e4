"""What an operation of a group comes to, before anything of it is begun."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .tensors import Copies


@dataclass
class Plan:
    """What is to be done: calls, each with its memory and copies, and what `Work.result` gives."""

    results: list
    calls: list = field(default_factory=list)

    def call(
        self, name: str, *arguments: Any, keeps: Sequence = (), copies: Copies = ()
    ) -> "Plan":
        self.calls.append((name, arguments, list(keeps), list(copies)))
        return self

    def with_all(self, plans: list["Plan"]) -> "Plan":
        for plan in plans:
            self.calls += plan.calls
        return self

"""How a program shares the GPU's SMs between communication and matmuls, as numbers and as text.

No torch here. `sm_limits` is what applies them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dbo_fx.errors import ScheduleError


@dataclass(frozen=True, slots=True)
class SmSharing:
    """Who gets how many SMs; None leaves the library's own choice.

    Attributes:
        comm: The most SMs that communication kernels take.
        left: How many SMs matmuls leave free.
    """

    comm: int | None = None
    left: int | None = None

    def __bool__(self) -> bool:
        """Whether anything is said."""
        return self.comm is not None or self.left is not None

    def __str__(self) -> str:
        """The line in a program's header, `sms comm 4 left 8`; empty if nothing is said."""
        comm = "" if self.comm is None else f" comm {self.comm}"
        left = "" if self.left is None else f" left {self.left}"
        return f"sms{comm}{left}" if self else ""


def parse_sm_sharing(line: str) -> SmSharing:
    """Read the line of a program's header.

    Args:
        line: `sms comm 4 left 8`, or with one of the two.

    Raises:
        ScheduleError: It says something else.
    """
    number = "([1-9][0-9]{0,3})"
    match = re.fullmatch(rf"sms(?:\s+comm\s+{number})?(?:\s+left\s+{number})?", line)
    if match is None or not any(match.groups()):
        raise ScheduleError(f"found {line!r}; wanted a line like 'sms comm 4 left 8'")
    comm, left = (None if text is None else int(text) for text in match.groups())
    return SmSharing(comm, left)

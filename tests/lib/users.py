"""Other users, whose part root may take; but not root of an unprivileged container, where there is
nobody else."""

import os
from pathlib import Path

# Users that need no entry anywhere. 65534 is "nobody".
USERS = (65534, 65533)


def can_be_others() -> bool:
    """Whether this process may become any of them."""
    ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return os.geteuid() == 0 and all(
        any(int(first) <= uid < int(first) + int(count) for first, _, count in ranges)
        for uid in USERS
    )

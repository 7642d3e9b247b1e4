"""An RDMA network for tests of other people's programs: hosts with NICs, faults by call, and what
each NIC carried. No hardware, no root, no daemon.

    from unbroken.lab import Fabric

    with Fabric(hosts=["a", "b"], nics=2) as fabric:
        server = fabric.host("b").start(["ibv_rc_pingpong", "-g", "0", "-d", "unb0"])

pytest finds the fixture `fabric` by itself: see `unbroken.lab.plugin`.
"""

from .errors import LabError
from .fabric import Event, Fabric, Host, Nic, Traffic
from .program import Program

__all__ = ["Event", "Fabric", "Host", "LabError", "Nic", "Program", "Traffic"]

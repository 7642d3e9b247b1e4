"""hpcc on two ranks of Open MPI, one on each of hosts a and b, over several transports."""

import re
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

from .fabric import UNBROKEN, Fabric
from .mpi import COMMON, INFINIBAND, OPENIB, OWN_APM, TWO_PORTS
from .process import Failure, needs

UNB0 = [*OPENIB, "unb0"]
UCX = ["--mca", "pml", "ucx", "-x", "UCX_NET_DEVICES=unb0:1", "-x"]
TRANSPORTS = {
    "openib": (UNB0, INFINIBAND),
    "ucx rc": ([*UCX, "UCX_TLS=rc_v,self"], []),
    "ucx rc, InfiniBand": ([*UCX, "UCX_TLS=rc_v,self"], INFINIBAND),
    "ucx ud": ([*UCX, "UCX_TLS=ud_v,self"], []),
    "openib, plain devices": (UNB0, [*INFINIBAND, "--device", "plain"]),
    "ucx rc, plain devices": ([*UCX, "UCX_TLS=rc_v,self"], ["--device", "plain"]),
    "openib, APM": (OWN_APM, TWO_PORTS),
}
APM = "openib, APM"

# What hpcc reads, with comments as it wants them; N and the problem's shape for two ranks.
INPUT = """HPLinpack benchmark input file
Unbroken
HPL.out
8      device out
1      # of problems sizes
{n}    Ns
1      # of NBs
64     NBs
0      PMAP
1      # of process grids
1      Ps
2      Qs
16.0   threshold
1      # of panel fact
2      PFACTs
1      # of recursive stopping criteria
4      NBMINs
1      # of panels in recursion
2      NDIVs
1      # of recursive panel facts
1      RFACTs
1      # of broadcasts
1      BCASTs
1      # of lookahead depths
1      DEPTHs
2      SWAP
64     swapping threshold
0      L1
0      U
1      Equilibration
8      memory alignment
#####
0      additional problem sizes for PTRANS
1200
0      additional block sizes for PTRANS
40
"""


@contextmanager
def hpcc_running(fabric: Fabric, transport: str, n: int, failover=True):
    """A context: hpcc with matrices of n by n, on two ranks. On leaving it, its result is
    checked."""
    needs("mpirun", "openmpi-bin")
    needs("hpcc", "hpcc")
    folder = Path(tempfile.mkdtemp(prefix="unbroken-hpcc-"))
    try:
        (folder / "hpccinf.txt").write_text(INPUT.format(n=n))
        run = [UNBROKEN, "run", *([] if failover else ["--no-failover"]), "--host"]
        ranks = [["-np", "1", "-wdir", folder, *run, host, "--", "hpcc"] for host in "ab"]
        yield fabric.start(
            "mpirun", ["mpirun", *COMMON, *TRANSPORTS[transport][0], *ranks[0], ":", *ranks[1]]
        )
        check_result(folder / "hpccoutf.txt")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_result(file: Path):
    """hpcc says that all is right, and none of its checks failed."""
    if not file.exists():
        raise Failure("hpcc wrote no result")
    text = file.read_text()
    passed = len(re.findall(r"\bPASSED\b", text))
    wrong = [
        line
        for line in text.splitlines()
        if re.search(r"\bFAILED\b|^\w*(?:Failures|Errors)=[^0]", line)
    ]
    if "\nSuccess=1\n" not in text or passed < 3 or wrong:
        raise Failure(f"hpcc: {passed} checks passed, {wrong or 'no Success=1'}")

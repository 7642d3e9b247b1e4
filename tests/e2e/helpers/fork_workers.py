"""Workers of multiprocessing, forked from a process that uses verbs (test_forks.py). Each has
traffic between two QPs of its own.

usage: fork_workers.py STOP-FILE
"""

import json
import multiprocessing
import os
import sys
import time

import pyverbs.enums as e
from pyverbs.addr import AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context, get_device_list
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

BYTES = 1024
WORKERS = 3


class Pair:
    """Two connected QPs."""

    def __init__(self):
        self.context = Context(name=get_device_list()[0].name.decode())
        self.pd, self.cq = PD(self.context), CQ(self.context, 16)
        self.mr = MR(self.pd, 2 * BYTES, e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE)
        init = QPInitAttr(
            qp_type=e.IBV_QPT_RC,
            scq=self.cq,
            rcq=self.cq,
            cap=QPCap(max_send_wr=8, max_recv_wr=8),
            sq_sig_all=1,
        )
        first = QPAttr(port_num=1)
        first.qp_access_flags = e.IBV_ACCESS_REMOTE_WRITE
        self.qps = [QP(self.pd, init, first) for _ in range(2)]
        gid = self.context.query_gid(1, 0)
        for qp, peer in zip(self.qps, reversed(self.qps)):
            attr = QPAttr(port_num=1)
            attr.dest_qp_num = peer.qp_num
            attr.path_mtu = e.IBV_MTU_1024
            attr.min_rnr_timer, attr.timeout, attr.retry_cnt, attr.rnr_retry = 12, 14, 7, 7
            attr.ah_attr = AHAttr(gr=GlobalRoute(dgid=gid, sgid_index=0), is_global=1, port_num=1)
            qp.to_rts(attr)
        self.messages = 0

    def write_one(self):
        """One WRITE, and a look at what it wrote."""
        content = os.urandom(16) * (BYTES // 16)
        self.mr.write(content, BYTES)
        wr = SendWR(
            num_sge=1, sg=[SGE(self.mr.buf, BYTES, self.mr.lkey)], opcode=e.IBV_WR_RDMA_WRITE
        )
        wr.set_wr_rdma(self.mr.rkey, self.mr.buf + BYTES)
        self.qps[0].post_send(wr)
        deadline = time.monotonic() + 25
        while True:
            n, wcs = self.cq.poll(1)
            if n:
                break
            assert time.monotonic() < deadline, "a WRITE does not complete"
        assert wcs[0].status == e.IBV_WC_SUCCESS, wcs[0]
        assert self.mr.read(BYTES, BYTES) == content, "other bytes"
        self.messages += 1


def say(**what):
    """A line in one piece: others write, too."""
    os.write(1, (json.dumps(what) + "\n").encode())


def run(stop):
    """Has traffic until the file is there."""
    pair = Pair()
    say(running=os.getpid())
    while not os.path.exists(stop):
        pair.write_one()
    say(pid=os.getpid(), messages=pair.messages)


def main():
    """The parent has the device open before it forks."""
    first = Context(name=get_device_list()[0].name.decode())
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=run, args=(sys.argv[1],)) for _ in range(WORKERS)]
    for worker in workers:
        worker.start()
    run(sys.argv[1])
    for worker in workers:
        worker.join(30)
    first.close()
    sys.exit(any(worker.exitcode != 0 for worker in workers))


if __name__ == "__main__":
    main()

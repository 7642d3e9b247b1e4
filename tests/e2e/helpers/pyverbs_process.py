"""Runs tests of rdma-core's pyverbs suite in this process and reports on a file
descriptor, a line of JSON per step.

    pyverbs_process.py FD FOLDER DEVICE GID_INDEX ADDRESS list      names all tests
    pyverbs_process.py FD FOLDER DEVICE GID_INDEX ADDRESS run ID…   runs these, in this order

ADDRESS is the device's: the suite would ask `ip` for that of its network interface, which an
emulated NIC does not have.

Runs under Debian's Python, since its pyverbs is compiled for that one.
Steps: {"id"}, {"start"}, {"end", "how", "why"}.
"""

import json
import os
import sys
import unittest
from importlib.machinery import SourceFileLoader

STEPS = os.fdopen(int(sys.argv[1]), "w", buffering=1)


def report(**step):
    """Writes a step."""
    STEPS.write(json.dumps(step) + "\n")


class Reporter(unittest.TestResult):
    """Reports each test as it starts and ends."""

    def startTest(self, test):
        super().startTest(test)
        self.how, self.why = "pass", ""
        report(start=test.id())

    def stopTest(self, test):
        report(end=test.id(), how=self.how, why=self.why)
        super().stopTest(test)

    def _failed(self, error):
        self.how, self.why = "fail", self._exc_info_to_string(error, unittest.TestCase())

    def addFailure(self, test, err):
        self._failed(err)

    def addError(self, test, err):
        self._failed(err)

    def addSkip(self, test, reason):
        # A test that failed and then skips in its tear-down has failed.
        if self.how != "fail":
            self.how, self.why = "skip", str(reason)

    def addSubTest(self, test, subtest, err):
        if err is not None:
            self._failed(err)


def flat(suite):
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from flat(test)
        else:
            yield test


def main():
    folder, device, gid_index, address, what, *ids = sys.argv[2:]
    sys.path.insert(0, folder)
    from args_parser import parser

    sys.argv[1:] = ["--dev", device, *(["--gid", gid_index] if gid_index != "0" else [])]
    parser.parse_args()
    # As the suite's own run_tests.py does.
    tests = SourceFileLoader("tests", os.path.join(folder, "__init__.py")).load_module()
    if what == "list":
        for test in flat(unittest.defaultTestLoader.loadTestsFromModule(tests)):
            report(id=test.id())
        return
    connected = sys.modules["tests.test_rdmacm"].CMTestCase
    connected._get_ip_mac = lambda self, *where: self.args.append([*where, address, None])
    result = Reporter()
    for name in ids:
        unittest.defaultTestLoader.loadTestsFromName(name).run(result)


if __name__ == "__main__":
    main()

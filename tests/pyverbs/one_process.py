"""Runs tests of rdma-core's pyverbs suite in this process and tells of each on descriptor 3, a line of JSON per step.

    one_process.py FOLDER DEVICE GID_INDEX list          names all tests
    one_process.py FOLDER DEVICE GID_INDEX run ID…       runs these, in this order

Runs under Debian's Python, since its pyverbs is compiled for that one. Steps: {"id"}, {"start"}, {"end", "how", "why"}.
"""

import json
import os
import sys
import unittest
from importlib.machinery import SourceFileLoader

STEPS = os.fdopen(3, "w", buffering=1)


def tell(**step):
    STEPS.write(json.dumps(step) + "\n")


class Teller(unittest.TestResult):
    """Tells of each test as it starts and ends."""

    def startTest(self, test):
        super().startTest(test)
        self.how, self.why = "pass", ""
        tell(start=test.id())

    def stopTest(self, test):
        tell(end=test.id(), how=self.how, why=self.why)
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
    folder, device, gid_index, what, *ids = sys.argv[1:]
    sys.path.insert(0, folder)
    from args_parser import parser

    sys.argv[1:] = ["--dev", device, *(["--gid", gid_index] if gid_index != "0" else [])]
    parser.parse_args()
    # As the suite's own run_tests.py does.
    tests = SourceFileLoader("tests", os.path.join(folder, "__init__.py")).load_module()
    if what == "list":
        for test in flat(unittest.defaultTestLoader.loadTestsFromModule(tests)):
            tell(id=test.id())
        return
    result = Teller()
    for name in ids:
        unittest.defaultTestLoader.loadTestsFromName(name).run(result)


if __name__ == "__main__":
    main()

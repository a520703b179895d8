"""Each case of this folder runs in a process of its own: what it damages, limits,
interrupts or loads is nobody else's."""

import os

import pytest
from processes import CASE, run_case


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if CASE in os.environ:
        return None  # this is that process
    failure = run_case(pyfuncitem.nodeid, pyfuncitem.config.rootpath)
    if failure:
        pytest.fail(failure, pytrace=False)
    return True

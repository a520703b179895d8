"""Cases of this folder run in processes of their own: what they damage, limit,
interrupt or load is nobody else's. Those of a file with `ONE_PROCESS` share theirs."""

import os

import pytest
from processes import CASE, Cases


@pytest.fixture(scope="module", autouse=True)
def shared(request):
    """The process of a file whose cases share it."""
    process = Cases(request.config.rootpath)
    yield process
    assert process.end() == 0


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if CASE in os.environ:
        return None  # this is that process
    process = pyfuncitem.funcargs["shared"]
    failure = process.run(pyfuncitem.nodeid)
    if not hasattr(pyfuncitem.module, "ONE_PROCESS"):
        code = process.end()
        failure = failure or (f"ended with {code}" if code else "")
    if failure:
        pytest.fail(failure, pytrace=False)
    return True

"""Each case of this folder runs in a process of its own: what it damages, limits,
interrupts or loads is nobody else's."""

import os

import pytest
from processes import CASE, run_case


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if CASE in os.environ:
        return None  # this is that process
    options = pyfuncitem.config.option
    profile = getattr(options, "hypothesis_profile", None)
    chosen = [f"--hypothesis-profile={profile}"] if profile else []
    failure = run_case([pyfuncitem.nodeid, *chosen], pyfuncitem.config.rootpath)
    if failure:
        pytest.fail(failure, pytrace=False)
    return True

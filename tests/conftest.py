"""Two hypothesis profiles, one cache of what was compiled, and the kinds
of page stores."""

import functools
import os

import hypothesis
import jax
import optax
import pytest
from strategies import EXAMPLES, GATE

import poet_jax

hypothesis.settings.register_profile(
    "poet_jax",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=round(GATE * EXAMPLES),
    suppress_health_check=[
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.data_too_large,
        hypothesis.HealthCheck.function_scoped_fixture,
    ],
)
hypothesis.settings.register_profile(
    "nightly",
    hypothesis.settings.get_profile("poet_jax"),
    derandomize=False,
    max_examples=20 * EXAMPLES,
    print_blob=True,
)
hypothesis.settings.load_profile("poet_jax")


def pytest_configure(config):
    """Tests compile much alike, in processes of their own: JAX keeps it on disk.

    They compile more than they compute, so XLA is asked to optimise little, in one
    thread of each worker. This machine's rates and the library of pages are kept in a
    folder of the tests' own.
    """
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=1"
        " --xla_cpu_parallel_codegen_split_count=1"
    )
    os.environ["XDG_CACHE_HOME"] = str(config.cache.mkdir("home"))
    options = {
        "jax_compilation_cache_dir": str(config.cache.mkdir("jax")),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in options.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)  # of experiments that tests start
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    optax.tree.bias_correction = promoting(optax.tree.bias_correction)


def promoting(function):
    """A function of others in which types are promoted: Adam raises a float to the
    power of an integer."""

    @functools.wraps(function)
    def promoted(*args):
        with jax.numpy_dtype_promotion("standard"):
            return function(*args)

    return promoted


@pytest.fixture
def standard_promotion():
    """For tests of how types are promoted, and of models that promote them."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(params=["HostStore", "FileStore"])
def store(request, tmp_path):
    """Each kind of page store, empty."""
    if request.param == "HostStore":
        return poet_jax.HostStore()
    return poet_jax.FileStore(tmp_path)

"""Pages of stores, programs between them, and ways to damage them."""

import contextlib
import os

import jax
import jax.numpy as jnp
import numpy as np

MIB = 2**20


X = jnp.linspace(-1.0, 1.0, 64 * 128).reshape(64, 128)


def page(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def room_in(store, nbytes):
    """(offset, place) of room in it."""
    offset = store.allocate(nbytes, "a")
    return offset, store.page_at(offset)


@contextlib.contextmanager
def reopened(store):
    """Another way to the file, which moves bytes as it likes."""
    file = os.open(f"/proc/self/fd/{store.descriptor()}", os.O_RDWR)
    yield file
    os.close(file)


DAMAGES = {
    "first bytes": lambda file: os.pwrite(file, b"\xff\0\xff", 50),
    "last byte": lambda file: os.pwrite(file, b"\xff", 9_999),
    "a sector twice": lambda file: os.pwrite(file, os.pread(file, 4096, 4096), 0),
    "cut": lambda file: os.ftruncate(file, 9_000),
    "empty": lambda file: os.ftruncate(file, 0),
}


def where(store, *sizes):
    """[P, 4] for `page_out` and `page_in`: room for pages of these sizes."""
    return np.array([room_in(store, nbytes)[1] for nbytes in sizes], np.uint32)


def busy(x):
    """What is between two pages, in a branch that XLA cannot remove."""

    def branch(x):
        for _ in range(3):
            x = x @ x.T @ x / 100
        return x

    return jax.lax.cond(x[0, 0] > jnp.inf, jnp.zeros_like, branch, x)


# JAX has several ways to call a program, and each has an error of its own.
FAILURE = (jax.errors.JaxRuntimeError, ValueError)

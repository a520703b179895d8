"""A program as a JAX function again, which XLA compiles to one executable, or as C."""

from poet_jax.emit.c99.project import Project, c
from poet_jax.emit.program import Emitted, emit
from poet_jax.emit.stages import cut
from poet_jax.emit.within import compile_within, keep_all_bytes

__all__ = ["Emitted", "Project", "c", "compile_within", "cut", "emit", "keep_all_bytes"]

"""A schedule as a C99 project, which trains without an operating system."""

import dataclasses
import os
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from poet_jax.core.device import DeviceProfile
from poet_jax.core.graph import Graph
from poet_jax.core.program import Program
from poet_jax.core.simulate import Usage
from poet_jax.core.units import format_bytes
from poet_jax.emit.c99 import sources
from poet_jax.emit.c99.buffers import C_TYPES, Unsupported
from poet_jax.emit.c99.expanding import expanded, is_key, words
from poet_jax.emit.c99.offsets import Arena, place
from poet_jax.emit.c99.programs import (
    Steps,
    landing,
    moved_results,
    steps_of,
    unsupported,
)
from poet_jax.emit.c99.storage import (
    Storage,
    is_cut,
    overwritten,
    replaced_leaves,
    results_of,
)

SHARE = 1.05  # of the plan's peak that an arena may have
MOST_STORAGE_BYTES = 2**31
BEFORE, AFTER = "poet_storage.bin", "poet_storage_after.bin"
FILES = (
    "kernels.h",
    "kernels.c",
    "functions.c",
    "state.c",
    "main.c",
    "CMakeLists.txt",
)


class Scheduled(Protocol):
    """A schedule, as `emit.c` reads it."""

    @property
    def program(self) -> Program: ...
    @property
    def usage(self) -> Usage: ...
    @property
    def step(self) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Project:
    """What `c` has written.

    Attributes:
      folder: where.
      arena_bytes: RAM of the step, but for the stack.
      plan_bytes: most RAM that the plan has alive, without what lies in flash.
      floor_bytes: most RAM that the C program has alive at once.
      constant_bytes: frozen arrays and constants in flash.
      state_bytes: initial values of the state in RAM, in flash.
      page_bytes: storage that the board needs.
      stored_bytes: of these, what `poet_storage.bin` fills: state.
      stored: by number of each flat argument that lies there between steps, the byte
        at which it begins.
    """

    folder: pathlib.Path
    arena_bytes: int
    plan_bytes: int
    floor_bytes: int
    constant_bytes: int
    state_bytes: int
    page_bytes: int
    stored_bytes: int
    stored: dict[int, int]

    def __str__(self) -> str:
        paged = self.page_bytes
        pages = f", {format_bytes(paged)} on storage" if paged else ""
        return (
            f"C99 in {self.folder}: an arena of {format_bytes(self.arena_bytes)} for a "
            f"plan of {format_bytes(self.plan_bytes)}, "
            f"{format_bytes(self.constant_bytes)} of constants and "
            f"{format_bytes(self.state_bytes)} of initial state in flash{pages}"
        )


def c(
    schedule: Scheduled,
    folder: str | os.PathLike,
    arguments: Sequence[Any] | None = None,
    *,
    flash_argnums: int | Sequence[int] = (),
    board: DeviceProfile | None = None,
) -> Project:
    """Write a C99 project into `folder` that runs the schedule's program.

    `poet_init` sets the state to its first value, `poet_step` runs one step, and
    `poet_step.h` says where arguments and results lie. Everything is in one arena,
    whose offsets are planned: it is at most 5 % above the plan's peak if such offsets
    are found, and `Project` has both. The board supplies `poet_page_out` and
    `poet_page_in`, if the plan pages. `poet_save` and `poet_restore` move the state in
    RAM. `main.c` compares one step with JAX's.

    Flat arguments that are `PagedArray`s lie on the board's storage, and new ones take
    their places. `poet_storage.bin` is what has to lie there before `poet_init`.

    Args:
      schedule: of `Scheduled.plan_for_board`, which compiles nothing here, or of
        `Scheduled.plan`, without state on storage.
      folder: is made; files of an earlier project are written over.
      arguments: of the function, as for a call: the state's first value, and a batch
        for the test. Numbers are made up where it is left out.
      flash_argnums: positional arguments that never change, and are constants in flash.
      board: whose RAM and storage have to suffice.

    Raises NotImplementedError for operations without a kernel, by name, and
    ValueError for a program on several devices, a board that does not suffice, and for
    `flash_argnums` that the step replaces.
    """
    program = expanded(schedule.program)
    graph = program.graph
    if graph.stored and schedule.step is not None:
        raise ValueError(
            "The schedule has state on storage and is compiled for this machine, where "
            "the caller holds the rest of the state. Use Scheduled.plan_for_board."
        )
    _refuse(graph, program)
    leaves = _leaves(graph, arguments)
    flash = _flash(graph, leaves, flash_argnums)
    flash_bytes = sum(graph.values[v].nbytes for v in flash)
    plan_bytes = schedule.usage.peak_bytes - flash_bytes
    steps, arena = _fitted(program, flash, plan_bytes)
    storage, in_ram = steps.storage, graph.donated - graph.stored.keys()
    if board is not None:
        _refuse_board(board, arena.nbytes, storage.nbytes)
    project = Project(
        pathlib.Path(folder),
        arena.nbytes,
        plan_bytes,
        arena.floor_bytes,
        _constant_bytes(steps),
        sum(graph.values[v].nbytes for v in graph.arguments if v in in_ram),
        storage.nbytes,
        storage.state_bytes,
        {
            number: storage.begins[v]
            for number, v in enumerate(graph.arguments)
            if v in graph.stored
        },
    )
    expected = _by_jax(schedule.program.graph, leaves)
    texts = sources.written(graph, steps, arena, project, leaves, expected)
    project.folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copy(pathlib.Path(__file__).parent / name, project.folder / name)
    for name, text in texts.items():
        (project.folder / name).write_text(text, encoding="utf-8")
    _write_storage(project, graph, storage, leaves, expected)
    return project


def _fitted(
    program: Program, flash: dict[int, np.ndarray], plan_bytes: int
) -> tuple[Steps, Arena]:
    """Steps and their arena. What is an array only to save work is one no more, largest
    first, until the arena is no larger than the plan allows."""
    lean: set[tuple[int, Any]] = set()
    best: tuple[Steps, Arena] | None = None
    while True:
        try:
            steps = steps_of(program, flash, lean)
        except Unsupported as error:
            raise _no_kernel([_described(error.equation)]) from None
        arena = place(steps.steps, steps.ties)
        if best is None or arena.nbytes < best[1].nbytes:
            best = steps, arena
        if arena.nbytes <= SHARE * plan_bytes:
            return steps, arena
        busy = [
            b
            for b in steps.kept
            if b in arena.spans
            and arena.spans[b][0] <= arena.busiest <= arena.spans[b][1]
        ]
        if not busy:
            return best
        lean.add(steps.kept[max(busy, key=lambda b: b.nbytes)])


def _described(equation: Any) -> str:
    avals = (*equation.operand_shapes, *equation.result_shapes)
    kinds = ", ".join(dict.fromkeys(f"{x.dtype}{list(x.shape)}" for x in avals))
    return f"{equation.primitive.name} of {kinds}"


def _no_kernel(names: Sequence[str]) -> NotImplementedError:
    return NotImplementedError(
        f"The program has no kernels in C for {', '.join(names)}. There are some for "
        "element-wise operations, reductions, products, convolutions, windows and "
        "moves of float32, int32, uint32, bool, and integers of 8 and 16 bits, and "
        "loops and branches of these. Write the step with these."
    )


def _refuse(graph: Graph, program: Program) -> None:
    if any(not node.equations for node in graph.nodes):
        raise ValueError(
            "A program of an instance cannot be written as C. Only graphs of functions "
            "hold equations that can run. Use the schedule of Scheduled.plan(*args)."
        )
    if graph.devices > 1:
        raise ValueError(
            f"The program runs on {graph.devices} devices, and a C program on one. Its "
            "collectives have no kernels. Plan the step without shardings."
        )
    if graph.stacks:
        raise ValueError(
            "The program updates arrays in pieces, as passes.unroll cuts them, and a C "
            "program has whole ones. Plan with passes= that leave out "
            "poet_jax.passes.unroll."
        )
    held = (graph.values[v] for v in (*graph.arguments, *graph.results))
    kinds = dict.fromkeys(f"arrays of {x.dtype.name}" for x in held
                          if x.dtype.name not in C_TYPES)  # fmt: skip
    if names := [*unsupported(program), *kinds]:
        raise _no_kernel(names)
    if moved := moved_results(graph):
        raise ValueError(
            f"{graph.values[moved[0]].name} is a result, and another result is "
            "written over it. A C program has one place for both. Use a schedule of "
            "Scheduled.plan_for_board, which copies it."
        )
    _refuse_storage(graph, program)


def _refuse_storage(graph: Graph, program: Program) -> None:
    """New state is written to the place of the old one, which nobody may read then."""
    expected, planned = landing(graph), replaced_leaves(graph)
    for leaf in expected.keys() | planned.keys():
        if expected.get(leaf) != planned.get(leaf):
            raise ValueError(
                f"{graph.values[graph.results[leaf]].name} is planned for a place on "
                "storage where a C program has other state. Use a schedule of "
                "Scheduled.plan_for_board."
            )
    storage = Storage.of(program)
    if storage.nbytes >= MOST_STORAGE_BYTES:
        raise ValueError(
            f"The step has {format_bytes(storage.nbytes)} on storage. Places there are "
            f"int32, below {format_bytes(MOST_STORAGE_BYTES)}. Plan a smaller model."
        )
    value = overwritten(program, storage)
    if value is not None:
        raise ValueError(
            f"{graph.values[value].name} is read again after the state that replaces "
            "it is on storage. A C program has one place for both. Write the step so "
            "that it reads state before it returns the new one, or keep that state in "
            "RAM."
        )


def _refuse_board(board: DeviceProfile, arena_bytes: int, page_bytes: int) -> None:
    if arena_bytes > board.ram_bytes:
        raise ValueError(
            f"The step needs an arena of {format_bytes(arena_bytes)}, and {board.name} "
            f"has {format_bytes(board.ram_bytes)} of RAM. Plan with a budget below "
            "that, which leaves some for the stack, or train a part of the parameters."
        )
    if page_bytes > board.store_bytes:
        raise ValueError(
            f"The plan pages {format_bytes(page_bytes)}, and {board.name} has "
            f"{format_bytes(board.store_bytes)} of storage. Plan with "
            "poet_jax.MilpPlanner(paging=False), and state in RAM."
        )


def _leaves(graph: Graph, arguments: Sequence[Any] | None) -> list[np.ndarray]:
    """Flat arguments, as JAX takes them, of the types that were planned for."""
    avals = [graph.values[v].aval for v in graph.arguments]
    if arguments is None:
        rng = np.random.default_rng(0)
        return [
            rng.normal(0, 0.1, x.shape).astype(x.dtype)
            if x.dtype == np.float32
            else np.zeros(x.shape, x.dtype)
            for x in avals
        ]
    given = jax.tree.leaves(tuple(arguments))
    leaves = [np.asarray(jnp.asarray(words(x))) for x in given]
    given = [(x.shape, str(x.dtype)) for x in leaves]
    planned = [(x.shape, str(x.dtype)) for x in avals]
    if given != planned:
        pairs = zip(planned, given, strict=False)
        wrong = [f"{b} in place of {a}" for a, b in pairs if a != b]
        raise ValueError(
            f"The arguments are {len(given)} arrays, and the plan is for "
            f"{len(planned)}; of other types are {', '.join(wrong[:3]) or 'none'}. "
            "Give arguments=(...) as the step is called, or plan again for these."
        )
    return leaves


def _by_jax(graph: Graph, leaves: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The results of one step, as JAX computes them."""
    given = [
        jax.random.wrap_key_data(jnp.asarray(x), impl="threefry2x32")
        if is_key(graph.values[v].dtype)
        else x
        for v, x in zip(graph.arguments, leaves, strict=True)
    ]
    step = graph if not is_cut(graph) else lambda *given: results_of(graph, given)
    return [np.asarray(words(x)) for x in jax.jit(step)(*given)]


def _flash(
    graph: Graph, leaves: Sequence[np.ndarray], argnums: int | Sequence[int]
) -> dict[int, np.ndarray]:
    """The values that are constants in flash."""
    argnums = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    flash = {v: np.asarray(words(x)) for v, x in graph.constants.items()}
    if not argnums:
        return flash
    args, _ = jax.tree.unflatten(
        graph.in_tree, list(zip(graph.arguments, leaves, strict=True))
    )
    for argnum in argnums:
        is_pair = lambda x: isinstance(x, tuple) and isinstance(x[1], np.ndarray)  # noqa: E731
        for v, array in jax.tree.leaves(args[argnum], is_leaf=is_pair):
            if v in graph.donated or v in graph.stored:
                raise ValueError(
                    f"{graph.values[v].name} is in flash_argnums={argnums}, and the "
                    "step replaces it, or it is on storage. Only arguments that are "
                    "neither donated nor paged can be constants. Take it out."
                )
            flash[v] = array
    return flash


def _constant_bytes(steps: Steps) -> int:
    """Of constants that some step reads."""
    read = {x for step in steps.steps for x in step.reads if x.in_flash}
    return sum(x.nbytes for x in read)


def _write_storage(
    project: Project,
    graph: Graph,
    storage: Storage,
    leaves: Sequence[np.ndarray],
    expected: Sequence[np.ndarray],
) -> None:
    """The files of what is on storage before and after the test's step."""
    if not project.stored:
        for name in (BEFORE, AFTER):
            (project.folder / name).unlink(missing_ok=True)
        return
    given = {number: leaves[number] for number in project.stored}
    new = {old: expected[leaf] for leaf, old in replaced_leaves(graph).items()}
    for name, arrays in (BEFORE, given), (AFTER, given | new):
        (project.folder / name).write_bytes(storage.image(graph, arrays))

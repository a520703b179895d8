"""The text of the files of a C99 project."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from poet_jax.core.graph import Graph
from poet_jax.emit.c99.buffers import C_TYPES, Buffer, Pointer, Step
from poet_jax.emit.c99.offsets import Arena
from poet_jax.emit.c99.programs import Steps, replacing
from poet_jax.emit.c99.scalars import constant
from poet_jax.emit.c99.storage import replaced_leaves

if TYPE_CHECKING:
    from poet_jax.emit.c99.project import Project

WIDTH = 88  # of a line of numbers


def written(
    graph: Graph,
    steps: Steps,
    arena: Arena,
    project: "Project",
    leaves: Sequence[np.ndarray],
    expected: Sequence[Any],
) -> dict[str, str]:
    """Text of each file that is generated, by its name."""
    text = _Text(graph, steps, arena, project, leaves)
    return {
        "poet_step.h": text.header(),
        "poet_step.c": text.step(),
        "poet_constants.c": text.constants(),
        "poet_arrays.c": text.arrays(),
        "poet_vector.c": text.vector([np.asarray(x) for x in expected]),
        "poet_memory.ld": text.linker(),
    }


def numbers(array: np.ndarray) -> Iterable[str]:
    """Lines with the elements of an array, as C has them."""
    flat = np.ravel(array)
    if array.dtype == np.float32:
        texts = [_float_text(x) for x in flat.tolist()]
    else:
        texts = [constant(x) for x in flat]
    line = ""
    for text in texts:
        if len(line) + len(text) + 2 > WIDTH:
            yield line.rstrip()
            line = ""
        line += f"{text}, "
    yield line.rstrip()


def _float_text(x: float) -> str:
    """A number of a table: nine digits give back every float."""
    text = f"{x:.9g}"
    if not math.isfinite(x):  # a constant expression; NaN keeps its sign
        sign = "-" if math.copysign(1, x) < 0 else ""
        return sign + ("NAN" if math.isnan(x) else "INFINITY")
    return f"{text}f" if "." in text or "e" in text else f"{text}.0f"


def array(name: str, data: np.ndarray, qualifier: str = "const") -> list[str]:
    """The definition of an array of C; one element at least, as C wants it."""
    data = np.asarray(data)
    c_type = C_TYPES[data.dtype.name]
    data = data if data.size else np.zeros(1, data.dtype)
    return [f"{qualifier} {c_type} {name}[{data.size}] = {{", *numbers(data), "};", ""]


STATE = """\
/* The state between steps, of arguments in RAM that a step replaces. The board writes
   POET_SAVE_BYTES, in order, and reads them at any place; it returns 0 if it has. */
int poet_save(int (*write)(uint32_t at, const void *from, uint32_t bytes));
int poet_restore(int (*read)(uint32_t at, void *to, uint32_t bytes));
enum {
  POET_STATE_OK = 0,
  POET_STATE_FAILED = -1,  /* to write, or to read: RAM is as it was */
  POET_STATE_OTHER = -2,   /* no state of this program: RAM is as it was */
  POET_STATE_DAMAGED = -3, /* another checksum: RAM is as it was */
  POET_STATE_LOST = -4     /* could be read once only: RAM is undefined */
};
extern const int32_t poet_saved[]; /* numbers of these arguments */
""".splitlines()


class _Text:
    def __init__(
        self,
        graph: Graph,
        steps: Steps,
        arena: Arena,
        project: "Project",
        leaves: Sequence[np.ndarray],
    ):
        self.graph, self.steps, self.arena = graph, steps, arena
        self.project, self.leaves = project, leaves
        self.flash: dict[Buffer, str] = {}
        for step in steps.steps:
            for buffer in step.reads:
                if buffer.in_flash and buffer not in self.flash:
                    self.flash[buffer] = f"poet_constant_{len(self.flash)}"
        homes = replaced_leaves(graph)
        landed = {leaf: graph.arguments[old] for leaf, old in homes.items()}
        self.arguments = [self.lies(v, True) for v in graph.arguments]
        self.results = [
            self.lies(v, False, landed.get(leaf))
            for leaf, v in enumerate(graph.results)
        ]
        state = [n for n, v in enumerate(graph.arguments) if v in graph.donated]
        self.in_flash = [x for x in state if x not in project.stored]
        self.saved = [x for x in state if not self.arguments[x].startswith("-1")]

    @property
    def save_bytes(self) -> int:
        """Of the state in RAM, after five words."""
        values = [self.graph.values[self.graph.arguments[x]] for x in self.saved]
        return 20 + sum(x.nbytes for x in values)

    def pointer(self, buffer: Buffer) -> str:
        if buffer.in_flash:
            return self.flash[buffer]
        return f"({buffer.c_type} *)(m + {self.arena.offsets[buffer]})"

    def lies(self, value: int, is_argument: bool, home: int | None = None) -> str:
        """Fields of a `poet_array`: where a value lies between steps, in the place on
        storage of the value `home` if there is one."""
        x = self.graph.values[value]
        home = value if value in self.graph.stored else home
        begin, offset = -1, -1
        if home is not None:
            begin = self.steps.storage.begins[home]
        elif is_argument and value in self.steps.inputs:
            buffer = self.steps.inputs[value]
            offset = -1 if buffer.in_flash else self.arena.offsets[buffer]
        elif not is_argument and value in self.steps.outputs:
            buffer = self.steps.outputs[value]
            moved = dict(self.arena.copied)
            offset = self.arena.offsets[moved.get(buffer, buffer)]
        dtype = x.dtype
        return f"{offset}, {begin}, {x.nbytes}, {dtype.itemsize}, '{dtype.kind}'"

    def header(self) -> str:
        project = self.project
        lines = [
            "/* One step of training, as it was planned. */",
            "#ifndef POET_STEP_H",
            "#define POET_STEP_H",
            "",
            "#include <stdint.h>",
            "",
            f"#define POET_ARENA_BYTES {project.arena_bytes}",
            f"#define POET_PLAN_BYTES {project.plan_bytes}",
            f"#define POET_CONSTANT_BYTES {project.constant_bytes}",
            f"#define POET_STATE_BYTES {project.state_bytes}",
            f"#define POET_PAGE_BYTES {project.page_bytes}",
            f"#define POET_STORED_BYTES {self.steps.storage.state_bytes}",
            f"#define POET_ARGUMENTS {len(self.arguments)}",
            f"#define POET_RESULTS {len(self.results)}",
            f"#define POET_FINGERPRINT 0x{self.graph.fingerprint[:8]}u",
            f"#define POET_SAVED {len(self.saved)}",
            f"#define POET_SAVE_BYTES {self.save_bytes}u",
            "",
            "/* Define POET_RAM_BYTES as what the board has for the arena. */",
            "#if defined(POET_RAM_BYTES) && POET_RAM_BYTES < POET_ARENA_BYTES",
            '#error "the arena does not fit into the RAM of the board"',
            "#endif",
            "",
            "/* The first value of state in RAM, and a step: -1 if a page failed. */",
            "int poet_init(void);",
            "int poet_step(void);",
            "",
            "/* The board moves pages to and from its storage, and returns 0 then.",
            "   POET_PAGE_BYTES lie there. The first POET_STORED_BYTES are state: what",
            "   is in poet_storage.bin lies there before poet_init. */",
            "int poet_page_out(uint32_t at, const void *from, uint32_t bytes);",
            "int poet_page_in(uint32_t at, void *to, uint32_t bytes);",
            "",
            "extern uint64_t poet_arena[(POET_ARENA_BYTES + 7) / 8];",
            "",
            "/* Where an array lies between steps: in the arena, or on storage; -1 is",
            "   neither. `kind` is f, i, u or b. */",
            "struct poet_array {",
            "  int32_t offset, storage;",
            "  uint32_t bytes, itemsize;",
            "  char kind;",
            "};",
            "extern const struct poet_array poet_arguments[];",
            "extern const struct poet_array poet_results[];",
            "",
            *STATE,
        ]
        graph = self.graph
        heirs = {v: f"; then result {leaf}" for v, leaf in replacing(graph).items()}
        for kind, values, rows, then in (
            ("argument", graph.arguments, self.arguments, heirs),
            ("result", graph.results, self.results, {}),
        ):
            for number, (v, row) in enumerate(zip(values, rows, strict=True)):
                x, offset = graph.values[v], row.split(",")[0]
                shown = f"{_plain(x.name)}: {x.dtype}{list(x.shape)}{then.get(v, '')}"
                shown = f"/* {shown} */"
                where = f"((uint8_t *)poet_arena + {offset})"
                if offset == "-1":
                    lines.append(f"/* {kind} {number} is not in RAM. */ {shown}")
                    continue
                c_type = C_TYPES[x.dtype.name]
                lines += [shown, f"#define poet_{kind}_{number} (({c_type} *){where})"]
        return "\n".join([*lines, "", "#endif", ""])

    def step(self) -> str:
        lines = [
            "/* One step of training, as it was planned. */",
            "#if defined(__GNUC__) && !defined(__clang__)",
            "/* GCC 12 loses stores of loops over bytes and floats in this pass. */",
            '#pragma GCC optimize("no-ivopts")',
            "#endif",
            '#include "poet_step.h"',
            "",
            '#include "kernels.h"',
            "",
            "#ifdef __GNUC__",
            '__attribute__((section(".bss.poet_arena")))',
            "#endif",
            "uint64_t poet_arena[(POET_ARENA_BYTES + 7) / 8];",
            "",
        ]
        for buffer, name in self.flash.items():
            lines.append(f"extern const {buffer.c_type} {name}[];")
        calls: list[str] = []
        for run, parts in _by_run(self.steps.steps):
            if run not in self.steps.names:
                for part in parts:
                    calls += part.render(self.pointer)
                continue
            lines += ["", f"/* {_plain(self.steps.names[run])} */"]
            lines += [f"static void run_{run}(uint8_t *m) {{", "(void)m;"]
            for part in parts:
                inside = part.render(self.pointer)
                lines += inside if part.is_bracket else ["{", *inside, "}"]
            lines += ["}"]
            calls.append(f"run_{run}(m);")
        for new, old in self.arena.copied:
            sizes = f"{self.pointer(old)}, {self.pointer(new)}, {new.nbytes}"
            calls.append(f"memcpy({sizes});")
        head = ["uint8_t *const m = (uint8_t *)poet_arena;", "(void)m;"]
        lines += ["", "int poet_step(void) {", *head, *calls, "return 0;", "}"]
        lines += ["", *self.init()]
        return "\n".join(_indented(lines)) + "\n"

    def init(self) -> list[str]:
        declared, done = [], []
        for number in self.in_flash:
            offset, _, nbytes, *_ = self.arguments[number].split(", ")
            to = f"(uint8_t *)poet_arena + {offset}"
            c_type = self.state_type(number)
            declared.append(f"extern const {c_type} poet_state_{number}[];")
            done.append(f"memcpy({to}, poet_state_{number}, {nbytes});")
        for v in sorted(self.graph.resident):
            buffer, begin = self.steps.inputs[v], self.steps.storage.begins[v]
            to = f"(uint8_t *)poet_arena + {self.arena.offsets[buffer]}"
            done.append(
                f"if (poet_page_in({begin}u, {to}, {buffer.nbytes})) return -1;"
            )
        return [*declared, "int poet_init(void) {", *done, "return 0;", "}"]

    def state_type(self, number: int) -> str:
        return C_TYPES[self.graph.values[self.graph.arguments[number]].dtype.name]

    def constants(self) -> str:
        lines = [
            "/* What never changes, and the first value of the state: in flash. */",
            "#include <math.h>",
            "#include <stdint.h>",
            "",
        ]
        for buffer, name in self.flash.items():
            assert buffer.data is not None
            data = np.asarray(buffer.data).astype(buffer.dtype)
            lines += [f"extern const {buffer.c_type} {name}[];", *array(name, data)]
        for number in self.in_flash:
            data = np.asarray(self.leaves[number])
            name = f"poet_state_{number}"
            c_type = self.state_type(number)
            lines += [f"extern const {c_type} {name}[];", *array(name, data)]
        return "\n".join(lines)

    def arrays(self) -> str:
        lines = [
            "/* Where arguments and results lie between steps. */",
            '#include "poet_step.h"',
            "",
        ]
        for name, rows in (("arguments", self.arguments), ("results", self.results)):
            lines.append(f"const struct poet_array poet_{name}[] = {{")
            lines += [f"  {{{row}}}," for row in rows] or ["  {-1, -1, 0, 1, 'b'},"]
            lines += ["};", ""]
        saved = ", ".join(map(str, self.saved or [-1]))
        return "\n".join([*lines, f"const int32_t poet_saved[] = {{{saved}}};", ""])

    def vector(self, expected: Sequence[np.ndarray]) -> str:
        """One step's arguments that are not state, and its results as JAX has them."""
        lines = [
            "/* A step's arguments beside the state, and JAX's results. */",
            "#include <math.h>",
            "#include <stdint.h>",
            "#include <stddef.h>",
            "",
        ]
        tables = []
        in_ram = [row.split(",")[0] != "-1" for row in self.arguments]
        given = [here and n not in self.in_flash for n, here in enumerate(in_ram)]
        on_storage = [row.split(", ")[1] != "-1" for row in self.results]
        for kind, arrays, shown in (
            ("given", self.leaves, given),
            ("expected", expected, [not x for x in on_storage]),
        ):
            names = []
            for number, data in enumerate(arrays):
                if not shown[number]:
                    names.append("NULL")
                    continue
                name = f"{kind}_{number}"
                names.append(name)
                lines += array(name, np.asarray(data), "static const")
            names = names or ["NULL"]
            tables.append(f"extern const void *const poet_{kind}[];")
            tables.append(f"const void *const poet_{kind}[] = {{{', '.join(names)}}};")
        return "\n".join([*lines, *tables, ""])

    def linker(self) -> str:
        return (
            "/* Include this in the board's linker script, after its sections, where\n"
            "   RAM is the region of the arena and of the stack. */\n"
            f"ASSERT(LENGTH(RAM) >= {self.project.arena_bytes},\n"
            '       "poet: the arena does not fit into RAM")\n'
        )


def _plain(name: str) -> str:
    """A name that neither begins nor ends a comment, nor has lines."""
    return re.sub(r"[*\\\\\n?]", "_", name)


def _by_run(steps: Sequence[Step]) -> Iterable[tuple[int, list[Step]]]:
    """Steps in order, those of one instruction together."""
    parts: list[Step] = []
    for step in steps:
        if parts and parts[0].run != step.run:
            yield parts[0].run, parts
            parts = []
        parts.append(step)
    if parts:
        yield parts[0].run, parts


def _indented(lines: Iterable[str]) -> list[str]:
    """Lines with two spaces for each brace that is open."""
    depth, result = 0, []
    for line in lines:
        if line.startswith("}"):
            depth -= 1
        result.append("  " * depth + line if line else line)
        depth += line.count("{") - line.count("}") + line.startswith("}")
    return result


__all__ = ["Pointer", "array", "numbers", "written"]

"""Tables of planned steps on phones and boards, from their rows."""

import pathlib
from collections.abc import Iterable

from experiments.program import markdown, read_rows
from poet_jax.core.units import format_bytes, format_seconds

ROWS = pathlib.Path(__file__).parents[1] / "results" / "edge" / "steps.csv"
HOST, BASELINE, AARCH64 = "x86_64", "x86_64_baseline", "aarch64"
COMPILED = HOST, AARCH64, "riscv64", "armv7"

Row = dict[str, str]


def cases() -> Iterable[tuple[str, str, dict[tuple[str, str], Row]]]:
    """Each model and budget, with its rows by system and target."""
    found: dict[tuple[str, str], dict[tuple[str, str], Row]] = {}
    for row in read_rows(ROWS):
        rows = found.setdefault((row["model"], row["share"]), {})
        rows[row["system"], row["target"]] = row
    return [(model, share, rows) for (model, share), rows in found.items()]


def budget(share: str) -> str:
    return f"{share} %" if share.isdigit() else share


def size(row: Row | None, column: str = "memory_bytes") -> str:
    return format_bytes(int(row[column])) if row and row[column] else ""


def memory() -> str:
    """What a plan says, and what each system takes on AArch64."""
    lines = []
    for model, share, rows in cases():
        c, iree = rows.get(("C", AARCH64)), rows.get(("IREE", AARCH64))
        state = {"in_place": "in place", "copied": "copied"}
        lines.append([
            model,
            budget(share),
            size(c, "plan_bytes"),
            size(c),
            size(iree),
            state[iree["state"]] if iree else "",
            size(rows.get(("jax.jit", HOST))),
            size(rows.get(("C", HOST)), "resident_bytes"),
            size(rows.get(("IREE", HOST)), "resident_bytes"),
        ])  # fmt: skip
    head = ["step", "budget", "plan", "arena of C", "IREE", "its state", "`jax.jit`"]
    return markdown([[*head, "process of C", "process of IREE"], *lines])


def seconds() -> str:
    """CPU time of a step, by target, and ratios to IREE's without a plan."""
    lines = []
    plain: dict[tuple[str, str], float] = {}
    for model, share, rows in cases():
        cells = [model, budget(share)]
        for target in (HOST, BASELINE, AARCH64):
            c, iree = (
                float(rows[system, target]["seconds"])
                if (system, target) in rows
                else None
                for system in ("C", "IREE")
            )
            if share == "none" and iree:
                plain[model, target] = iree
            cells += [format_seconds(x) if x else "" for x in (c, iree)]
            if target != HOST:
                least = plain.get((model, target))
                cells.append(f"{c / least:.2f}" if c and least else "")
        jit = rows.get(("jax.jit", HOST))
        cells.append(format_seconds(float(jit["seconds"])) if jit else "")
        lines.append(cells)
    head = ["step", "budget", "C here", "IREE", "C, 128 bits", "IREE", "ratio"]
    head += ["C, AArch64 emulated", "IREE", "ratio", "`jax.jit` here"]
    return markdown([head, *lines])


def programs() -> str:
    """Bytes of what each compiler writes."""
    lines = []
    for model, share, rows in cases():
        c = (size(rows.get(("C", x)), "program_bytes") for x in (HOST, AARCH64))
        iree = (size(rows.get(("IREE", x)), "program_bytes") for x in COMPILED)
        lines.append([model, budget(share), *c, *iree])
    head = ["step", "budget", "C, x86-64", "C, AArch64", "IREE, x86-64", "AArch64"]
    return markdown([[*head, "RISC-V 64", "ARMv7"], *lines])

"""What `python -m poet_jax` does, as functions that other programs use, too.

Importing this module defines no flag: `define_flags` does.
"""

import contextlib
import csv
import functools
import inspect
import logging
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import absl.logging
from absl import flags

from poet_jax import devices
from poet_jax.api.pareto import Front, front_rows, pareto
from poet_jax.api.planning import make_schedule
from poet_jax.api.schedule import Schedule
from poet_jax.api.transform import Scheduled, schedule
from poet_jax.core.costs import Costs
from poet_jax.core.device import DeviceProfile
from poet_jax.core.errors import CannotTrace
from poet_jax.core.graph import Graph
from poet_jax.core.instances import load_instance
from poet_jax.core.plan import Planner, check_budget
from poet_jax.core.units import format_bytes, format_count
from poet_jax.devices.machine import host
from poet_jax.planners import (
    MilpPlanner,
    PaperPlanner,
    greedy,
    keep_all,
    paging_only,
    sqrt,
)
from poet_jax.target import loaded
from poet_jax.viz.reasons import ESTIMATE

MILPS = {"milp": MilpPlanner, "paper": PaperPlanner}
RULES = {f.__name__: f for f in (keep_all, sqrt, greedy, paging_only)}
DEFAULT_BUDGET = "80%"
DRAWN_NODES = 300  # more take Graphviz minutes
# How each flag is defined.
FLAGS: dict[str, tuple[Callable[..., Any], Any, str]] = {
    "budget": (
        flags.DEFINE_string,
        None,
        "Memory of a step, as 64MiB, or as 30% of what keep-all needs: as planned, or "
        "by XLA's own count if that is more. By default the step's own, else the RAM "
        f"of --device, else {DEFAULT_BUDGET}.",
    ),
    "budgets": (
        flags.DEFINE_list,
        None,
        "Budgets to sweep over, as 40%,60%,100% of what keep-all needs as planned. By "
        "default eight, from the smallest that works up to keep-all's.",
    ),
    "device": (
        flags.DEFINE_string,
        None,
        "Whose costs the plan is for: host, this machine as measured, the path of a "
        f"profile in TOML or JSON, or one of {', '.join(devices.ALL)}. By default the "
        "step's own, else host.",
    ),
    "donate_argnums": (
        flags.DEFINE_list,
        None,
        "Numbers of arguments that a function replaces, as 0,1: as under jax.jit.",
    ),
    "planner": (
        flags.DEFINE_string,
        None,
        "What decides to keep, remat or page each value: one of "
        f"{', '.join([*RULES, *MILPS])}. By default the step's own, else milp.",
    ),
    "solver": (flags.DEFINE_string, None, "CBC or HIGHS, for milp and paper."),
    "objective": (flags.DEFINE_string, None, "energy or time: what milp minimises."),
    "time_limit": (flags.DEFINE_float, None, "Seconds that milp and paper may take."),
    "values": (
        functools.partial(flags.DEFINE_integer, lower_bound=0),
        20,
        "How many values are explained, the largest first.",
    ),
    "output": (flags.DEFINE_string, "outputs/plan", "Folder for what is written."),
}
flags.disclaim_key_flags()  # they are flags of the program that defines them
EXPECTED = (ValueError, OSError, ImportError, CannotTrace)


def define_flags(*names: str) -> None:
    """Define those of `FLAGS` that a program reads, unless they are defined."""
    for name in names:
        define, default, text = FLAGS[name]
        if name in flags.FLAGS:
            flags.declare_key_flag(name)
        else:
            define(name, default, text)


@contextlib.contextmanager
def messages() -> Iterator[None]:
    """An error that says what to do ends the program with its message alone.

    With --verbosity=1 its traceback is shown, too. What JAX and the solver log of
    themselves is not.
    """
    for name in ("jax", "mip"):
        logging.getLogger(name).setLevel("WARNING")
    try:
        yield
    except EXPECTED as error:
        absl.logging.debug("an error", exc_info=True)
        notes = getattr(error, "__notes__", ())
        notes = [x for x in notes if "JAX_TRACEBACK_FILTERING" not in x]  # of JAX
        raise SystemExit("\n".join([str(error), *notes])) from error


def named_device(name: str) -> DeviceProfile:
    """This machine for "host", the device of that name, or the profile at that path.

    Raises ValueError for any other name and for a profile that makes no sense, and
    FileNotFoundError.
    """
    if name == "host":
        return host()
    if name.endswith((".toml", ".json")):
        return DeviceProfile.load(name)
    if name not in devices.ALL:
        raise ValueError(
            f"No device is named {name!r}. The devices are host, "
            f"{', '.join(devices.ALL)}. Use one of these, or a path that ends in .toml "
            "or .json for a profile of your own."
        )
    return devices.ALL[name]


def asked_device() -> DeviceProfile | None:
    """The device that --device names; None without it."""
    name = flags.FLAGS.device
    return None if name is None else named_device(name)


def asked_planner() -> Planner | None:
    """The planner that flags name; None without any of them.

    Raises ValueError for a name that does not exist, and for a flag that the planner
    does not take.
    """
    options = {
        "solver": flags.FLAGS["solver"],
        "objective": flags.FLAGS["objective"],
        "time_limit_seconds": flags.FLAGS["time_limit"],
    }
    given = {option: x for option, x in options.items() if x.value is not None}
    name = flags.FLAGS.planner or ("milp" if given else None)
    if name is None:
        return None
    planners = RULES | MILPS
    if name not in planners:
        raise ValueError(
            f"No planner is named {name!r}. The planners are {', '.join(planners)}. "
            "Use --planner=milp."
        )
    takes = inspect.signature(planners[name]).parameters
    for option, flag in given.items():
        # A program's own default is for the planners that take it.
        if option not in takes and not flag.using_default_value:
            raise ValueError(
                f"--planner={name} does not take --{flag.name}. Leave that out, or use "
                "--planner=milp."
            )
    if name in RULES:
        return RULES[name]
    return MILPS[name](**{x: given[x].value for x in given.keys() & takes})


def asked_budget(device: DeviceProfile | None) -> str | int:
    """--budget, else the RAM of a device that is not this machine, else 80 %."""
    if flags.FLAGS.budget is not None:
        return flags.FLAGS.budget
    return DEFAULT_BUDGET if device is None or device.rates else device.ram_bytes


def _numbers(given: Sequence[str]) -> tuple[int, ...]:
    try:
        return tuple(map(int, given))
    except ValueError:
        raise ValueError(
            f"--donate_argnums={','.join(given)} is no list of numbers. Use "
            "--donate_argnums=0,1 for example."
        ) from None


def scheduled(made: Sequence[Any]) -> tuple[Scheduled, Sequence[Any]]:
    """The scheduled function of a step with its arguments, and arguments for it.

    Args:
      made: (step, *arguments), as `loaded` returns it. A step is a function, which gets
        its budget, device, planner and donated arguments from flags; or one made by
        `schedule`, `train_step` or `nnx.schedule`, which keeps what no flag replaces.

    Raises ValueError for flags or arguments that do not go with the step.
    """
    step, *args = made
    device, planner = asked_device(), asked_planner()
    donated = flags.FLAGS.donate_argnums if "donate_argnums" in flags.FLAGS else None
    if not hasattr(step, "plan"):
        inner = schedule(
            step,
            asked_budget(device),
            device=device,
            planner=planner,
            donate_argnums=_numbers(donated or ()),
        )
        return inner, args
    if donated is not None:
        raise ValueError(
            f"A {type(step).__name__} says itself what it replaces. Use "
            "--donate_argnums for a plain function only."
        )
    if isinstance(step, Scheduled):
        inner = step
    else:
        inner, args = _beneath(step, args)
    if flags.FLAGS.budget is not None:
        check_budget(flags.FLAGS.budget)
        inner.budget = flags.FLAGS.budget
    inner.device = device or inner.device
    inner.planner = planner or inner.planner
    return inner, args


def _beneath(step: Any, args: Sequence[Any]) -> tuple[Scheduled, Sequence[Any]]:
    """The function of arrays beneath a step of Flax modules, and its arguments."""
    signature = inspect.signature(step.plan)
    try:
        signature.bind(*args)
    except TypeError as error:
        takes = ", ".join(signature.parameters)
        raise ValueError(
            f"A {type(step).__name__} was returned with "
            f"{format_count(len(args), 'argument')}. It takes {takes}. Use `return "
            f"step, {takes}`."
        ) from error
    beneath = step.array_step(*args)
    if isinstance(beneath, tuple):
        return beneath
    return beneath.scheduled, beneath.args


def planned(made: Sequence[Any]) -> Schedule:
    """The schedule of a step with its arguments, as flags say; see `scheduled`."""
    function, args = scheduled(made)
    return function.plan(*args)


def swept(made: Sequence[Any]) -> Front:
    """The front of a step with its arguments, as flags say; see `scheduled`."""
    budgets = asked_budgets()
    function, args = scheduled(made)
    return function.pareto(*args, budgets=budgets)


def asked_budgets() -> Sequence[str] | None:
    """--budgets; ValueError for --budget, which a sweep has no use for."""
    if flags.FLAGS.budget is not None:
        raise ValueError(
            f"sweep does not take --budget={flags.FLAGS.budget}: it plans several "
            "budgets. Use --budgets=40%,60%,100%, or leave it out for eight."
        )
    return flags.FLAGS.budgets


def instance(path: str) -> tuple[Graph, Costs]:
    """A planner instance, whose costs are its own; ValueError for a device."""
    budgets = flags.FLAGS.budgets or [flags.FLAGS.budget]
    if flags.FLAGS.device is not None or "device" in budgets:
        raise ValueError(
            f"A device was given for {path}, which is no step. An instance has costs "
            "of its own. Use --device for a step, and sizes or percentages as budgets."
        )
    return load_instance(path)


def explain_target(target: str) -> None:
    """Explain the step or the instance that `target` names.

    Raises ValueError for --budgets, of which an explanation has one.
    """
    if flags.FLAGS.budgets is not None:
        raise ValueError(
            f"explain does not take --budgets={','.join(flags.FLAGS.budgets)}: it "
            "explains one plan. Use --budget=75%, or sweep for several budgets."
        )
    output_folder()  # as planning takes a while
    if target.endswith(".json"):
        planner = asked_planner() or MilpPlanner()
        explain(make_schedule(*instance(target), asked_budget(None), planner))
    else:
        explain(planned(loaded(target)))


def sweep_target(target: str) -> None:
    """Sweep over budgets of the step or the instance that `target` names."""
    output_folder()  # as planning takes a while
    if target.endswith(".json"):
        budgets = asked_budgets()
        write_front(pareto(*instance(target), budgets, asked_planner()))
    else:
        write_front(swept(loaded(target)))


def output_folder() -> pathlib.Path:
    """The folder that --output names, which is made if it is not there.

    Raises OSError if it cannot be made or written to.
    """
    folder = pathlib.Path(flags.FLAGS.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        usable = os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        usable = False
    if not usable:
        raise OSError(
            f"--output: {str(folder)!r} is no folder that can be made or written to. "
            "Use another one, such as --output=plan."
        )
    return folder


def explain(schedule: Schedule) -> None:
    """Print a schedule with the reasons of its largest values, and draw it.

    Writes graph.dot, trace.json, report.html, plan.png and matrices.png to --output.
    Writes graph.svg, too, where Graphviz is installed and there are at most
    `DRAWN_NODES`. Raises ImportError for pictures if matplotlib is not installed.
    """
    print(f"{schedule}\n\n{ESTIMATE}")
    largest = sorted(schedule.reasons(), key=lambda x: (-x.nbytes, x.value))
    shown = flags.FLAGS.values
    for reason in largest[:shown]:
        print(f"- {reason}")
    if len(largest) > shown:
        print(f"- and {len(largest) - shown} more, all of them in report.html")
    folder = output_folder()
    schedule.to_dot(folder / "graph.dot")
    schedule.to_perfetto(folder / "trace.json")
    if shutil.which("dot") and len(schedule.graph.nodes) <= DRAWN_NODES:
        schedule.to_dot(folder / "graph.svg")
    schedule.plot(folder / "plan.png")
    schedule.plot_matrices(folder / "matrices.png")
    schedule.to_html(folder / "report.html")
    print(f"\nfiles in {folder}")


def write_front(front: Front) -> None:
    """Print a front, and write front.csv and front.png to --output.

    Raises ImportError for the figure if matplotlib is not installed.
    """
    print(front)
    folder = output_folder()
    with open(folder / "front.csv", "w", newline="") as file:
        rows = front_rows(front)
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    front.plot(folder / "front.png")
    print(f"\nfiles in {folder}")


def device_table() -> list[tuple[str, ...]]:
    """The head and a row for each named device."""
    rows = [("name", "device", "RAM", "FLOP/s", "compute power", "storage in, out")]
    for name, device in devices.ALL.items():
        rates = device.page_in_bytes_per_second, device.page_out_bytes_per_second
        rows.append(
            (
                name,
                device.name,
                format_bytes(device.ram_bytes),
                f"{device.flops_per_second:.4g}",
                f"{device.compute_watts:.3g} W",
                f"{rates[0] / 1e6:.4g}, {rates[1] / 1e6:.4g} MB/s",
            )
        )
    return rows


def constant_table(
    device: DeviceProfile, defaults: bool = False
) -> list[tuple[str, str, str]]:
    """The head and a row for each constant of a device; see `DeviceProfile`."""
    return [("constant", "value", "origin"), *device.constants(defaults)]


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A table as text, in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def print_devices() -> None:
    """Print the table of devices, or all that is known of the one --device names."""
    device = asked_device()
    if device is None:
        print(aligned(device_table()))
    else:
        print(device.name, aligned(constant_table(device, defaults=True)), sep="\n")


# What each command takes, and does.
COMMANDS: dict[str, tuple[int, Callable[..., None]]] = {
    "explain": (1, explain_target),
    "sweep": (1, sweep_target),
    "devices": (0, print_devices),
}


def main(argv: Sequence[str]) -> None:
    """Run the command in `argv`, which begins with the program's name.

    Raises SystemExit with a message for what does not go together, and RuntimeError
    from an error of the caller's file.
    """
    command, rest = "".join(argv[1:2]), argv[2:]
    count, run = COMMANDS.get(command, (-1, print_devices))
    if count != len(rest):
        raise SystemExit(
            f"The arguments {list(argv[1:])} were given. The commands are explain "
            "STEP, sweep STEP and devices. A STEP is file.py:function, or an instance "
            "as JSON. Use for example python -m poet_jax explain train.py:make_step "
            "--budget=75%, or --help for the flags."
        )
    with messages():
        run(*rest)

"""Plan a training step from the command line.

    python -m poet_jax explain path/to/file.py:make_step --budget=75% --output=plan
    python -m poet_jax explain instance.json --budget=50%
    python -m poet_jax sweep path/to/file.py:make_step --device=JETSON_TX2
    python -m poet_jax devices --device=JETSON_TX2

Use `explain` to see what a plan does with each value, and why. It prints the schedule
and the reasons of the largest values, and writes plan.png, matrices.png, graph.dot,
trace.json (for ui.perfetto.dev) and report.html.

Use `sweep` to see what each budget costs. It prints the Pareto front of memory against
energy and time, and writes front.csv and front.png. Its percentages are of keep-all as
planned; those of `explain` are of XLA's own count of the whole step if that is more.

Use `devices` to see the devices that are known, and with --device all that is known of
one.

make_step() takes no arguments and returns a step with its arguments: `return step,
*arguments`. A step is a function, or what `poet_jax.schedule`, `poet_jax.train_step` or
`poet_jax.nnx.schedule` made of one. Arguments are arrays or `jax.ShapeDtypeStruct`s.
Flags that are given replace what such a step says. Nothing is trained. Energies are
always modelled.
"""


def main() -> None:
    from absl import app, flags

    from poet_jax import cli

    cli.define_flags(*cli.FLAGS)
    flags.FLAGS.set_gnu_getopt(True)
    app.run(cli.main)


if __name__ == "__main__":
    main()

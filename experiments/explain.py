"""Print a plan and its reasons, and draw it. Nothing is trained and no array is made.

    python -m experiments.explain --model=cnn --device=JETSON_TX2 --budget=75%

does for the step of experiments.train what `python -m poet_jax explain` does for any,
and writes the same files to outputs/explain. It takes about 30 s on two cores, most of
it to compile nodes. On this machine, the default device, nodes are timed on zeros, too.
"""

from absl import app, flags

from experiments import zoo
from experiments.program import program
from poet_jax import cli

cli.define_flags("values")
flags.adopt_module_key_flags(zoo)


@program
def main() -> None:
    cli.explain(cli.planned(zoo.make_step()))


if __name__ == "__main__":
    flags.FLAGS.set_default("output", "outputs/explain")
    app.run(main)

"""What each budget costs a model on a device. Nothing is trained.

    python -m experiments.sweep --model=cnn --device=STM32H7 --budgets=60%,80%,100%

does for the step of experiments.train what `python -m poet_jax sweep` does for any: it
prints the front of memory against energy and time, in about a minute, and writes
front.csv and front.png to outputs/sweep. Energies are modelled.
"""

from absl import app, flags

from experiments import zoo
from experiments.program import program
from poet_jax import cli

cli.define_flags("budgets")
flags.adopt_module_key_flags(zoo)


@program
def main() -> None:
    cli.write_front(cli.swept(zoo.make_step()))


if __name__ == "__main__":
    flags.FLAGS.set_default("output", "outputs/sweep")
    app.run(main)

"""A Keras model on digits within a budget, beside jax.jit.

Command:  python -m experiments.front_ends.keras_digits
Needs:    pip install -e ".[front_ends]", of that only Keras.
Expect:   about a minute; a peak below 85 % of keep-all's; the losses of jax.jit.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

import jax
import keras

from experiments.front_ends import digits

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.layers.Input((8, 8, 1)),
        keras.layers.Conv2D(16, 3, padding="same"),
        keras.layers.BatchNormalization(),
        keras.layers.ReLU(),
        keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
        keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.1),
        keras.layers.Dense(10),
    ]
)
optimizer = keras.optimizers.Adam(1e-3)
optimizer.build(model.trainable_variables)
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
variables = (
    model.trainable_variables,
    model.non_trainable_variables,
    optimizer.variables,
)
state = jax.tree.map(lambda variable: variable.value, variables)


def loss_of(trainable, rest, images, labels):
    logits, rest = model.stateless_call(trainable, rest, images, training=True)
    return cross_entropy(labels, logits), rest


def step(state, images, labels):
    trainable, rest, moments = state
    gradient = jax.value_and_grad(loss_of, has_aux=True)
    (loss, rest), gradients = gradient(trainable, rest, images, labels)
    trainable, moments = optimizer.stateless_apply(moments, gradients, trainable)
    return (trainable, rest, moments), loss


def trained(state):
    """The model again: its variables take the state of the last step."""
    jax.tree.map(lambda variable, value: variable.assign(value), variables, state)
    return model


if __name__ == "__main__":
    digits.main(step, state)

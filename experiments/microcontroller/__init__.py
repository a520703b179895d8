"""Training on emulated microcontrollers: `python -m experiments.microcontroller`."""

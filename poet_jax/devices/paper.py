"""The devices exactly as published with the POET code (Patil et al., ICML 2022).

Use them to compare with the paper's own numbers. Two contradict themselves: the
Raspberry Pi's 2.0e9 FLOP/s at 4.0116e7 FLOP/J would draw 50 W, but its comment states
1.2035e8 FLOP/s and a measured 3 W; the Jetson TX2 lacks a FLOP rate and is left out.
"""

import dataclasses
import pathlib

from poet_jax.core.device import DeviceProfile

_FOLDER = pathlib.Path(__file__).parent

MKR1000 = DeviceProfile.load(_FOLDER / "mkr1000.toml")
NRF52840 = DeviceProfile.load(_FOLDER / "nrf52840.toml")
RASPBERRY_PI_4 = dataclasses.replace(
    DeviceProfile.load(_FOLDER / "raspberry_pi_4.toml"),
    name="Raspberry Pi 4B, cached storage, as published",
    flops_per_second=2.0e9,
    source="published with the POET code, contradictions included",
)
RASPBERRY_PI_4_UNCACHED = DeviceProfile.load(_FOLDER / "raspberry_pi_4_uncached.toml")

"""Device profiles, each a TOML file in this folder with the origin of every number.

`paper` has the constants exactly as published with the POET code.
"""

import pathlib
from typing import Any

from poet_jax.core.device import DeviceProfile
from poet_jax.devices import paper as paper
from poet_jax.devices.machine import host_path as host_path
from poet_jax.devices.node_costs import write_node_costs as write_node_costs

_FOLDER = pathlib.Path(__file__).parent

MKR1000 = DeviceProfile.load(_FOLDER / "mkr1000.toml")
NRF52840 = DeviceProfile.load(_FOLDER / "nrf52840.toml")
STM32F746 = DeviceProfile.load(_FOLDER / "stm32f746.toml")
STM32H7 = DeviceProfile.load(_FOLDER / "stm32h7.toml")
ESP32_S3 = DeviceProfile.load(_FOLDER / "esp32_s3.toml")
RP2350 = DeviceProfile.load(_FOLDER / "rp2350.toml")
RASPBERRY_PI_4 = DeviceProfile.load(_FOLDER / "raspberry_pi_4.toml")
RASPBERRY_PI_4_UNCACHED = DeviceProfile.load(_FOLDER / "raspberry_pi_4_uncached.toml")
RASPBERRY_PI_5 = DeviceProfile.load(_FOLDER / "raspberry_pi_5.toml")
JETSON_TX2 = DeviceProfile.load(_FOLDER / "jetson_tx2.toml")
JETSON_ORIN = DeviceProfile.load(_FOLDER / "jetson_orin.toml")
TPU_V5E = DeviceProfile.load(_FOLDER / "tpu_v5e.toml")
TPU_V5P = DeviceProfile.load(_FOLDER / "tpu_v5p.toml")
A100 = DeviceProfile.load(_FOLDER / "a100.toml")
H100 = DeviceProfile.load(_FOLDER / "h100.toml")
H200 = DeviceProfile.load(_FOLDER / "h200.toml")
RTX_4090 = DeviceProfile.load(_FOLDER / "rtx_4090.toml")
M2 = DeviceProfile.load(_FOLDER / "m2.toml")

ALL: dict[str, DeviceProfile] = {
    name: profile
    for name, profile in vars().copy().items()
    if isinstance(profile, DeviceProfile)
}


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"poet_jax.devices has no {name}; it has {', '.join(ALL)}. Use one of these, "
        "or DeviceProfile.load(path) for a board of your own."
    )

"""The process's own memory, as the operating system counts it (Linux)."""


def high_water_bytes() -> int:
    """VmHWM: the most physical memory that the process held since the last reset."""
    return _status_bytes("VmHWM")


def resident_bytes() -> int:
    """VmRSS: the physical memory that the process holds now."""
    return _status_bytes("VmRSS")


def reset_high_water() -> None:
    """Start VmHWM afresh from the memory held now (see proc(5), clear_refs)."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _status_bytes(field: str) -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise OSError(
        f"{field} was asked for, and /proc/self/status does not list it. It is there "
        "on Linux only. Run this measurement on Linux."
    )

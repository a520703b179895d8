"""A planned program as a C99 project, for microcontrollers."""

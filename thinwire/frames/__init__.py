"""Frames: bases all ranks agree on before the step, so that coefficients simply add."""

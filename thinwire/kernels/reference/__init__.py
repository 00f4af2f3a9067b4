"""Plain torch: what every kernel computes, and what serves any device and precision."""

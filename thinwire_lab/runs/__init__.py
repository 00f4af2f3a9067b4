"""One training run: its loop, settings, checkpoints, logs, and how it is started and recorded."""

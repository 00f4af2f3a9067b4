"""Workers on this machine: processes that leave nothing behind, and networks of a given rate."""

"""Transports: the one seam between algorithms and the network.

`local` runs P ranks as threads of this process, `torch` speaks through a process group, `metered`
wraps either and counts what is sent.
"""

"""What every worker needs, loaded once: workers are forked from a process that imported this.

Nothing may run here that leaves a thread or a device behind; both are lost in a fork.
"""

from contextlib import suppress

import torch.distributed  # noqa: F401

from thinwire import kernels

with suppress(Exception):  # a worker would meet it again, and can say so
    kernels.warm()

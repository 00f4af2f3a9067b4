"""Collectives sum sparse payloads whose supports differ from rank to rank.

Each returns the total and this rank's share of it, and prices itself in the same file.
"""

from thinwire.collectives.cheapest import Cheapest
from thinwire.collectives.gather import AllGather
from thinwire.collectives.gtopk import GTopK
from thinwire.collectives.oktopk import OkTopk
from thinwire.collectives.slots import Slots
from thinwire.collectives.spardl import BlockQuota
from thinwire.collectives.split import SplitReduce
from thinwire.collectives.two_level import TwoLevel

__all__ = [
    "AllGather",
    "BlockQuota",
    "Cheapest",
    "GTopK",
    "OkTopk",
    "Slots",
    "SplitReduce",
    "TwoLevel",
]

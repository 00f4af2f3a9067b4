"""What the tests' worker processes need, loaded once: they are forked from one that imported this.

DDP and every optimizer load torch._dynamo, and the digits scikit-learn: seconds of each process.
Neither leaves a thread behind, which would be lost in a fork.
"""

from thinwire_lab.local import nursery  # noqa: F401, I001  # first: the others may not be installed

import torch._dynamo  # noqa: F401
import sklearn.datasets
import sklearn.model_selection  # noqa: F401

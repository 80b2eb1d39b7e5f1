"""refit: the refit cycle of RL post-training, for PyTorch loops.

Between an optimizer step and the next rollout it clears optimizer states and grads off the device,
hands the new weights to every rollout worker as one version that all of them switch to or none
does, and brings the states back behind the next step.
"""

from refit._version import __version__
from refit.errors import RefitError

__all__ = ["RefitError", "__version__"]

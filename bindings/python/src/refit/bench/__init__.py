"""refit measured against what trainers do today, in one run on one machine.

    python -m refit.bench [--rounds N] [--parameters 0.6e9] [--json FILE]
    python -m refit.bench picture cycle.png

Every figure of speed stands beside a baseline that was measured in turn with it, and is given as a
ratio; medians and 95th percentiles, never the best of. First use and steady state are apart. The
words are those of ``refit bench``.
"""

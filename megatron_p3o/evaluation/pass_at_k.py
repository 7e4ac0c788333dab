"""pass@k without bias, by Chen et al. (arXiv:2107.03374, section 2.1).

The chance that at least one of k samples is correct, from n >= k samples of which c are:

    pass@k = 1 - C(n - c, k) / C(n, k)

which is the mean over all subsets of k samples. Its expectation is 1 - (1 - p)^k; putting c / n in
the place of p there would be biased.
"""

import math


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The estimate for one prompt, in [0, 1].

    Integers of any size are subtracted and divided exactly, so the result is the nearest float.

    Args:
        num_samples: n.
        num_correct: c, from 0 to n.
        k: from 1 to n.
    """
    assert 0 <= num_correct <= num_samples and 1 <= k <= num_samples
    subsets = math.comb(num_samples, k)
    return (subsets - math.comb(num_samples - num_correct, k)) / subsets

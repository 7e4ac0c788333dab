"""How often a model answers right: samples, rewards, pass@k, intervals, paired comparisons.

Only `samples`, `inputs`, `embedded` and `servers` import torch; what reads and compares results
does not.
"""

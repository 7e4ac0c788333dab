"""Studies: many runs that differ in a few fields, started, resumed and compared.

Reads and writes run dirs only. Imports no torch, so that a report can be made on a laptop from run
dirs that were copied from a cluster.
"""

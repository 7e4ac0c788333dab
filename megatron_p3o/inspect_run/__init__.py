"""Looks at a run dir from outside while it is written, or later: `p3o watch` and `p3o samples`.

Reads files only, imports no torch, and never writes. A file that a run is still writing may be
missing or end in half a line.
"""

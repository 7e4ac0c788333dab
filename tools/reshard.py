"""`p3o reshard` as a script, for a checkout that is not installed.

PYTHONPATH=. python tools/reshard.py SRC DST --to hf
"""

import sys

from megatron_p3o.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "reshard")
    main()

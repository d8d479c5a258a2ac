#!/usr/bin/env python3
"""Prune a saved model: `python scripts/prune_h5.py IN.h5 OUT.h5 --sparsity 0.9 [--retrain DATA --epochs N]`.

The same as `sparsekit prune`; works from a checkout without installing it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sparsekit.cli import main

if __name__ == "__main__":
    sys.exit(main(["prune", *sys.argv[1:]]))

"""``python -m jaxtrain`` is ``jaxtrain``."""

import sys

from jaxtrain.cli import main

if __name__ == "__main__":
    sys.exit(main())

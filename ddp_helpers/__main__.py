"""`python -m ddp_helpers` is `ddp-course`."""

import sys

from ddp_helpers.cli import main

if __name__ == "__main__":
    sys.exit(main())

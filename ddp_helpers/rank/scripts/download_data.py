"""Put MNIST (or, without a network, digits made here) into a folder, once, before any rank starts.

python download_data.py --data data
"""

import argparse
from pathlib import Path

from ddp_helpers.rank.staging import stage
from ddp_helpers.rank.topology import stop


def main() -> None:
    """Compute nodes have no network: run this on the login node, not on every rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder that will hold MNIST/raw")
    args = parser.parse_args()
    try:
        print(f"use it with: --data {stage(args.data)}")
    except OSError as error:
        stop(f"--data {args.data} cannot be written ({error.strerror}): choose another folder")


if __name__ == "__main__":
    main()

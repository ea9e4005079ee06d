"""Put MNIST into a folder, once, before any run starts: compute nodes have no network.

python download_data.py --data data
"""

from argparse import ArgumentParser
from pathlib import Path

from ddp_helpers.rank.launchers import stop
from ddp_helpers.rank.staging import check_data, download, has_files


def main() -> None:
    """Download what is missing, and check what is there."""
    parser = ArgumentParser(usage="%(prog)s [--data FOLDER]", description=__doc__)
    folder_help = "folder that will hold MNIST/raw"
    parser.add_argument("--data", type=Path, default=Path("data"), help=folder_help)
    folder = parser.parse_args().data
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not has_files(folder) and not download(folder, seconds=600):
            stop(
                f"--data {folder}: no network, so no download: "
                "copy MNIST/raw there from a machine that has one"
            )
    except OSError as error:
        stop(f"--data {folder} cannot be written ({error.strerror}): choose another folder")
    print(f"{check_data(folder)} is whole; use it with: --data {folder}")


if __name__ == "__main__":
    main()

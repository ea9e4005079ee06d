"""Put MNIST into a folder, once, before any run starts: compute nodes have no network.

python download_data.py --data data
"""

from argparse import ArgumentParser
from pathlib import Path

from ddp_helpers.data.download import download
from ddp_helpers.data.mnist_files import check_data, has_files, stop


def main() -> None:
    """Download the missing files, and check the present ones."""
    parser = ArgumentParser(usage="%(prog)s [--data FOLDER]", description=__doc__)
    folder_help = "folder that will hold MNIST/raw"
    parser.add_argument("--data", type=Path, default=Path("data"), help=folder_help)
    folder = parser.parse_args().data
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not has_files(folder):
            download(folder)
    except ConnectionError as error:
        cure = "copy MNIST/raw there from a machine that has a network"
        stop(f"--data {folder}: no download ({error}): {cure}")
    except OSError as error:
        stop(f"--data {folder} cannot be written ({error.strerror}): choose another folder")
    print(f"{check_data(folder)} is complete; use it with: --data {folder}")


if __name__ == "__main__":
    main()

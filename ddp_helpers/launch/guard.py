"""End a launch whose starter is gone: `processes.Guard` runs this program beside each launch.

Its stdin holds the process groups of the launch, one on each line; it closes when the starter ends.
"""

import sys


def main(mark: str) -> None:
    """Wait until stdin closes, then end all processes with this mark, and those of the groups."""
    groups = [int(line) for line in sys.stdin]
    # Imported only now: nearly every guard is ended before, and should have cost next to nothing.
    from ddp_helpers.launch.processes import end_all

    end_all(mark, groups=groups)


if __name__ == "__main__":
    main(sys.argv[1])

"""The images of notebook 13's input pipeline: its three forms hold the same, made again they are the same bytes."""

import tarfile
from hashlib import sha256
from pathlib import Path

from ddp_helpers.lessons.feed_the_ranks.pipeline import write_forms


def contents(form: list[Path]) -> dict[str, bytes]:
    """The encoded images of a form, by their names."""
    if form[0].suffix == ".png":
        return {path.name: path.read_bytes() for path in form}
    contents = {}
    for path in form:
        with tarfile.open(path) as tar:
            contents |= {member.name: tar.extractfile(member).read() for member in tar}
    return contents


def digests(forms: dict[str, list[Path]]) -> list[tuple[str, str]]:
    """The name and the digest of each file."""
    return [(path.name, sha256(path.read_bytes()).hexdigest()) for form in forms.values() for path in form]


def test_the_three_forms_hold_the_same_images_and_are_made_alike(tmp_path: Path) -> None:
    forms = write_forms(tmp_path / "forms", 37, 4)  # 37 images do not fit 4 files evenly
    assert {form: len(paths) for form, paths in forms.items()} == {"files": 37, "archive": 1, "shards": 4}
    assert contents(forms["files"]) == contents(forms["archive"]) == contents(forms["shards"])
    assert len(set(contents(forms["files"]).values())) == 37, "one image for all would be equal, too"
    assert digests(write_forms(tmp_path / "again", 37, 4)) == digests(forms)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_complete_set_is_kept(tmp_path: Path) -> None:
    first = write_forms(tmp_path / "forms", 4, 2)
    first["files"][0].write_bytes(b"mine")
    assert write_forms(tmp_path / "forms", 4, 2)["files"][0].read_bytes() == b"mine"

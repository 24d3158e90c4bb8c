"""The folder of a checkpoint, of which one version counts at a time.

    folder/latest             the name of the version that counts
    folder/data-.../          files of torch.distributed.checkpoint

``latest`` is replaced when all files of the new version are on the disk, at once: whatever dies before that leaves the version before as
it was.
"""

from __future__ import annotations

import datetime
import os
import re
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path

from autopar.errors import CheckpointError

LATEST, VERSION, POINTER = "latest", "data-", ".latest-"
_VERSION = re.compile(r"data-\d{8}-\d{6}-[0-9a-f]{8}")


def new_version() -> str:
    """A name that no other save has."""
    return f"{VERSION}{datetime.datetime.now():%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:8]}"


def publish(version: Path, files: Iterable[str]) -> None:
    """Make a written version the one that counts, and remove the one that counted.

    Args:
        version: its folder.
        files: that all ranks wrote, relative to it.

    Raises:
        CheckpointError: a file is not there.
        OSError: the disk is full, or the like.
    """
    missing = sorted(name for name in set(files) if not (version / name).is_file())
    if missing:
        raise CheckpointError(f"{version} lacks {', '.join(missing)}, which other ranks wrote on other disks; save where all ranks see one")
    before = _named(version.parent)
    pointer = version.with_name(POINTER + version.name)
    with pointer.open("w") as file:
        file.write(version.name + "\n")
        file.flush()
        os.fsync(file.fileno())
    pointer.replace(version.with_name(LATEST))
    folder = os.open(version.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    if before:
        remove(version.with_name(before))


def remove(version: Path) -> None:
    """Remove a version, or what is there of it, unless it counts; that it stays where that is not possible does no harm. Nothing else is
    ever removed."""
    if _VERSION.fullmatch(version.name) and _named(version.parent) != version.name:
        shutil.rmtree(version, ignore_errors=True)


def _named(folder: Path) -> str:
    """The version that counts; empty if there is none."""
    try:
        return (folder / LATEST).read_text().strip()
    except OSError:
        return ""


def latest_version(folder: Path) -> Path:
    """The version that counts.

    Raises:
        CheckpointError: there is none.
    """
    try:
        found = folder / (folder / LATEST).read_text().strip()
    except OSError as error:
        raise CheckpointError(f"there is no checkpoint in {folder} ({error.strerror}: {LATEST}); autopar.save writes one") from error
    if not (found / ".metadata").is_file():
        raise CheckpointError(f"{folder / LATEST} names {found.name}, which holds no checkpoint; was it moved or removed?")
    return found

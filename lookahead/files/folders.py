"""Folders in which this tool keeps things between runs, and whether another user could change what is in them."""

from __future__ import annotations

import grp
import os
import pwd
import stat
import tempfile
from pathlib import Path

MOST_LINKS = 16  # symbolic links on the way to a folder


def cache_folder(kind: str) -> Path | None:
    """Where this user's files of a kind are kept: $LOOKAHEAD_CACHE/kind, else ~/.cache/lookahead/kind; None: no home."""
    if own := os.environ.get("LOOKAHEAD_CACHE"):
        return Path(own) / kind
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "lookahead" / kind
    except RuntimeError:  # HOME is not set, and this user id has no passwd entry
        return None


def temporary_folder(kind: str) -> Path | None:
    """Below the system's temporary folder, the same in each run of this user; None if there is none. See `not_ours`."""
    try:
        return Path(tempfile.gettempdir()) / f"lookahead-{kind}-{os.getuid()}"
    except OSError:
        return None


def not_ours(folder: Path, links: int = MOST_LINKS, is_above: bool = False) -> str:
    """Why another user could change what is in a folder; "" if nobody but this user and root can: each folder from the root
    down to it belongs to one of them and nobody else may write to it (above it, sticky folders such as /tmp will do). At most
    `links` links are followed. is_above: it is a folder above the one that is asked about.
    """
    folder = Path(os.path.abspath(folder))
    for each in (*reversed(folder.parents), folder):
        try:
            about = each.lstat()
        except OSError as error:
            return f"{each}: {error.strerror}"
        if about.st_uid not in (0, os.getuid()):
            return f"{each} belongs to another user"
        if stat.S_ISLNK(about.st_mode):
            target = each.parent / os.readlink(each)
            why = not_ours(target, links - 1, is_above or each != folder) if links else f"{each}: too many links"
            if why:
                return why
        elif not stat.S_ISDIR(about.st_mode):
            return f"{each} is not a folder"
        elif others_may_write(about) and not ((is_above or each != folder) and about.st_mode & stat.S_ISVTX):
            return f"others may write to {each}"
    return ""


def others_may_write(about: os.stat_result) -> bool:
    """Another user than the owner may. A group that is this user's alone, as some distributions make them, is not another."""
    return bool(about.st_mode & stat.S_IWOTH or (about.st_mode & stat.S_IWGRP and not _is_users_own(about.st_gid)))


def _is_users_own(group_id: int) -> bool:
    """A group of the user's own name and number, with nobody else in it (what USERGROUPS_ENAB of login.defs means)."""
    try:
        user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(group_id)
    except KeyError:
        return False
    same = group.gr_name == user.pw_name and group.gr_gid == user.pw_uid == user.pw_gid
    return same and user.pw_uid != 0 and set(group.gr_mem) <= {user.pw_name}

"""Where compiled kernels are kept, and which are believed."""

import os
from collections.abc import Callable
from pathlib import Path

import numba
import pytest

from lookahead.files import folders
from lookahead.native import cache as kernel_cache

OTHER = 12345  # a user id without a passwd entry

as_root = pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can be another user")


def plus_one(number):
    return number + 1


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """compiled(folders...) -> whether `plus_one` had to be compiled, where kernels may lie in these folders."""
    monkeypatch.setattr(kernel_cache, "_notice", "")

    def ask(*candidates):
        monkeypatch.setattr(kernel_cache, "_candidates", lambda: candidates)
        kernel_cache._readable.cache_clear()
        kernel_cache._problem_of.cache_clear()
        dispatcher = numba.njit(plus_one)
        dispatcher._cache = kernel_cache.KernelCache(plus_one, b"sources")
        assert dispatcher(1) == 2
        return sum(dispatcher.stats.cache_misses.values()) > 0

    yield ask
    kernel_cache._readable.cache_clear()
    kernel_cache._problem_of.cache_clear()


def test_kernel_is_kept_in_the_first_folder_that_can_be_written_and_found_there(tmp_path, compiled):
    (tmp_path / "a file").touch()
    candidates = tmp_path / "a file" / "kernels", tmp_path / "new" / "kernels"
    assert compiled(*candidates)
    assert not compiled(*candidates)
    assert len(list(candidates[1].glob("*.kernel"))) == 1
    assert kernel_cache.notice() == ""
    assert not os.stat(candidates[1]).st_mode & 0o077


SPOILT: dict[str, Callable[[Path], object]] = {
    "cut": lambda kept: kept.write_bytes(kept.read_bytes()[:-1]),
    "empty": lambda kept: kept.write_bytes(b""),
    "longer": lambda kept: kept.write_bytes(kept.read_bytes() + b"x"),
    "others may write it": lambda kept: kept.chmod(0o646),
    "a link": lambda kept: kept.symlink_to(kept.rename(kept.parent.with_name("elsewhere"))),
}


@pytest.mark.parametrize("how", SPOILT)
def test_kernel_file_that_is_not_whole_or_not_only_ours_is_compiled_again(tmp_path, compiled, how):
    compiled(tmp_path / "kernels")
    (kept,) = (tmp_path / "kernels").iterdir()
    SPOILT[how](kept)
    assert compiled(tmp_path / "kernels")
    assert how == "a link" or not compiled(tmp_path / "kernels")
    assert not kept.stat().st_mode & 0o022


def test_folder_that_others_may_write_keeps_nothing_and_is_named_once(tmp_path, compiled, caplog):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        compiled(tmp_path / name)
        (tmp_path / name).chmod(0o777)
        assert compiled(tmp_path / name)
    (notice,) = [record.getMessage() for record in caplog.records]
    assert f"cannot be kept, so each run compiles them again (others may write to {tmp_path}/one)" in notice
    assert "set LOOKAHEAD_CACHE" in notice


def test_kernels_of_earlier_versions_are_removed(tmp_path, compiled, monkeypatch):
    compiled(tmp_path / "kernels")
    (kept,) = (tmp_path / "kernels").iterdir()
    stem, stamp, key = kept.name.rsplit("-", 2)
    older, beside = (kept.with_name(f"{stem}-{other}-{key}") for other in (stamp[::-1], stamp[::-1] + "0"))
    other = kept.with_name(f"not_{kept.name}")
    abandoned, fresh = kept.with_name(f"{kept.name}.1.tmp"), kept.with_name(f"{kept.name}.2.tmp")
    for each in (older, beside, other, abandoned, fresh):
        kept.rename(each) if each is older else each.touch()
    for each in (older, abandoned):
        os.utime(each, (0, 0))
    assert compiled(tmp_path / "kernels")  # an install of another version, whose kernels are new, shares the folder
    assert sorted((tmp_path / "kernels").iterdir()) == sorted([kept, beside, other, fresh])


def test_folder_is_trusted_only_if_nobody_else_can_change_it_or_one_above_it(tmp_path, monkeypatch):
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    assert folders.not_ours(inner) == ""
    (tmp_path / "link").symlink_to(tmp_path / "outer")
    assert folders.not_ours(tmp_path / "link" / "inner") == ""
    for mode, why in ((0o1777, ""), (0o777, f"others may write to {tmp_path}/outer"), (0o757, "others may write")):
        (tmp_path / "outer").chmod(mode)
        for path in (inner, tmp_path / "link" / "inner"):
            found = folders.not_ours(path)
            assert found.startswith(why) if why else found == ""
    (tmp_path / "outer").chmod(0o1777)
    assert folders.not_ours(tmp_path / "outer") == f"others may write to {tmp_path}/outer"  # sticky does for those above only
    (tmp_path / "outer").chmod(0o755)
    assert "No such file" in folders.not_ours(inner / "missing")
    (inner / "loop").symlink_to(inner / "loop")
    assert "too many links" in folders.not_ours(inner / "loop")
    (inner / "file").touch()
    assert folders.not_ours(inner / "file") == f"{inner}/file is not a folder"


def test_folder_of_another_user_is_not_trusted(tmp_path, monkeypatch):
    mine = os.stat(tmp_path).st_uid
    monkeypatch.setattr(os, "getuid", lambda: OTHER)
    found = folders.not_ours(tmp_path)
    assert found == "" if mine == 0 else "belongs to another user" in found  # what root writes everybody believes


@as_root
def test_what_another_user_has_planted_is_not_trusted(tmp_path):
    for name in ("own", "others"):
        (tmp_path / name).mkdir(mode=0o700)
    os.chown(tmp_path / "others", OTHER, OTHER)
    (tmp_path / "link").symlink_to(tmp_path / "own")
    os.lchown(tmp_path / "link", OTHER, OTHER)
    assert folders.not_ours(tmp_path / "own") == ""
    assert folders.not_ours(tmp_path / "others") == f"{tmp_path}/others belongs to another user"
    assert folders.not_ours(tmp_path / "link") == f"{tmp_path}/link belongs to another user"


def test_users_own_group_counts_as_the_user_and_no_other_group_does(tmp_path, monkeypatch):
    import grp
    import pwd
    from types import SimpleNamespace

    tmp_path.chmod(0o775)
    about, group = tmp_path.stat(), SimpleNamespace(gr_name="ada", gr_gid=1000, gr_mem=[])
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(pwd, "getpwuid", lambda number: SimpleNamespace(pw_name="ada", pw_uid=1000, pw_gid=1000))
    monkeypatch.setattr(grp, "getgrgid", lambda number: group)
    assert not folders.others_may_write(about)
    group.gr_mem = ["ada", "bob"]
    assert folders.others_may_write(about)
    group.gr_mem, group.gr_name = [], "staff"
    assert folders.others_may_write(about)

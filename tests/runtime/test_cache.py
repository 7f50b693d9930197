"""The disk cache: keys, one build per key, whole files, folders that cannot be written."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fuselab.errors import BuildError
from fuselab.runtime import cache


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("FUSELAB_CACHE", str(folder))
    cache._writable.cache_clear()
    return folder


def test_parts_of_a_key_do_not_run_together() -> None:
    assert cache.key("ab", "c") != cache.key("a", "bc")
    assert cache.key("a") != cache.key("a", "")
    assert cache.key(1, b"x") == cache.key("1", "x")


def test_a_key_is_built_once_and_then_read(empty_cache: Path) -> None:
    built = []

    def build(new: Path) -> None:
        built.append(new)
        new.write_bytes(b"content")

    first, second = (cache.fetch(cache.key("k"), ".bin", build) for _ in range(2))
    assert first == second
    assert first.read_bytes() == b"content"
    assert len(built) == 1
    assert [path for path in empty_cache.rglob("*") if path.is_file()] == [first]


def test_a_failed_build_leaves_nothing_and_is_tried_again(empty_cache: Path) -> None:
    def fail(new: Path) -> None:
        new.write_bytes(b"half")
        raise RuntimeError("compiler")

    with pytest.raises(RuntimeError, match="compiler"):
        cache.fetch(cache.key("k"), ".bin", fail)
    assert not [path for path in empty_cache.rglob("*") if path.is_file()]
    assert cache.fetch(cache.key("k"), ".bin", lambda new: new.write_bytes(b"1")).exists()


def test_a_full_disk_is_a_build_error_that_leaves_nothing(empty_cache: Path) -> None:
    def full(new: Path) -> None:
        new.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(BuildError, match=r"No space left on device.*FUSELAB_CACHE"):
        cache.fetch(cache.key("k"), ".bin", full)
    assert not [path for path in empty_cache.rglob("*") if path.is_file()]


def test_asking_makes_no_folder(empty_cache: Path) -> None:
    assert not cache.holds(cache.key("k"), ".bin")
    assert not empty_cache.exists()
    cache.fetch(cache.key("k"), ".bin", lambda new: new.write_bytes(b"1"))
    assert cache.holds(cache.key("k"), ".bin")


def test_a_folder_that_can_only_be_read_is_read(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = cache.fetch(cache.key("k"), ".bin", lambda new: new.write_bytes(b"1"))
    monkeypatch.setattr(cache, "_writable", lambda path: pytest.fail("asked to write"))
    assert cache.fetch(cache.key("k"), ".bin", lambda new: pytest.fail("built")) == kept


def test_two_threads_build_once() -> None:
    built = []

    def build(new: Path) -> None:
        time.sleep(0.1)
        built.append(new)
        new.write_bytes(b"x")

    threads = [
        threading.Thread(target=cache.fetch, args=(cache.key("t"), ".bin", build)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1


def test_two_processes_build_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = tmp_path / "worker.py"
    script.write_text(
        "import sys, time, pathlib\n"
        "from fuselab.runtime import cache\n"
        "def build(new):\n"
        f"    open({str(log)!r}, 'a').write('built\\n')\n"
        "    time.sleep(0.3)\n"
        "    new.write_bytes(b'x')\n"
        "cache.fetch(cache.key('p'), '.bin', build)\n"
    )
    workers = [subprocess.Popen([sys.executable, str(script)], env=child()) for _ in range(3)]
    assert [worker.wait() for worker in workers] == [0, 0, 0]
    assert log.read_text() == "built\n"


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    script = (
        "import pathlib, time\n"
        "from fuselab.runtime import cache\n"
        f"with cache.locked(pathlib.Path({str(tmp_path / 'lock')!r})):\n"
        "    print('held', flush=True)\n"
        "    time.sleep(600)\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, env=child(), stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        taken: list[bool] = []
        killed = threading.Event()

        def take() -> None:
            with cache.locked(tmp_path / "lock"):
                taken.append(killed.is_set())

        waiter = threading.Thread(target=take)
        waiter.start()
        waiter.join(0.2)
        assert waiter.is_alive()
        killed.set()
        holder.kill()
        holder.wait()
        waiter.join(60)
    assert taken == [True]
    assert not (tmp_path / "lock").exists()


def child() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def test_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FUSELAB_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.folder() == tmp_path / "xdg" / "fuselab"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.folder() == tmp_path / ".cache" / "fuselab"


def test_a_folder_that_cannot_be_made_gives_a_temporary_one_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FUSELAB_CACHE", str(tmp_path / "file" / "below"))
    with pytest.warns(UserWarning, match="Set FUSELAB_CACHE") as caught:
        first, second = cache.folder(), cache.folder()
    assert len(caught) == 1
    assert first == second
    assert cache.fetch(cache.key("k"), ".bin", lambda new: new.write_bytes(b"1")).exists()


def test_source_text_follows_local_headers(tmp_path: Path) -> None:
    source, header, deep = (tmp_path / name for name in ("a.cu", "b.h", "c.h"))
    source.write_text('#include <cstdint>\n#include "b.h"\nint a;')
    header.write_text('#pragma once\n  #  include "c.h"\n#include "a.cu"\n')
    deep.write_text("int deep;")
    before = cache.source_text(source)
    assert "int deep;" in before
    deep.write_text("int deeper;")
    assert cache.source_text(source) != before


def test_source_text_finds_headers_beside_the_first_file(tmp_path: Path) -> None:
    """As compilers do that are given its folder."""
    (tmp_path / "below").mkdir()
    source, header, shared = (tmp_path / name for name in ("a.cu", "below/b.h", "shared.h"))
    source.write_text('#include "below/b.h"\n')
    header.write_text('#include "shared.h"\n')
    shared.write_text("int first;")
    assert "int first;" in cache.source_text(source)
    (tmp_path / "below" / "shared.h").write_text("int nearer;")
    assert "int nearer;" in cache.source_text(source)
    assert "int first;" not in cache.source_text(source)


def test_source_text_finds_public_headers_under_the_same_name_from_any_folder(
    tmp_path: Path,
) -> None:
    public = tmp_path / "include"
    public.mkdir()
    (public / "shared.h").write_text("int shared;")
    texts = []
    for name in ("one", "deeper/other"):
        (tmp_path / name).mkdir(parents=True)
        source = tmp_path / name / "a.cpp"
        source.write_text('#include "shared.h"\n')
        assert "int shared;" not in cache.source_text(source)
        texts.append(cache.source_text(source, public))
    assert "int shared;" in texts[0]
    assert texts[0] == texts[1]

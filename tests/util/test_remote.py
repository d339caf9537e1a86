"""Objects of stores are read by ranges; failures are retried, lasting ones are one line."""

from __future__ import annotations

import gzip
import io
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("fsspec")

import numpy as np

from fcp_cli.errors import FcpError, ManifestError, UsageError
from fcp_cli.manifest.build import build_manifest
from fcp_cli.manifest.detect import SourceOptions, detect_kind, open_source
from fcp_cli.manifest.sources import named_source
from fcp_cli.util import remote
from fcp_cli.util.remote import RemotePath, data_path
from tests.manifest.stores import Faults, serving, store_of


@pytest.fixture(autouse=True)
def _without_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(remote, "_WAITS_SECONDS", (0.0,) * 4)
    remote.remembered_size.cache_clear()
    yield
    remote.remembered_size.cache_clear()


def remote_path(url: str) -> RemotePath:
    path = data_path(url)
    assert isinstance(path, RemotePath)
    return path


CONTENT = random.Random(0).randbytes(3_000_000)


def test_an_object_is_read_whole_through_errors_and_cut_connections() -> None:
    faults = Faults(errors=3, cuts=4)
    with serving(store_of({"/o": CONTENT}, faults)) as url, remote_path(f"{url}/o").open() as file:
        assert file.read() == CONTENT
        file.seek(1_000_001)
        assert file.read(100) == CONTENT[1_000_001:1_000_101]
    assert faults.failed > 3


def test_reads_in_order_fetch_growing_windows_and_a_lone_read_fetches_little() -> None:
    faults = Faults()
    with serving(store_of({"/o": CONTENT}, faults)) as url:
        with remote_path(f"{url}/o").open() as file:
            file.read(10)
        assert faults.served <= 1 << 17
        faults.served = faults.reads = 0
        with remote_path(f"{url}/o").open() as file:
            assert b"".join(iter(lambda: file.read(5000), b"")) == CONTENT
        assert faults.served == len(CONTENT)
        assert faults.reads < 8


def test_a_store_that_always_fails_is_one_line_after_five_attempts() -> None:
    faults = Faults(errors=1)
    lasting = pytest.raises(FcpError, match=r"cannot read http://.*/o: 500.*\(5 attempts\)")
    with serving(store_of({"/o": CONTENT}, faults)) as url, lasting:
        remote_path(f"{url}/o").open().read()
    assert faults.reads == 5


def test_an_object_that_is_missing_is_no_transient_failure() -> None:
    with serving(store_of({}, Faults())) as url:
        assert not remote_path(f"{url}/o").exists()
        with pytest.raises(ManifestError, match="there is no source http"):
            detect_kind(remote_path(f"{url}/o.jsonl"))


def test_an_object_that_shrinks_while_it_is_read_is_named() -> None:
    objects = {"/o": CONTENT}
    with serving(store_of(objects, Faults())) as url:
        file = remote_path(f"{url}/o").open()
        file.read(10)
        objects["/o"] = CONTENT[: 1 << 19]
        with pytest.raises(FcpError, match="it changed while it was read"):
            file.read()


LINES = b"".join(b'{"text": "%d %s"}\n' % (n, b"x" * (n % 50)) for n in range(40_000))


def built(source: str, output: Path, **options: Any) -> Path:
    path, files = named_source([source])
    build_manifest(open_source(path, detect_kind(path, files), SourceOptions(**options), files=files), output)
    return output


@pytest.mark.lengthy
def test_a_manifest_of_an_object_has_the_rows_of_the_file_through_faults(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(LINES)
    local = pq.read_table(built(str(tmp_path / "d.jsonl"), tmp_path / "local.parquet"))
    faults = Faults(errors=3, cuts=5)
    with serving(store_of({"/d.jsonl": LINES, "/d.jsonl.gz": gzip.compress(LINES)}, faults)) as url:
        there = pq.read_table(built(f"{url}/d.jsonl", tmp_path / "there.parquet"))
        packed = pq.read_table(built(f"{url}/d.jsonl.gz", tmp_path / "packed.parquet"))
    assert faults.failed > 1
    assert there.equals(local)
    assert packed.equals(local)


def test_an_object_that_is_replaced_while_it_is_read_leaves_no_manifest(tmp_path: Path) -> None:
    objects = {"/d.jsonl": LINES}
    reads = []

    def replace(name: str) -> None:
        reads.append(name)
        if len(reads) == 5:  # after those of the first records
            objects["/d.jsonl"] = LINES.replace(b"xx", b"yy")

    refused = pytest.raises(ManifestError, match="changed while it was read; build again")
    with serving(store_of(objects, Faults(), replace)) as url, refused:
        built(f"{url}/d.jsonl", tmp_path / "m.parquet")
    assert not list(tmp_path.iterdir())


def test_only_the_column_of_a_parquet_object_is_fetched(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).bytes(4_000_000)
    other = [numbers[at : at + 4000] for at in range(0, len(numbers), 4000)]
    table = pa.table({"text": ["a b " * (n % 9) for n in range(1000)], "other": other})
    stream = io.BytesIO()
    pq.write_table(table, stream, row_group_size=100)
    faults = Faults()
    with serving(store_of({"/t.parquet": stream.getvalue()}, faults)) as url:
        manifest = pq.read_table(built(f"{url}/t.parquet", tmp_path / "m.parquet"))
    assert manifest.column("length").to_pylist() == [4 * (n % 9) for n in range(1000) if n % 9]
    assert faults.served < len(stream.getvalue()) / 10


def test_a_store_without_its_driver_is_named_with_the_command() -> None:
    with pytest.raises(FcpError, match=r"cannot read gs://b/x.jsonl: its store needs gcsfs: pip install gcsfs"):
        data_path("gs://b/x.jsonl").exists()
    with pytest.raises(FcpError, match="cannot read nowhere://b/x: Protocol not known"):
        data_path("nowhere://b/x").exists()


def test_urls_keep_their_form_as_paths() -> None:
    path = data_path("s3://bucket/a/b.jsonl.zst")
    assert str(path) == "s3://bucket/a/b.jsonl.zst"
    assert str(path.parent / "c") == "s3://bucket/a/c"
    assert path.suffix == ".zst"
    assert data_path("file:///tmp/x") == Path("/tmp/x")
    assert data_path(path) is not None and hash(data_path(str(path))) == hash(path)


@pytest.mark.parametrize("words", [["a.jsonl", "*.jsonl"], ["a.jsonl", "a.jsonl"]])
def test_a_file_that_is_named_twice_is_refused(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("1\n")
    with pytest.raises(UsageError, match=r"a.jsonl is named twice"):
        named_source(words)
    path, files = named_source(["b.jsonl", "a.jsonl"])
    assert (path, [file.name for file in files]) == (tmp_path, ["b.jsonl", "a.jsonl"])


def test_what_is_listed_keeps_the_scheme_that_was_given() -> None:
    import fsspec
    from fsspec.implementations.memory import MemoryFileSystem

    class TwoNames(MemoryFileSystem):  # type: ignore[misc]  # as those of Azure and Google
        protocol = ("first", "second")
        store: dict[str, Any] = {}  # noqa: RUF012
        pseudo_dirs = [""]  # noqa: RUF012

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return str(MemoryFileSystem._strip_protocol(path.replace("second://", "memory://")))

    fsspec.register_implementation("second", TwoNames)
    TwoNames().pipe("/d/a.jsonl", b"{}")
    folder = remote_path("second://d")
    assert list(map(str, folder.iterdir())) == list(map(str, folder.glob("*.jsonl"))) == ["second://d/a.jsonl"]

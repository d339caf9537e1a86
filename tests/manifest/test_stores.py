"""A real server of S3, and Azure's emulator, behind a proxy that fails: nothing is lost, nothing is twice.

Run by `make test-stores`.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.manifest.datasets import tar, write_tokenizer, zstd
from tests.manifest.stores import Faults, failing_proxy
from tests.ports import unused_port

pytestmark = pytest.mark.stores

RECORDS = [{"text": "a b " * (n % 60) + str(n), "n": n} for n in range(60_000)]
LINES = b"".join(json.dumps(record).encode() + b"\n" for record in RECORDS)
_LIMIT_SECONDS = 240.0


def table(records: list[dict[str, Any]]) -> bytes:
    stream = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(records), stream, row_group_size=2000)
    return stream.getvalue()


def objects() -> dict[str, bytes]:
    """The records in every form, in three shards each, by the names of their objects."""
    third, forms = len(RECORDS) // 3, dict[str, bytes]()
    for shard in range(3):
        own = RECORDS[shard * third : (shard + 1) * third]
        lines = b"".join(json.dumps(record).encode() + b"\n" for record in own)
        cut = lines.index(b"\n", len(lines) // 2)
        forms |= {
            f"plain/{shard}.jsonl": lines,
            f"zst/{shard}.jsonl.zst": zstd(lines),
            f"gz/{shard}.jsonl.gz": gzip.compress(lines, 1),
            f"parquet/{shard}.parquet": table(own),
            f"tars/{shard}.tar": tar({"a.jsonl": lines[:cut], "b.jsonl": lines[cut + 1 :]}),  # no end of the last line
        }
    return forms


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer(port=0, verbose=False)
    moto.start()
    _, port = moto.get_host_and_port()
    yield int(port)
    moto.stop()


@pytest.fixture(scope="module")
def bucket(server: int) -> Any:
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{server}",
        region_name="us-east-1",
        aws_access_key_id="key",
        aws_secret_access_key="secret",
    )
    client.create_bucket(Bucket="data")
    for name, content in objects().items():
        client.put_object(Bucket="data", Key=name, Body=content)
    return client


def fcp(words: list[str], environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, **(environment or {})}
    command = [sys.executable, "-m", "fcp_cli", *words]
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False)


def of_store(url: str) -> dict[str, str]:
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    return {**keys, "AWS_ENDPOINT_URL": url}


@pytest.mark.parametrize(
    ("words", "workers"),
    [
        (["s3://data/plain"], 1),
        (["s3://data/plain/*.jsonl"], 2),
        (["s3://data/zst/*.jsonl.zst"], 2),
        ([f"s3://data/gz/{shard}.jsonl.gz" for shard in range(3)], 2),
        (["s3://data/parquet/"], 2),
        (["s3://data/tars"], 2),
    ],
    ids=["prefix", "glob", "zst", "listed gz", "parquet", "tars of JSON lines"],
)
def test_every_sequence_of_a_store_that_fails_is_counted_once(
    tmp_path: Path, server: int, bucket: Any, words: list[str], workers: int
) -> None:
    faults = Faults(errors=7, cuts=5)
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")
    with failing_proxy(server, faults) as url:
        build = ["manifest", "build", *words, "--tokenizer", str(tokenizer), "--workers", str(workers)]
        done = fcp([*build, "-o", str(tmp_path / "m.parquet")], of_store(url))
    assert done.returncode == 0, done.stderr
    assert faults.failed >= 1
    assert_counted_as_here(tmp_path, tokenizer)


def assert_counted_as_here(folder: Path, tokenizer: Path) -> None:
    """The manifest `m.parquet` has the lengths of a build from one local file."""
    found = pq.read_table(folder / "m.parquet").column("length").to_pylist()
    (folder / "all.jsonl").write_bytes(LINES)
    build = ["manifest", "build", str(folder / "all.jsonl"), "--tokenizer", str(tokenizer)]
    local = fcp([*build, "-o", str(folder / "l.parquet")])
    assert local.returncode == 0, local.stderr
    assert found == pq.read_table(folder / "l.parquet").column("length").to_pylist()


def test_tokens_are_read_again_from_the_store(
    tmp_path: Path, server: int, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fcp_cli.manifest.tokens import open_tokens

    for name, value in of_store(f"http://127.0.0.1:{server}").items():
        monkeypatch.setenv(name, value)
    for form in ("plain", "zst", "tars", "parquet"):
        done = fcp(["manifest", "build", f"s3://data/{form}", "-o", str(tmp_path / f"{form}.parquet")], {})
        assert done.returncode == 0, done.stderr
        tokens: Any = open_tokens(tmp_path / f"{form}.parquet")
        for row in random.Random(0).sample(range(len(RECORDS)), 20):
            assert bytes(tokens(row).astype("u1")) == str(RECORDS[row]["text"]).encode()


def test_missing_keys_and_buckets_are_one_line(tmp_path: Path, server: int, bucket: Any) -> None:
    environment = of_store(f"http://127.0.0.1:{server}")
    output = str(tmp_path / "m.parquet")
    for words, message in [
        (["s3://data/none.jsonl"], "error: there is no source s3://data/none.jsonl"),
        (["s3://data/none/*.jsonl"], "error: no file matches s3://data/none/*.jsonl"),
        (["s3://data/plain/0.jsonl", "s3://data/plain/9.jsonl"], "error: there is no source s3://data/plain/9.jsonl"),
    ]:
        done = fcp(["manifest", "build", *words, "-o", output], environment)
        assert (done.returncode, done.stderr.splitlines()[-1]) == (1, message)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def azure() -> Iterator[int]:
    """The port of Azurite, Azure's own emulator, with the same objects."""
    from azure.storage.blob import BlobServiceClient

    program = Path(sys.prefix) / "node_modules" / ".bin" / "azurite-blob"
    if not program.exists():
        pytest.skip("azurite is not installed; make test-stores installs it where npm is")
    port = unused_port()
    command = [str(program), "--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--blobPort", str(port)]
    with subprocess.Popen(command, env={**os.environ, "AZURITE_ACCOUNTS": "account:a2V5"}) as emulator:
        try:
            settings = of_azure(f"http://127.0.0.1:{port}")["AZURE_STORAGE_CONNECTION_STRING"]
            wait_for(lambda: port_answers(port))
            with BlobServiceClient.from_connection_string(settings) as client:
                container = client.create_container("data")
                for name, content in objects().items():
                    container.upload_blob(name, content)
            yield port
        finally:
            emulator.terminate()


def of_azure(url: str) -> dict[str, str]:
    account = "DefaultEndpointsProtocol=http;AccountName=account;AccountKey=a2V5"
    return {"AZURE_STORAGE_CONNECTION_STRING": f"{account};BlobEndpoint={url}/account;"}


def port_answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


# Azure's client itself waits 15 seconds and more after each error: few requests may meet one.
@pytest.mark.parametrize(
    ("url", "faults"),
    [
        ("az://data/plain/*.jsonl", Faults(errors=7, cuts=5)),
        ("az://data/zst/", Faults(errors=7, cuts=5)),
        ("az://data/parquet", Faults()),
    ],
)
def test_every_sequence_of_azure_is_counted_once_and_read_again(
    tmp_path: Path, azure: int, url: str, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fcp_cli.manifest.tokens import open_tokens

    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")
    with failing_proxy(azure, faults) as endpoint:
        build = ["manifest", "build", url, "--tokenizer", str(tokenizer), "--workers", "2"]
        done = fcp([*build, "-o", str(tmp_path / "m.parquet")], of_azure(endpoint))
    assert done.returncode == 0, done.stderr
    assert (faults.failed >= 1) == (faults.errors > 0)
    assert_counted_as_here(tmp_path, tokenizer)
    for name, value in of_azure(f"http://127.0.0.1:{azure}").items():
        monkeypatch.setenv(name, value)
    tokens: Any = open_tokens(tmp_path / "m.parquet")
    local: Any = open_tokens(tmp_path / "l.parquet")
    for row in (0, 20_001, 59_000):
        assert tokens(row).tolist() == local(row).tolist()


def test_what_is_missing_in_azure_is_one_line(tmp_path: Path, azure: int) -> None:
    environment, output = of_azure(f"http://127.0.0.1:{azure}"), str(tmp_path / "m.parquet")
    for url in ("az://data/none.jsonl", "az://nothing/d.jsonl"):
        done = fcp(["manifest", "build", url, "-o", output], environment)
        assert (done.returncode, done.stderr.splitlines()[-1]) == (1, f"error: there is no source {url}")
    assert not list(tmp_path.iterdir())


def wait_for(condition: Callable[[], Any]) -> Any:
    ends = time.monotonic() + _LIMIT_SECONDS
    while time.monotonic() < ends:
        if found := condition():
            return found
        time.sleep(0.02)
    raise TimeoutError

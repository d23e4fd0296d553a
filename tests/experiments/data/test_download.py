"""Downloads from a local server: whole, damaged, broken off, and not twice."""

import http.server
import io
import tarfile
import threading
import time
import zipfile
from dataclasses import replace

import pytest

from bsam.experiments.data import download, load
from tests.experiments.data.synthetic import assert_same, make, md5


class Server(http.server.ThreadingHTTPServer):
    """Serves `files` by name; of each it may send only half, a number of times, or something else."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.halves, self.requests = {}, {}, []
        self.url = f"http://127.0.0.1:{self.server_address[1]}/"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        name = self.path[1:]
        self.server.requests.append(name)
        if name not in self.server.files:
            self.send_error(404)
            return
        content = self.server.files[name]
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.server.halves.get(name, 0):
            self.server.halves[name] -= 1
            content = content[: len(content) // 2]
        self.wfile.write(content)  # and the connection is closed

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between two tries
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def tar_of(folder):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        tar.add(folder, folder.name)
    return file.getvalue()


def zip_of(folder):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for path in folder.rglob("*"):
            archive.write(path, path.relative_to(folder.parent))
    return file.getvalue()


@pytest.fixture
def official(server, register, tmp_path):
    """Put a data set on the server, and its entry into the table."""

    def put(name, change=lambda content: content):
        made = make(name, tmp_path / "origin")
        info, origin = made.info, tmp_path / "origin"
        if name == "mnist":
            contents = {path: (origin / path).read_bytes() for path in info.urls}
        else:
            pack = zip_of if name == "tinyimagenet" else tar_of
            contents = {path: change(pack(origin / info.folder)) for path in info.urls}
        for path, content in contents.items():
            server.files[path.split("/")[-1]] = content
        made.info = replace(
            info,
            urls={path: server.url + path.split("/")[-1] for path in contents},
            md5={**info.md5, **{path: md5(content) for path, content in contents.items()}},
        )
        register(made.info)
        return made

    return put


def listing(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


SETS = ("mnist", "cifar10", "cifar100", "tinyimagenet")


@pytest.mark.parametrize("name", SETS)
def test_downloads_once(name, official, server, tmp_path):
    made, folder = official(name), tmp_path / "data"
    assert_same(load(name, folder), made)
    assert len(server.requests) == len(made.info.urls)
    before = listing(folder)
    assert [path for path in before if path.split("/")[-1].startswith((".", "tmp"))] == []
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in folder.rglob("*"))
    server.requests.clear()
    assert_same(load(name, folder), made)
    assert server.requests == []
    assert listing(folder) == before


@pytest.mark.parametrize("name", SETS)
def test_a_damaged_download_leaves_nothing(name, official, server, tmp_path):
    made, folder = official(name), tmp_path / "data"
    last = list(made.info.urls)[-1]
    served = last.split("/")[-1]
    whole = server.files[served]
    server.files[served] = whole[:-1] + bytes([whole[-1] ^ 1])
    with pytest.raises(ValueError, match=rf"{folder / last} .*{served}: what arrived does not have the md5"):
        load(name, folder)
    assert server.requests.count(served) == 1 + download.RETRIES
    assert listing(folder) == sorted(list(made.info.urls)[:-1])  # the files that did arrive
    server.files[served] = whole
    assert_same(load(name, folder), made)


@pytest.mark.parametrize("name", SETS)
def test_a_broken_connection_is_tried_again(name, official, server, tmp_path):
    made, folder = official(name), tmp_path / "data"
    served = next(iter(server.files))
    server.halves[served] = 2
    assert_same(load(name, folder), made)
    assert server.requests.count(served) == 3


def test_a_connection_that_always_breaks(official, server, tmp_path):
    made, folder = official("cifar10"), tmp_path / "data"
    server.halves["cifar-10-python.tar.gz"] = 100
    with pytest.raises(ConnectionError, match=r"the connection to 127\.0\.0\.1:\d+ failed or broke"):
        load("cifar10", folder)
    assert listing(folder) == []
    server.halves.clear()
    assert_same(load("cifar10", folder), made)


def test_a_server_that_refuses(official, server, tmp_path):
    official("mnist")
    server.files.clear()
    with pytest.raises(ConnectionError, match=r"the server answered: 404 .*--data DIR or BSAM_DATA=DIR\.$"):
        load("mnist", tmp_path / "data")


def test_no_network_and_no_data_is_one_sentence(official, register, tmp_path):
    info = official("mnist").info
    register(replace(info, urls=dict.fromkeys(info.urls, "http://127.0.0.1:9/nobody")))
    with pytest.raises(ConnectionError) as caught:
        load("mnist", tmp_path / "data")
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    assert "train-images-idx3-ubyte.gz is not there, or damaged, and cannot be downloaded" in message


def test_a_folder_that_cannot_be_made(official, tmp_path):
    official("cifar10")
    (tmp_path / "data").write_text("a file")
    with pytest.raises(OSError, match=r"cannot be downloaded .*data"):
        load("cifar10", tmp_path / "data")


def test_an_archive_that_is_there_is_used(official, server, tmp_path):
    made, folder = official("cifar100"), tmp_path / "data"
    folder.mkdir()
    (folder / "cifar-100-python.tar.gz").write_bytes(server.files["cifar-100-python.tar.gz"])
    assert_same(load("cifar100", folder), made)
    assert server.requests == []


def test_a_torn_archive_is_replaced(official, server, tmp_path):
    made, folder = official("cifar100"), tmp_path / "data"
    folder.mkdir()
    (folder / "cifar-100-python.tar.gz").write_bytes(server.files["cifar-100-python.tar.gz"][:100])
    assert_same(load("cifar100", folder), made)


def test_what_is_there_is_never_replaced(official, server, tmp_path):
    made, folder = official("mnist"), tmp_path / "data"
    path = folder / made.info.train_files[0]
    path.parent.mkdir(parents=True)
    path.write_bytes(b"mine")
    with pytest.raises(ValueError, match=f"{path} is torn"):
        load("mnist", folder)
    assert path.read_bytes() == b"mine"


def test_without_download_nothing_is_asked_for(official, server, tmp_path):
    official("cifar10")
    with pytest.raises(FileNotFoundError, match="data_batch_1 is missing"):
        load("cifar10", tmp_path / "data", download=False)
    assert server.requests == []


# ------------------------------------------------------------------ archives


def tar_with(name, content=b"", **attributes):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        entry = tarfile.TarInfo(name)
        entry.size = len(content)
        for key, value in attributes.items():
            setattr(entry, key, value)
        tar.addfile(entry, io.BytesIO(content))
    return file.getvalue()


def zip_with(name):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, b"x")
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "archive"),
    [
        ("cifar10", tar_with("../outside", b"x")),
        ("cifar10", tar_with("cifar-10-batches-py/data_batch_1", type=tarfile.SYMTYPE, linkname="/etc/passwd")),
        ("cifar10", tar_with("cifar-10-batches-py/device", type=tarfile.CHRTYPE)),
        ("cifar10", tar_with("cifar-10-batches-py/data_batch_1", b"x" * 1000)[:-30]),
        ("cifar10", b"no archive"),
        ("tinyimagenet", zip_with("../outside")),
        ("tinyimagenet", zip_with("/outside")),
        ("tinyimagenet", zip_with("a\\..\\outside")),
        ("tinyimagenet", b"no archive"),
    ],
)
def test_archives_write_only_into_their_folder(name, archive, official, tmp_path):
    official(name, lambda content: archive)
    folder = tmp_path / "data"
    with pytest.raises(ValueError, match=r"(\.tar\.gz|\.zip) cannot be unpacked"):
        load(name, folder)
    assert len(listing(folder)) == 1  # the archive
    assert not (tmp_path / "outside").exists()


@pytest.mark.parametrize(("name", "archive"), [("cifar10", tar_with("other/file")), ("tinyimagenet", zip_with("a/b"))])
def test_archives_must_hold_the_folder(name, archive, official, tmp_path):
    official(name, lambda content: archive)
    with pytest.raises(ValueError, match="holds no folder"):
        load(name, tmp_path / "data")
    assert len(listing(tmp_path / "data")) == 1


def test_two_processes_may_unpack_at_once(official, tmp_path, monkeypatch):
    made, folder = official("cifar10"), tmp_path / "data"
    extract = tarfile.TarFile.extractall

    def slow(self, path, **options):
        extract(self, path, **options)
        if not (folder / "cifar-10-batches-py").exists():  # meanwhile, another one
            extract(self, folder, **options)

    monkeypatch.setattr(tarfile.TarFile, "extractall", slow)
    assert_same(load("cifar10", folder), made)
    assert [path.name for path in folder.glob(".*")] == []

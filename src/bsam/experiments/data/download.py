"""The folder of the data sets, and downloads into it.

A download has a temporary name until it is complete and its md5 is checked. A failed download is tried again. Archives
are kept, as torchvision does, and unpacked into a temporary folder that is then renamed: a folder with the final name
is complete. Without network, copy the official archive into the data folder.
"""

from __future__ import annotations

import contextlib
import os
import tarfile
import zipfile
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from bsam.experiments.data.progress import ProgressBar
from bsam.experiments.data.table import DatasetInfo

__all__ = ["data_folder", "fetch"]

RETRIES = 3
"""Number of times that a failed download is tried again."""


def data_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """Return `folder`, else the environment variable BSAM_DATA, else a folder in the user's cache."""
    chosen = folder or os.environ.get("BSAM_DATA")
    if not chosen:
        import pooch  # type: ignore[import-untyped]

        chosen = pooch.os_cache("bsam")
    return Path(chosen).expanduser()


def fetch(info: DatasetInfo, folder: Path, *, test_only: bool = False) -> None:
    """Download missing files. Existing ones are not touched, even if they are wrong, but for an archive that is torn.

    Args:
        info: The data set.
        folder: The folder of all data sets.
        test_only: Leave out files that only the training set needs. An archive is downloaded whole.
    """
    for name, url in info.urls.items():
        path = folder / name
        if name.endswith((".tar.gz", ".zip")):
            if not (folder / info.folder).exists():
                _download(url, path, info.md5[name])
                try:
                    _unpack(path, folder / info.folder)
                except PermissionError as error:
                    raise PermissionError(
                        f"{folder} may not be written, so {path.name} cannot be unpacked there. Name another folder "
                        "with --data DIR or BSAM_DATA=DIR, or unpack it as somebody who may write there."
                    ) from error
        elif test_only and name in info.train_files:
            continue
        elif not path.exists() and not path.with_suffix("").exists():  # torchvision keeps the unpacked file beside it
            _download(url, path, info.md5[name])


def _download(url: str, path: Path, md5: str) -> None:
    """Download a file, unless it exists with this md5."""
    import pooch
    import requests

    pooch.get_logger().setLevel("WARNING")  # the progress bar is enough
    if path.is_file() and pooch.file_hash(str(path), alg="md5") == md5:
        return
    try:
        store = pooch.create(
            path.parent, base_url="", registry={path.name: f"md5:{md5}"}, urls={path.name: url}, retry_if_failed=RETRIES
        )
        with ProgressBar(f"downloading {path.name}") as bar:
            store.fetch(path.name, downloader=pooch.HTTPDownloader(progressbar=bar, chunk_size=1 << 20))
    except requests.HTTPError as error:
        raise ConnectionError(_advice(path, url, f"the server answered: {error}")) from error
    except requests.RequestException as error:
        cause = f"the connection to {urlsplit(url).netloc} failed or broke ({type(error).__name__})"
        raise ConnectionError(_advice(path, url, cause)) from error
    except ValueError as error:
        raise ValueError(_advice(path, url, f"what arrived does not have the md5 {md5}")) from error
    except OSError as error:
        raise OSError(_advice(path, url, str(error))) from error
    with contextlib.suppress(PermissionError):  # the file belongs to another user
        path.chmod(0o644)  # pooch leaves a file that only its owner may read


def _advice(path: Path, url: str, cause: str) -> str:
    return (
        f"{path} is not there, or damaged, and cannot be downloaded from {url}: {cause}. Try again later, copy the "
        "file there, or name a folder that holds the data with --data DIR or BSAM_DATA=DIR."
    )


def _unpack(archive: Path, target: Path) -> None:
    """Unpack the archive's folder with the name of `target` to `target`."""
    with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as temporary:
        try:
            if archive.suffix == ".zip":
                _unzip(archive, temporary)
            else:
                with tarfile.open(archive) as tar:
                    tar.extractall(temporary, filter="data")
        except (tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
            raise ValueError(f"{archive} cannot be unpacked: {error}. Delete it and load again.") from error
        unpacked = Path(temporary, target.name)
        if not unpacked.is_dir():
            raise ValueError(f"{archive} holds no folder {target.name}: is it the official archive?")
        try:
            unpacked.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was faster
                raise


def _unzip(archive: Path, folder: str) -> None:
    with zipfile.ZipFile(archive) as file:
        names = file.namelist()
        for name in names:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\\" in name:
                raise zipfile.BadZipFile(f"it would write {name!r} outside of its folder")
        with ProgressBar(f"unpacking {archive.name}", len(names)) as bar:
            for name in names:
                file.extract(name, folder)
                bar.update()

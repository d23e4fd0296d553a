"""The table of data sets: sizes, files, md5 sums and addresses.

Files are in the data folder as torchvision lays them out, so one folder serves both. The table has the published md5
of every file; of TinyImageNet, with 110,000 images, that of the archive.

Means and standard deviations are those of the authors' code (see Möllenhoff and Khan, 2023). The MNIST sets are only
scaled to [0, 1]: mean 0, standard deviation 1. The sets with “-standardised” have the mean and the standard deviation
of all pixels of their training images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

__all__ = ["DATASETS", "DatasetInfo"]


@dataclass(frozen=True)
class DatasetInfo:
    """One data set."""

    name: str
    num_classes: int
    image_shape: tuple[int, ...]
    """Shape of one image (channels, height, width), or of one input that is no image."""
    num_train: int
    num_test: int = 10_000
    scale: float = 255
    """A network sees the raw values divided by `scale`, and then normalised by `mean` and `std`."""
    mean: tuple[float, ...] = (0.0,)
    """One number per channel."""
    std: tuple[float, ...] = (1.0,)
    folder: str = ""
    """Folder inside the data folder."""
    train_files: tuple[str, ...] = ()
    test_files: tuple[str, ...] = ()
    urls: Mapping[str, str] = field(default_factory=dict)
    """Addresses by path inside the data folder: of files, or of an archive that holds `folder`."""
    md5: Mapping[str, str] = field(default_factory=dict)
    """md5 by path inside the data folder."""


def _mnist(name: str, folder: str, url: str, md5: dict[str, tuple[str, str]]) -> DatasetInfo:
    """Describe a data set in MNIST's format; `md5` has the sums of each file, compressed and uncompressed."""
    files = {f"{folder}/{file}": file for file in md5}
    train_images, train_labels, test_images, test_labels = (f"{path}.gz" for path in files)
    return DatasetInfo(
        name,
        num_classes=10,
        image_shape=(1, 28, 28),
        num_train=60_000,
        folder=folder,
        train_files=(train_images, train_labels),
        test_files=(test_images, test_labels),
        urls={f"{path}.gz": f"{url}{file}.gz" for path, file in files.items()},
        md5={
            **{f"{path}.gz": md5[file][0] for path, file in files.items()},
            **{path: md5[file][1] for path, file in files.items()},
        },
    )


_MNIST = _mnist(
    "mnist",
    "MNIST/raw",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",  # PyTorch's mirror; yann.lecun.com refuses downloads
    {
        "train-images-idx3-ubyte": ("f68b3c2dcbeaaa9fbdd348bbdeb94873", "6bbc9ace898e44ae57da46a324031adb"),
        "train-labels-idx1-ubyte": ("d53e105ee54ea40749a09fcbcd1e9432", "a25bea736e30d166cdddb491f175f624"),
        "t10k-images-idx3-ubyte": ("9fb629c4189551a2d022fa330f9573f3", "2646ac647ad5339dbf082846283269ea"),
        "t10k-labels-idx1-ubyte": ("ec29112dd5afa0611ce80d1b7f02629c", "27ae3e4e09519cfbb04c329615203637"),
    },
)

_FASHION = _mnist(
    "fashionmnist",
    "FashionMNIST/raw",
    # The authors' repository: the address that their page names is served without encryption only.
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    {
        "train-images-idx3-ubyte": ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "f4a8712d7a061bf5bd6d2ca38dc4d50a"),
        "train-labels-idx1-ubyte": ("25c81989df183df01b3e8a0aad5dffbe", "9018921c3c673c538a1fc5bad174d6f9"),
        "t10k-images-idx3-ubyte": ("bef4ecab320f06d8554ea6380940ec79", "8181f5470baa50b63fa0f6fddb340f0a"),
        "t10k-labels-idx1-ubyte": ("bb300cfdad3c16e7a12a480ee83cd310", "15d484375f8d13e6eb1aabb0c3f46965"),
    },
)

_ALL = (
    _MNIST,
    _FASHION,
    DatasetInfo(
        "cifar10",
        num_classes=10,
        image_shape=(3, 32, 32),
        num_train=50_000,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2023, 0.1994, 0.2010),
        folder="cifar-10-batches-py",
        train_files=tuple(f"cifar-10-batches-py/data_batch_{i}" for i in range(1, 6)),
        test_files=("cifar-10-batches-py/test_batch",),
        urls={"cifar-10-python.tar.gz": "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"},
        md5={
            "cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a",
            "cifar-10-batches-py/data_batch_1": "c99cafc152244af753f735de768cd75f",
            "cifar-10-batches-py/data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
            "cifar-10-batches-py/data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
            "cifar-10-batches-py/data_batch_4": "634d18415352ddfa80567beed471001a",
            "cifar-10-batches-py/data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
            "cifar-10-batches-py/test_batch": "40351d587109b95175f43aff81a1287e",
        },
    ),
    DatasetInfo(
        "cifar100",
        num_classes=100,
        image_shape=(3, 32, 32),
        num_train=50_000,
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2761),
        folder="cifar-100-python",
        train_files=("cifar-100-python/train",),
        test_files=("cifar-100-python/test",),
        urls={"cifar-100-python.tar.gz": "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz"},
        md5={
            "cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85",
            "cifar-100-python/train": "16019d7e3df5f24257cddd939b257f8d",
            "cifar-100-python/test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
        },
    ),
    DatasetInfo(
        "tinyimagenet",
        num_classes=200,
        image_shape=(3, 64, 64),
        num_train=100_000,
        num_test=10_000,  # the validation images: the labels of its test images were never published
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        folder="tiny-imagenet-200",
        urls={"tiny-imagenet-200.zip": "https://cs231n.stanford.edu/tiny-imagenet-200.zip"},
        md5={"tiny-imagenet-200.zip": "90528d7ca1a48142e341f4ef8d21d0de"},
    ),
    replace(_MNIST, name="mnist-standardised", mean=(0.1307,), std=(0.3081,)),
    replace(_FASHION, name="fashionmnist-standardised", mean=(0.2860,), std=(0.3530,)),
    DatasetInfo("digits", num_classes=10, image_shape=(1, 8, 8), num_train=997, num_test=800, scale=16),
    DatasetInfo("moons", 2, (2,), num_train=100, num_test=1000, scale=1, mean=(0.0, 0.0), std=(1.0, 1.0)),
)

DATASETS: dict[str, DatasetInfo] = {info.name: info for info in _ALL}
"""Data sets by name; digits and moons come with scikit-learn and need no files."""

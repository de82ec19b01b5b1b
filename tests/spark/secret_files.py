"""Files of secrets, as options of Spark name them."""

from __future__ import annotations

from pathlib import Path

from tests.cluster.inside import SECRET


def secret_file(directory: Path, secret: bytes, name: str = "password") -> str:
    """Make a file that has a secret, and return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / name
    file.write_bytes(secret)
    return str(file)


def cluster_options(url: str, directory: Path | None = None) -> dict[str, str]:
    """Return the options that name a cluster, and its secret.

    Args:
        url: The metadata store.
        directory: Where the file of the secret is made; None for the directory of the metadata, if they are in one.
    """
    if directory is None:
        assert url.startswith("lmdb://"), f"{url} is in no directory; give one for the file of the secret"
        directory = Path(url.removeprefix("lmdb://")).parent
    return {"metadataUri": url, "clusterSecretFile": secret_file(directory, SECRET, "cluster-secret")}

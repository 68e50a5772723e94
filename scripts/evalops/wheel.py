"""Builds the wheel of the `evalworker` that this process runs, whether it comes from a checkout or from an installed package.

Called when code is shipped to workers. The same files give the same bytes; the wheel is stored under the package's fingerprint, once.
"""

import base64
import hashlib
import importlib.metadata
import io
import zipfile

from evalops.locks import worker_requirements
from evalworker import wheel
from evalworker.contract import layout
from evalworker.storage import AlreadyExists, Storage

DISTRIBUTION = "inspect_fleet"


def build() -> bytes:
    """The wheel: the package, and metadata with what it requires and its entry points."""
    version = importlib.metadata.version("inspect-fleet")
    info = f"{DISTRIBUTION}-{version}.dist-info"
    required = "".join(f"Requires-Dist: {line}\n" for line in worker_requirements())
    files = {name: path.read_bytes() for name, path in wheel.files_of()} | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: inspect-fleet\nVersion: {version}\n{required}".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: inspect-fleet\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": b"[inspect_ai]\ninspect_fleet = evalworker.scripted\n",
    }
    record = "".join(f"{name},sha256={_hash(body)},{len(body)}\n" for name, body in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in files.items():
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, body)
    return packed.getvalue()


def ship(storage: Storage) -> str:
    """Store the wheel, unless it is there already, and return the package's fingerprint."""
    digest = wheel.digest()
    if not storage.exists(layout.wheel(digest)):
        try:
            storage.create(layout.wheel(digest), build())
        except AlreadyExists:  # somebody submits from the same checkout at this moment
            pass
    return digest


def _hash(body: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(body).digest()).rstrip(b"=").decode()

"""The system's certificate authorities as a Java key store, for the Java runtime from PyPI.

That runtime does not know the authority of a company's proxy. The format is that of
`sun.security.provider.JavaKeyStore`, version 2, with trusted certificates only.
"""

from __future__ import annotations

import hashlib
import os
import ssl
import struct
from pathlib import Path

_BUNDLES = [
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Ubuntu, Alpine
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora, Red Hat
    "/etc/ssl/ca-bundle.pem",  # SUSE
]
_PASSWORD = "changeit"  # Java's default: it guards against damage, a list of authorities is no secret


def write_trust_store(path: Path) -> list[str]:
    """Write the store to *path*, and return Java's options for it: none if the system has no bundle."""
    bundle = system_bundle()
    if not bundle:
        return []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(bundle)
    path.write_bytes(key_store(context.get_ca_certs(binary_form=True)))
    return [f"-Djavax.net.ssl.trustStore={path}", "-Djavax.net.ssl.trustStoreType=JKS"]


def system_bundle() -> str | None:
    paths = [os.environ.get("SSL_CERT_FILE"), ssl.get_default_verify_paths().cafile, *_BUNDLES]
    return next((path for path in paths if path and Path(path).is_file()), None)


def key_store(certificates: list[bytes]) -> bytes:
    """A Java key store that trusts these certificates, in DER."""
    entries = b"".join(
        struct.pack(">I", 2) + _utf(f"authority-{n}") + struct.pack(">Q", 0) + _utf("X.509") + _sized(certificate)
        for n, certificate in enumerate(certificates)
    )
    store = struct.pack(">III", 0xFEEDFEED, 2, len(certificates)) + entries
    return store + hashlib.sha1(_PASSWORD.encode("utf-16-be") + b"Mighty Aphrodite" + store).digest()


def _utf(text: str) -> bytes:
    return struct.pack(">H", len(text)) + text.encode("ascii")


def _sized(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data

"""The system's certificate authorities, handed to a Java runtime that knows only its own."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import pytest

from exactlyonce.connectors.embedded.java import java_of_pypi
from exactlyonce.connectors.embedded.trust_store import key_store, system_bundle, write_trust_store


def test_java_reads_what_is_written(tmp_path: Path) -> None:
    bundle = system_bundle()
    assert bundle
    store = tmp_path / "authorities.jks"
    assert write_trust_store(store)[0] == f"-Djavax.net.ssl.trustStore={store}"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(bundle)
    runtime = java_of_pypi()
    assert runtime
    listing = subprocess.run(
        [runtime.with_name("keytool"), "-list", "-keystore", store, "-storetype", "JKS", "-storepass", "changeit"],
        capture_output=True,
        text=True,
    )
    assert listing.returncode == 0, listing.stdout
    assert listing.stdout.count("trustedCertEntry") == len(context.get_ca_certs())


def test_no_bundle_no_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exactlyonce.connectors.embedded.trust_store.system_bundle", lambda: None)
    assert write_trust_store(tmp_path / "authorities.jks") == []
    assert list(tmp_path.iterdir()) == []


def test_the_bundle_of_the_environment_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bundle.pem").touch()
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "bundle.pem"))
    assert system_bundle() == str(tmp_path / "bundle.pem")


def test_an_empty_store_has_the_head_and_the_digest() -> None:
    assert key_store([])[:12].hex() == "feedfeed0000000200000000"
    assert len(key_store([])) == 32

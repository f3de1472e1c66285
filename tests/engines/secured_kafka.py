"""What a broker needs to be logged in at: certificates, and users of SCRAM."""

from __future__ import annotations

import subprocess
from pathlib import Path

from confluent_kafka.admin import (  # type: ignore[attr-defined]  # its stubs hide some
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from exactlyonce.testing.cluster import LIMIT_S

SCRAM_LOGIN = "org.apache.kafka.common.security.scram.ScramLoginModule required;"


def make_certificate(folder: Path, name: str, password: str = "") -> None:
    """`<name>.pem`, its key, with *password*, and both in one file as the broker wants them."""
    key = ["-passout", f"pass:{password}"] if password else ["-nodes"]
    command = f"openssl req -x509 -newkey rsa:2048 -keyout {name}.key -out {name}.pem -days 2 -subj /CN={name}"
    subprocess.run(
        [*command.split(), *key, "-addext", "subjectAltName=IP:127.0.0.1"], cwd=folder, check=True, capture_output=True
    )
    (folder / f"{name}.both").write_text((folder / f"{name}.key").read_text() + (folder / f"{name}.pem").read_text())


def tls_settings(certificates: Path) -> dict[str, str]:
    """The settings for a broker with the certificate `server`."""
    return {"ssl.keystore.type": "PEM", "ssl.keystore.location": str(certificates / "server.both")}


def add_user(bootstrap_servers: str, name: str, password: str) -> None:
    """A user who may log in by SCRAM."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):
        user = UserScramCredentialUpsertion(name, ScramCredentialInfo(mechanism, 4096), password.encode())
        for future in admin.alter_user_scram_credentials([user]).values():
            future.result(LIMIT_S)

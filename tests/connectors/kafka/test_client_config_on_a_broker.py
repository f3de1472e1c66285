"""Both client libraries log in with one configuration, at a broker with TLS and SASL; and no log shows a secret."""

from __future__ import annotations

import base64
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from confluent_kafka import Consumer
from secured_kafka import SCRAM_LOGIN, add_user, make_certificate, tls_settings

from exactlyonce.connectors.embedded.broker import EmbeddedBroker, free_port
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.pipeline.errors import BrokerUnavailable, ConfigError
from exactlyonce.testing.cluster import LIMIT_S

pytestmark = [pytest.mark.broker, pytest.mark.slow]

CANARY = "c4nary-Zr9"
PLAIN_LOGIN = (
    f'org.apache.kafka.common.security.plain.PlainLoginModule required user_alice="{CANARY}" '
    f'username="alice" password="{CANARY}";'
)
OAUTH_LOGIN = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required;"


def token(config: str) -> tuple[str, float]:
    """An `oauth_cb` that signs nothing: the broker of this test believes whatever it is told."""
    now = int(time.time())
    parts = ({"alg": "none"}, {"sub": "alice", "iat": now, "exp": now + 3600, "scope": CANARY})
    texts = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts]
    return ".".join([*texts, ""]), float(now + 3600)


class SecuredBroker(NamedTuple):
    """The listeners' addresses, and the certificates for them."""

    ports: dict[str, int]
    certificates: Path

    def config(self, listener: str, **settings: str) -> ClientConfig:
        protocol = {"SASL": "SASL_PLAINTEXT", "SASLTLS": "SASL_SSL", "TLS": "SSL"}[listener]
        tls = {} if protocol == "SASL_PLAINTEXT" else {"ssl.ca.location": str(self.certificates / "server.pem")}
        dotted = {name if name == "oauth_cb" else name.replace("_", "."): value for name, value in settings.items()}
        servers = f"127.0.0.1:{self.ports[listener]}"
        return ClientConfig({"bootstrap.servers": servers, "security.protocol": protocol, **tls, **dotted})


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredBroker]:
    certificates = tmp_path_factory.mktemp("certificates")
    for name in ("server", "client"):
        make_certificate(certificates, name)
    ports = {name: free_port() for name in ("PLAINTEXT", "CONTROLLER", "SASL", "SASLTLS", "TLS")}
    settings = listener_settings(ports, certificates)
    broker = EmbeddedBroker(tmp_path_factory.mktemp("broker"), ports["PLAINTEXT"], settings, lifetime="process")
    broker.start()
    add_user(broker.bootstrap_servers, "alice", CANARY)
    yield SecuredBroker(ports, certificates)
    broker.kill()


def listener_settings(ports: dict[str, int], certificates: Path) -> dict[str, str]:
    protocols = {"PLAINTEXT": "PLAINTEXT", "CONTROLLER": "PLAINTEXT"}
    protocols |= {"SASL": "SASL_PLAINTEXT", "SASLTLS": "SASL_SSL", "TLS": "SSL"}
    settings = {
        "listeners": ",".join(f"{name}://127.0.0.1:{port}" for name, port in ports.items()),
        "advertised.listeners": ",".join(f"{n}://127.0.0.1:{port}" for n, port in ports.items() if n != "CONTROLLER"),
        "controller.quorum.voters": f"1@127.0.0.1:{ports['CONTROLLER']}",
        "listener.security.protocol.map": ",".join(f"{name}:{protocol}" for name, protocol in protocols.items()),
        "inter.broker.listener.name": "PLAINTEXT",
        **tls_settings(certificates),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(certificates / "client.pem"),
        "listener.name.tls.ssl.client.auth": "required",
    }
    for name in ("sasl", "sasltls"):
        prefix = f"listener.name.{name}"
        settings[f"{prefix}.sasl.enabled.mechanisms"] = "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER"
        settings[f"{prefix}.plain.sasl.jaas.config"] = PLAIN_LOGIN
        settings[f"{prefix}.scram-sha-256.sasl.jaas.config"] = SCRAM_LOGIN
        settings[f"{prefix}.scram-sha-512.sasl.jaas.config"] = SCRAM_LOGIN
        settings[f"{prefix}.oauthbearer.sasl.jaas.config"] = OAUTH_LOGIN
        settings[f"{prefix}.connections.max.reauth.ms"] = "2000"
    return settings


def both_reach(config: ClientConfig) -> str:
    """The cluster's id, as both libraries give it."""
    transactions = Transactions(config, timeout_ms=LIMIT_S * 1000)
    consumer = Consumer(config.confluent({"group.id": "group"}))
    try:
        cluster_id = transactions.cluster_id()
        assert transactions.transaction_version() >= 2
        assert consumer.list_topics(timeout=LIMIT_S).cluster_id == cluster_id
        return cluster_id
    finally:
        consumer.close()
        transactions.close()


@pytest.mark.parametrize(
    ("listener", "mechanism"), [("SASL", "PLAIN"), ("SASL", "SCRAM-SHA-256"), ("SASLTLS", "SCRAM-SHA-512")]
)
def test_passwords(broker: SecuredBroker, listener: str, mechanism: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "kafka")
    config = broker.config(listener, sasl_mechanism=mechanism, sasl_username="alice", sasl_password=CANARY)
    config.check()
    assert both_reach(config)
    assert "SaslHandshake" in caplog.text
    assert CANARY not in caplog.text


def test_tokens(broker: SecuredBroker, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "kafka")
    config = broker.config("SASLTLS", sasl_mechanism="OAUTHBEARER", oauth_cb=f"{__name__}:token")
    assert both_reach(config)
    assert token("")[0].split(".")[0] not in caplog.text


def test_certificates(broker: SecuredBroker) -> None:
    certificate, key = (broker.certificates / name for name in ("client.pem", "client.key"))
    assert both_reach(broker.config("TLS", ssl_certificate_location=str(certificate), ssl_key_location=str(key)))
    texts = broker.config("TLS", ssl_certificate_pem=certificate.read_text(), ssl_key_pem=f"file:{key}")
    assert both_reach(texts)


def test_a_wrong_password(broker: SecuredBroker, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "kafka")
    secret = broker.certificates / "password"
    for mechanism in ("PLAIN", "SCRAM-SHA-512"):
        secret.write_text(f"{CANARY}-wrong")
        settings = {"sasl_mechanism": mechanism, "sasl_username": "alice", "sasl_password": f"file:{secret}"}
        transactions = Transactions(broker.config("SASLTLS", **settings), timeout_ms=LIMIT_S * 1000)
        with pytest.raises(ConfigError, match=r"refused the login: .*Check sasl\.mechanism") as caught:
            transactions.cluster_id()
        assert CANARY not in str(caught.value) + caplog.text
        secret.write_text(CANARY)
        assert transactions.cluster_id()
        transactions.close()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("unhurried")
def test_a_certificate_that_we_do_not_trust(broker: SecuredBroker) -> None:
    config = broker.config("TLS", ssl_ca_location=str(broker.certificates / "client.pem"))
    with pytest.raises(BrokerUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
        Transactions(config, timeout_ms=5_000).cluster_id()


@pytest.mark.exhaustive
def test_sessions_that_end(broker: SecuredBroker) -> None:
    config = broker.config("SASLTLS", sasl_mechanism="OAUTHBEARER", oauth_cb=f"{__name__}:token")
    transactions = Transactions(config, timeout_ms=LIMIT_S * 1000)
    started_s = time.monotonic()
    while time.monotonic() < started_s + 7:
        assert transactions.cluster_id()
        time.sleep(0.1)  # the rate of a checkpoint's questions
    transactions.close()


def test_a_cluster_with_security_only_where_it_is(broker: SecuredBroker) -> None:
    config = ClientConfig({"bootstrap.servers": f"127.0.0.1:{broker.ports['SASL']}"})
    with pytest.raises(BrokerUnavailable, match=r"speaks PLAINTEXT \(security.protocol\)"):
        Transactions(config, timeout_ms=2_000).cluster_id()

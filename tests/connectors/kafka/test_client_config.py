"""One configuration for two client libraries: the same meaning or a refusal, and no secret in sight."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from confluent_kafka import Producer
from hypothesis import given
from hypothesis import strategies as st

from exactlyonce.connectors.kafka.client_config import OWNED, ClientConfig
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.secrets import Secret

CANARY = "c4nary-Zr9"
SERVERS = {"bootstrap.servers": "127.0.0.1:9092"}
SASL = {
    **SERVERS,
    "security.protocol": "SASL_SSL",
    "sasl.mechanism": "SCRAM-SHA-512",
    "sasl.username": "alice",
    "sasl.password": CANARY,
}


def token(config: str) -> tuple[str, float]:
    """An `oauth_cb`: as confluent-kafka calls it."""
    return f"token-{CANARY}-{config}", 4_000_000_000.0


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a key protected by the password CANARY, the same unprotected, and their certificate."""
    folder = tmp_path_factory.mktemp("certificates")
    for command in (
        "openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out certificate.pem -days 2 -subj /CN=localhost",
        f"openssl pkcs8 -topk8 -in key.pem -out locked.pem -passout pass:{CANARY}",
    ):
        subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    return folder


def test_what_stands_before_an_address_is_not_shown() -> None:
    """It may be a password, as in the URLs of others."""
    with pytest.raises(ConfigError, match=r"has '\*\*\*@127\.0\.0\.1:9092'\. Write host:port") as raised:
        ClientConfig({"bootstrap.servers": f"somebody:{CANARY}@127.0.0.1:9092"})
    assert CANARY not in str(raised.value)


class TestBothLibraries:
    def test_names_and_mechanism(self) -> None:
        config = ClientConfig({**SASL, "client.id": "me", "linger.ms": 5, "socket.keepalive.enable": True})
        assert config.confluent() == {**SASL, "client.id": "me", "linger.ms": "5", "socket.keepalive.enable": "true"}
        arguments = config.kafka_python()
        assert isinstance(arguments.pop("ssl_context"), ssl.SSLContext)
        assert arguments == {
            "bootstrap_servers": ["127.0.0.1:9092"], "client_id": "me", "security_protocol": "SASL_SSL",
            "sasl_mechanism": "SCRAM-SHA-512", "sasl_plain_username": "alice", "sasl_plain_password": CANARY,
        }  # fmt: skip

    def test_aliases(self) -> None:
        config = ClientConfig({"metadata.broker.list": "a:1, PLAINTEXT://b:2"})
        assert config.bootstrap_servers == "a:1, PLAINTEXT://b:2"
        assert config.kafka_python()["bootstrap_servers"] == ["a:1", "b:2"]
        with pytest.raises(ConfigError, match="set twice"):
            ClientConfig({**SASL, "sasl.mechanisms": "PLAIN"})

    def test_overrides_win(self) -> None:
        config = ClientConfig({**SERVERS, "linger.ms": "5"})
        assert config.confluent({"linger.ms": 7})["linger.ms"] == 7

    def test_tokens(self) -> None:
        oauth = {**SERVERS, "security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER"}
        config = ClientConfig({**oauth, "oauth_cb": f"{__name__}:token", "sasl.oauthbearer.config": "x"})
        assert config.confluent()["oauth_cb"]("x") == token("x")
        provider = config.kafka_python()["sasl_oauth_token_provider"]
        assert (provider.token(), provider.extensions()) == (token("x")[0], {})
        assert config.redact(f"sent {token('x')[0]}") == "sent ***"
        with pytest.raises(ConfigError, match="module:function"):
            ClientConfig({**oauth, "oauth_cb": f"{__name__}:nothing"}).kafka_python()

    @pytest.mark.parametrize(
        "setting",
        [
            "ssl.keystore.location", "ssl.engine.location", "sasl.kerberos.keytab", "sasl.oauthbearer.method",
            "sasl.oauthbearer.token.endpoint.url", "enable.sasl.oauthbearer.unsecure.jwt", "https.ca.location",
            "sasl.pasword",
        ],
    )  # fmt: skip
    def test_security_is_never_dropped(self, setting: str) -> None:
        with pytest.raises(ConfigError, match=f"{setting}: .*kafka-python"):
            ClientConfig({**SASL, setting: "x"}).check()

    def test_check_finds_what_librdkafka_refuses(self, certificates: Path) -> None:
        with pytest.raises(ConfigError, match=r"lingerr\.ms"):
            ClientConfig({**SERVERS, "lingerr.ms": 5}).check()
        with pytest.raises(ConfigError, match=r"fetch\.max\.bytes"):  # what only a consumer refuses
            ClientConfig({**SERVERS, "fetch.max.bytes": 100_000}).check()
        ClientConfig({**SERVERS, "linger.ms": 5}).check()
        ClientConfig({**SASL, "ssl.ca.location": str(certificates / "certificate.pem")}).check()

    def test_secrets_reach_librdkafka_whole(self) -> None:
        Producer(ClientConfig(SASL).confluent({"bootstrap.servers": "", "log_level": 0}))


class TestTls:
    @staticmethod
    def context(**settings: Any) -> ssl.SSLContext:
        dotted = {name.replace("_", "."): str(value) for name, value in settings.items()}
        context = ClientConfig({**SERVERS, "security.protocol": "ssl", **dotted}).kafka_python()["ssl_context"]
        assert isinstance(context, ssl.SSLContext)
        return context

    def test_checked_by_default(self) -> None:
        context = self.context()
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.check_hostname
        assert context.minimum_version is ssl.TLSVersion.TLSv1_2
        assert context.cert_store_stats()["x509_ca"] > 0

    def test_unchecked_by_name(self) -> None:
        assert not self.context(ssl_endpoint_identification_algorithm="none").check_hostname
        assert self.context(ssl_endpoint_identification_algorithm="none").verify_mode is ssl.CERT_REQUIRED
        assert self.context(enable_ssl_certificate_verification=False).verify_mode is ssl.CERT_NONE

    def test_files_and_texts(self, certificates: Path) -> None:
        certificate, key, locked = (certificates / f"{name}.pem" for name in ("certificate", "key", "locked"))
        for settings in (
            {"ssl_certificate_location": certificate, "ssl_key_location": key},
            {"ssl_certificate_location": certificate, "ssl_key_location": locked, "ssl_key_password": CANARY},
            {"ssl_certificate_pem": certificate.read_text(), "ssl_key_pem": key.read_text()},
            {"ssl_certificate_pem": certificate.read_text(), "ssl_key_pem": f"file:{key}"},
        ):
            self.context(**settings)
        for settings in ({"ssl_ca_location": certificate}, {"ssl_ca_pem": certificate.read_text()}):
            assert len(self.context(**settings).get_ca_certs()) == 1

    def test_what_cannot_be_loaded(self, certificates: Path) -> None:
        locked = {"ssl_certificate_location": certificates / "certificate.pem"}
        locked["ssl_key_location"] = certificates / "locked.pem"
        for settings in ({"ssl_ca_location": "/missing"}, locked, {**locked, "ssl_key_password": f"{CANARY}x"}):
            with pytest.raises(ConfigError, match=r"Check ssl\.") as caught:
                self.context(**settings)
            assert CANARY not in str(caught.value)


class TestContradictions:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({}, "bootstrap.servers is not set"),
            ({**SERVERS, "security.protocol": "TLS"}, "Choose one of"),
            ({**SERVERS, "sasl.username": "alice"}, "there would be no login"),
            ({**SERVERS, "security.protocol": "SASL_SSL"}, "sasl.mechanism is not set"),
            ({**SASL, "sasl.mechanism": "GSSAPI"}, "Kerberos"),
            (
                {**SERVERS, "security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN"},
                "sasl.username and sasl.password",
            ),
            ({**SERVERS, "security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER"}, "needs oauth_cb"),
        ],
    )
    def test_refused(self, settings: dict[str, str], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            ClientConfig(settings)

    @pytest.mark.parametrize("setting", sorted(OWNED))
    def test_owned(self, setting: str) -> None:
        with pytest.raises(ConfigError, match="exactlyonce sets this itself"):
            ClientConfig({**SERVERS, setting: "x"})

    def test_warnings(self) -> None:
        assert ClientConfig(SASL).warnings == ()
        assert ClientConfig(SERVERS).warnings == ()
        for settings, word in (
            ({**SASL, "security.protocol": "SASL_PLAINTEXT"}, "not encrypted"),
            ({**SASL, "enable.ssl.certificate.verification": False}, "pose"),
            ({**SASL, "ssl.endpoint.identification.algorithm": "none"}, "pose"),
            ({**SERVERS, "ssl.ca.location": "x"}, "no effect"),
        ):
            (warning,) = ClientConfig(settings).warnings
            assert word in warning


class TestSecrets:
    SECRETS = (
        "sasl.password", "ssl.key.password", "ssl.key.pem", "ssl.keystore.password", "sasl.jaas.config",
        "sasl.oauthbearer.client.secret", "sasl.oauthbearer.config", "sasl.oauthbearer.assertion.private.key.pem",
        "sasl.oauthbearer.assertion.private.key.passphrase",
    )  # fmt: skip

    @pytest.mark.parametrize("setting", SECRETS)
    def test_not_shown(self, setting: str) -> None:
        config = ClientConfig({**SASL, "sasl.password": "-", setting: CANARY})
        assert CANARY not in repr(config) + str(config) + config.redact(f"<{CANARY}>")
        assert "bootstrap.servers=127.0.0.1:9092" in repr(config)

    def test_not_shown_by_what_clients_are_given(self) -> None:
        config = ClientConfig(SASL)
        assert CANARY not in repr(config.confluent()) + repr(config.kafka_python())

    def test_references(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        secret = tmp_path / "secret"
        secret.write_text("first\n")
        monkeypatch.setenv("SECRET_USER", "bob")
        config = ClientConfig({**SASL, "sasl.password": f"file:{secret}", "sasl.username": "env:SECRET_USER"})
        assert f"sasl.password=file:{secret}" in repr(config)
        assert config.confluent()["sasl.password"] == "first"
        secret.write_text("second")
        assert config.kafka_python()["sasl_plain_password"] == "second"
        assert config.confluent()["sasl.username"] == "bob"
        assert config.redact("first, second, bob") == "***, ***, bob"

    def test_addresses_by_reference(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """They are looked up and checked for each client."""
        config = ClientConfig({"bootstrap.servers": "env:SERVERS"})
        monkeypatch.setenv("SERVERS", "a:1,b:2")
        assert config.confluent()["bootstrap.servers"] == "a:1,b:2"
        assert config.kafka_python()["bootstrap_servers"] == ["a:1", "b:2"]
        assert config.as_text == {"bootstrap.servers": "env:SERVERS"}
        monkeypatch.setenv("SERVERS", "nowhere")
        with pytest.raises(ConfigError, match=r"bootstrap\.servers has 'nowhere'"):
            config.check()

    def test_references_to_nothing(self) -> None:
        for reference, message in (("env:NO_SUCH_VARIABLE", "no variable"), ("file:/no/such/file", "cannot be read")):
            with pytest.raises(ConfigError, match=message):
                ClientConfig({**SASL, "sasl.password": reference}).confluent()

    def test_errors_of_librdkafka_hide_it(self) -> None:
        with pytest.raises(ConfigError) as caught:
            ClientConfig({**SASL, CANARY: "x", "ssl.key.password": CANARY}).check()
        assert CANARY not in str(caught.value)

    def test_travels_as_written(self) -> None:
        config = ClientConfig({**SASL, "sasl.password": "env:NOT_HERE"})
        assert ClientConfig(msgspec.json.decode(msgspec.json.encode(config.settings))) == config

    @given(st.text(min_size=8).filter(lambda text: not text.startswith(("env:", "file:"))), st.text(), st.text())
    def test_redact_removes_every_occurrence(self, secret: str, before: str, after: str) -> None:
        config = ClientConfig({**SASL, "sasl.password": secret})
        shown = config.redact(before + secret + after + secret)
        assert not any(secret in piece for piece in shown.split("***"))

    @pytest.mark.parametrize("secret", ["p", "s3cret", "!x?", ".w", "\u00e9t\u00e9"])
    def test_a_short_secret_is_hidden_where_it_stands_by_itself(self, secret: str) -> None:
        config = ClientConfig({**SASL, "sasl.password": secret})
        for text in ("//user:{}@host", "password={} is no", "<{}>", "{}", "it is {}.", "{}, {}"):
            assert config.redact(text.format(secret, secret)) == text.format("***", "***")

    def test_a_password_of_one_letter_is_not_told_by_what_is_missing(self) -> None:
        config = ClientConfig({**SASL, "sasl.password": "p"})
        said = "exactlyonce: pipeline 'paid' has no topic; password=p, user:p@host"
        assert config.redact(said) == "exactlyonce: pipeline 'paid' has no topic; password=***, user:***@host"

    def test_secret_is_a_string(self) -> None:
        assert Secret("x") == "x"
        assert f"{Secret('x')}" == "x"
        assert repr([Secret("x")]) == "['***']"

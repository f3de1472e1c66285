"""One configuration of the cluster for two client libraries.

Invariants: a setting of librdkafka has the same meaning for confluent-kafka and kafka-python, or is refused by name: no
security setting is silently dropped. No secret is part of a repr, a warning or an error. A secret given by reference
(`env:NAME`, `file:/path`) is looked up for each new client, and sent to other processes as the reference; so are
addresses. Certificates are always checked unless the user turned that off by name; a key given as text is never written
to a disk; OpenSSL never asks the terminal for a key's password.
"""

from __future__ import annotations

import importlib
import os
import re
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaException

from exactlyonce.connectors.confluent import make_consumer, make_producer
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.secrets import Secret, is_reference, look_up, masked


def checks_certificate(settings: Mapping[str, str]) -> bool:
    """Whether the broker must show a certificate of a known authority."""
    return settings.get("enable.ssl.certificate.verification", "true").lower() not in ("false", "f", "0")


def checks_hostname(settings: Mapping[str, str]) -> bool:
    """Whether that certificate must be for the broker's name."""
    return settings.get("ssl.endpoint.identification.algorithm", "https").lower() != "none"


def tls_context(settings: Mapping[str, str], redact: Callable[[str], str]) -> ssl.SSLContext:
    """A client's context for the `ssl.*` *settings*. Raises `ConfigError` if a certificate or key cannot be loaded."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = checks_certificate(settings) and checks_hostname(settings)
    context.verify_mode = ssl.CERT_REQUIRED if checks_certificate(settings) else ssl.CERT_NONE
    try:
        _load_authorities(context, settings)
        _load_own_certificate(context, settings)
        if "ssl.cipher.suites" in settings:
            context.set_ciphers(settings["ssl.cipher.suites"])
    except (ssl.SSLError, OSError) as error:
        given = ", ".join(name for name in settings if name.startswith("ssl."))
        raise ConfigError(
            f"The TLS settings cannot be used: {redact(str(error))}. Check {given}: the files must be readable PEM, "
            f"and the key must fit its certificate and password."
        ) from None
    return context


def _load_authorities(context: ssl.SSLContext, settings: Mapping[str, str]) -> None:
    location, pem = settings.get("ssl.ca.location", "probe"), settings.get("ssl.ca.pem")
    if pem:
        context.load_verify_locations(cadata=pem)
    elif location == "probe":
        context.load_default_certs()
    elif Path(location).is_dir():
        context.load_verify_locations(capath=location)
    else:
        context.load_verify_locations(cafile=location)
    if "ssl.crl.location" in settings:
        context.load_verify_locations(cafile=settings["ssl.crl.location"])
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF


def _load_own_certificate(context: ssl.SSLContext, settings: Mapping[str, str]) -> None:
    with _file_of(settings, "ssl.certificate") as certificate, _file_of(settings, "ssl.key") as key:
        if certificate:
            # The password is a string even when there is none: with None, OpenSSL would prompt for it.
            context.load_cert_chain(certificate, key, password=str(settings.get("ssl.key.password", "")))


@contextmanager
def _file_of(settings: Mapping[str, str], name: str) -> Iterator[str | None]:
    """The path in `<name>.location`, or a path to the text of `<name>.pem` in memory."""
    if f"{name}.pem" not in settings:
        yield settings.get(f"{name}.location")
        return
    memory = os.memfd_create(name)
    try:
        os.write(memory, settings[f"{name}.pem"].encode())
        yield f"/proc/self/fd/{memory}"
    finally:
        os.close(memory)


ALIASES = {
    "max.in.flight": "max.in.flight.requests.per.connection",
    "metadata.broker.list": "bootstrap.servers",
    "sasl.mechanisms": "sasl.mechanism",
}

# fmt: off
OWNED = frozenset((
    "acks", "auto.offset.reset", "check.crcs", "delivery.report.only.error", "enable.auto.commit",
    "enable.auto.offset.store", "enable.idempotence", "enable.partition.eof", "isolation.level",
    "max.in.flight.requests.per.connection", "request.required.acks", "transaction.timeout.ms", "transactional.id",
))
"""Settings of the guarantee: exactlyonce sets them itself, for each client."""

_SECURITY_KNOWN = frozenset((
    "security.protocol", "sasl.mechanism", "sasl.username", "sasl.password", "sasl.oauthbearer.config", "oauth_cb",
    "enable.ssl.certificate.verification", "ssl.endpoint.identification.algorithm", "ssl.ca.location", "ssl.ca.pem",
    "ssl.certificate.location", "ssl.certificate.pem", "ssl.key.location", "ssl.key.pem", "ssl.key.password",
    "ssl.crl.location", "ssl.cipher.suites",
))
"""The security settings that both libraries support; any other is refused."""
# fmt: on

PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")

_ADDRESS = re.compile(rf"(?:(?:{'|'.join(PROTOCOLS)})://)?(?:\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):([0-9]{{1,5}})\Z", re.I)
_SECRET = re.compile(r"password|passphrase|secret|jaas|private\.key|key\.pem$|oauthbearer\.config$")
_SECURITY = re.compile(r"(ssl|sasl|security|https|enable\.ssl|enable\.sasl)\.|oauth_cb$")


@dataclass(frozen=True, repr=False)
class ClientConfig:
    """How to reach and authenticate to the cluster; *settings* are librdkafka's.

    >>> ClientConfig({"bootstrap.servers": "127.0.0.1:9092", "linger.ms": 5})
    ClientConfig(bootstrap.servers=127.0.0.1:9092, linger.ms=5)

    `oauth_cb` is `module:function`, as confluent-kafka calls it: given `sasl.oauthbearer.config`, it returns the token,
    its expiry in seconds since 1970 and, if need be, a principal and a dict of extensions.
    """

    settings: Mapping[str, Any]
    _seen: set[str] = field(default_factory=set, init=False, compare=False)
    """Every secret looked up so far, for `redact`."""

    def __post_init__(self) -> None:
        settings = by_name(self.settings.items())
        object.__setattr__(self, "settings", settings)
        _refuse_contradictions(settings)

    @property
    def addresses(self) -> list[str]:
        """The host and the port of each of `bootstrap_servers`."""
        return [re.sub(r"^\w+://", "", server.strip()) for server in self.bootstrap_servers.split(",")]

    @property
    def bootstrap_servers(self) -> str:
        """`host:port` of one or more brokers, separated by commas. Raises `ConfigError` for a reference to none."""
        servers = look_up("bootstrap.servers", self.settings["bootstrap.servers"])
        _require_addresses(servers)
        return servers

    @property
    def as_text(self) -> dict[str, str]:
        """The settings for another process, which makes the same `ClientConfig` of them."""
        return {name: str(value) for name, value in self.settings.items()}

    @property
    def protocol(self) -> str:
        """One of `PROTOCOLS`."""
        return str(self.settings.get("security.protocol", "PLAINTEXT")).upper()

    @property
    def warnings(self) -> tuple[str, ...]:
        """Risky settings, for the log at the start."""
        settings, warnings = self.settings, []
        if self.protocol == "SASL_PLAINTEXT":
            warnings.append(
                "security.protocol is SASL_PLAINTEXT: credentials and records are not encrypted, and anybody on the "
                "network can read or replace them. Use SASL_SSL outside of a closed network."
            )
        if self.protocol in ("PLAINTEXT", "SASL_PLAINTEXT") and any(name.startswith("ssl.") for name in settings):
            warnings.append(f"The ssl.* settings have no effect: security.protocol is {self.protocol}.")
        if not checks_certificate(settings):
            warnings.append("enable.ssl.certificate.verification is false: anybody can pose as the broker.")
        elif not checks_hostname(settings):
            warnings.append(
                "ssl.endpoint.identification.algorithm is none: anybody with a certificate of this authority can "
                "pose as the broker."
            )
        return tuple(warnings)

    def confluent(self, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Arguments for any client of confluent-kafka; *overrides* win."""
        settings: dict[str, Any] = self._resolved()
        if "oauth_cb" in settings:
            settings["oauth_cb"] = self._token_function()
        return {**settings, **(overrides or {})}

    def kafka_python(self) -> dict[str, Any]:
        """Arguments for kafka-python's connection manager: address, identity and security; tuning is left out.

        Raises `ConfigError` naming a security setting that kafka-python cannot follow.
        """
        settings = self._resolved()
        unknown = sorted(name for name in settings if _SECURITY.match(name) and name not in _SECURITY_KNOWN)
        if unknown:
            raise ConfigError(
                f"{', '.join(unknown)}: kafka-python, by which exactlyonce ends transactions, has no such setting. "
                f"Give certificates as PEM (ssl.ca.location, ssl.certificate.location, ssl.key.location), and OAuth "
                f"tokens by oauth_cb=module:function. Supported settings: {', '.join(sorted(_SECURITY_KNOWN))}."
            )
        arguments: dict[str, Any] = {"bootstrap_servers": self.addresses, "security_protocol": self.protocol}
        if "client.id" in settings:
            arguments["client_id"] = settings["client.id"]
        if self.protocol in ("SSL", "SASL_SSL"):
            arguments["ssl_context"] = tls_context(settings, self.redact)
        if self.protocol in ("SASL_PLAINTEXT", "SASL_SSL"):
            arguments.update(self._sasl(settings))
        return arguments

    def check(self) -> None:
        """Raise `ConfigError` for a setting that either library refuses; opens no connection."""
        self.kafka_python()
        offline = {name: value for name, value in self.confluent().items() if name != "bootstrap.servers"}
        try:
            make_producer({**offline, "log_level": 0})
            make_consumer({**offline, "log_level": 0, "group.id": "check"}).close()
        except (KafkaException, TypeError, ValueError) as error:
            reason = error.args[0].str() if isinstance(error, KafkaException) else str(error)
            dotted = next((name for name in sorted(self.settings) if "_" in name and f'"{name}"' in reason), "")
            remedy = f"Its names have dots: write {dotted.replace('_', '.')}." if dotted else "Correct them."
            raise ConfigError(f"The Kafka client refuses the settings: {self.redact(reason)}. {remedy}") from None

    def redact(self, text: str) -> str:
        """*text* without the value of any secret of this configuration."""
        literal = {v for name, v in self.settings.items() if _SECRET.search(name) and not is_reference(v)}
        return masked(text, self._seen | literal)

    @property
    def secrets_written_out(self) -> tuple[str, ...]:
        """The settings with a literal secret, which must not be stored where others can read them."""
        return tuple(name for name, v in self.settings.items() if _SECRET.search(name) and not is_reference(v))

    @property
    def shown(self) -> dict[str, str]:
        """The settings for people: literal secrets are hidden."""
        hidden = dict.fromkeys(self.secrets_written_out, "***")
        return {**self.settings, **hidden}

    def __repr__(self) -> str:
        return f"ClientConfig({', '.join(f'{name}={value}' for name, value in self.shown.items())})"

    def _resolved(self) -> dict[str, str]:
        """The settings with every reference resolved."""
        resolved: dict[str, str] = {}
        for name, value in self.settings.items():
            if _SECRET.search(name) or name == "sasl.username":
                value = look_up(name, value)
            if _SECRET.search(name):
                self._seen.add(value)
                value = Secret(value)
            resolved[name] = value
        resolved["bootstrap.servers"] = self.bootstrap_servers
        return resolved

    def _sasl(self, settings: Mapping[str, str]) -> dict[str, Any]:
        mechanism = settings["sasl.mechanism"]
        if mechanism == "OAUTHBEARER":
            # Imported here: it would double the time of a worker's start, which does not need it.
            from kafka.net.sasl.oauth import AbstractTokenProvider  # noqa: TID251 - the base of token providers is public

            AbstractTokenProvider.register(_Tokens)
            provider = _Tokens(self._token_function(), settings.get("sasl.oauthbearer.config", ""))
            return {"sasl_mechanism": mechanism, "sasl_oauth_token_provider": provider}
        return {
            "sasl_mechanism": mechanism,
            "sasl_plain_username": settings["sasl.username"],
            "sasl_plain_password": settings["sasl.password"],
        }

    def _token_function(self) -> Callable[[str], tuple[Any, ...]]:
        """The user's function; its tokens are redacted."""
        module, _, attribute = self.settings["oauth_cb"].partition(":")
        try:
            function = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"oauth_cb is {self.settings['oauth_cb']!r}, which cannot be imported ({error}). "
                f"Write it as module:function."
            ) from None

        def fetch(config: str) -> tuple[Any, ...]:
            answer: tuple[Any, ...] = function(config)
            self._seen.add(answer[0])
            return answer

        return fetch


class _Tokens:
    """Gives kafka-python the tokens of a function written for confluent-kafka."""

    def __init__(self, fetch: Callable[[str], tuple[Any, ...]], config: str) -> None:
        self._fetch, self._config = fetch, config
        self._extensions: dict[str, str] = {}

    def token(self) -> str:
        token, _expiry, *rest = self._fetch(self._config)
        self._extensions = rest[1] if len(rest) > 1 else {}
        return str(token)

    def extensions(self) -> dict[str, str]:
        return self._extensions


def by_name(given: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """The text of each setting, by its canonical name. `ConfigError` for two different values."""
    settings: dict[str, str] = {}
    for alias, value in given:
        name = ALIASES.get(alias, alias)
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if settings.setdefault(name, text) != text:
            raise ConfigError(f"{name} is set twice, with different values (also as {alias!r}). Keep one of them.")
    return settings


def _refuse_contradictions(settings: Mapping[str, str]) -> None:
    """Raise `ConfigError` for settings that no client takes, or that are weaker than they look."""
    if not settings.get("bootstrap.servers"):
        raise ConfigError("bootstrap.servers is not set. Name at least one broker, as host:port.")
    if not is_reference(settings["bootstrap.servers"]):
        _require_addresses(settings["bootstrap.servers"])
    owned = sorted(OWNED.intersection(settings))
    if owned:
        raise ConfigError(f"{', '.join(owned)}: exactlyonce sets this itself, for its guarantee. Remove the setting.")
    protocol, mechanism = settings.get("security.protocol", "PLAINTEXT").upper(), settings.get("sasl.mechanism")
    if protocol not in PROTOCOLS:
        raise ConfigError(f"security.protocol is {protocol!r}. Choose one of {', '.join(PROTOCOLS)}.")
    if not protocol.startswith("SASL"):
        if any(name.startswith("sasl.") for name in settings):
            raise ConfigError(
                f"sasl.* is set, but security.protocol is {protocol}: there would be no login. Set security.protocol "
                f"to SASL_SSL."
            )
        return
    if mechanism not in MECHANISMS:
        raise ConfigError(
            f"sasl.mechanism is {mechanism or 'not set'}. Choose one of {', '.join(MECHANISMS)} "
            f"(Kerberos is not part of the installable clients)."
        )
    needed = ("oauth_cb",) if mechanism == "OAUTHBEARER" else ("sasl.username", "sasl.password")
    missing = [name for name in needed if name not in settings]
    if missing:
        raise ConfigError(f"sasl.mechanism {mechanism} needs {' and '.join(missing)}. Set it.")


def _require_addresses(servers: str) -> None:
    for server in map(str.strip, servers.split(",")):
        if not _is_address(server):
            raise ConfigError(
                f"bootstrap.servers has {_unsigned(server)!r}. Write host:port, several separated by commas."
            )


def _unsigned(server: str) -> str:
    """*server* without a part that may be a password."""
    before, at, host = server.rpartition("@")
    return f"***@{host}" if at else before + host


def _is_address(server: str) -> bool:
    """Whether *server* is host:port; a protocol before it is librdkafka's.

    >>> _is_address("broker-1:9092"), _is_address("[::1]:9092"), _is_address("http://broker:1"), _is_address("broker")
    (True, True, False, False)
    """
    match = _ADDRESS.match(server)
    return match is not None and 0 < int(match[1]) < 1 << 16

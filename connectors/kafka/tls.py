"""librdkafka's TLS settings as Python's.

Invariants: certificates are always checked unless the user turned that off by name; a key given as text is never
written to a disk; OpenSSL never asks the terminal for a key's password.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from exactlyonce.pipeline.errors import ConfigError


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

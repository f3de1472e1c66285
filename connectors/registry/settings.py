"""The settings of a registry: those of Confluent's client, with its secrets as references.

Invariant: no problem, and no error, has the value of a setting that may be a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from exactlyonce.pipeline.codec import Codec
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.registry import Registry, SchemaCodec
from exactlyonce.pipeline.secrets import is_reference, look_up, reference_problem

TIMEOUT_S = 10
_DEFAULTS = {"timeout": TIMEOUT_S, "max.retries": 0}  # the runtime waits and repeats, as for any outage
_SECRET = re.compile(r"password|secret|token$|user\.info")
_URL = re.compile(r"https?://([\w.-]+|\[[0-9a-fA-F:.]+\])(:\d{1,5})?(/[^\s?#]*)?")


def problems(codec: Codec[Any]) -> Iterator[str]:
    """The mistakes in the settings of the registry of *codec*, if it has one, each with its remedy."""
    registry = codec.registry if isinstance(codec, SchemaCodec) else None
    for name, value in () if registry is None else registry.settings:
        if isinstance(value, str) and (problem := reference_problem(value)):
            yield f"registry= has {name}={value}: {problem}"
        elif _SECRET.search(name) and not (isinstance(value, str) and is_reference(value)):
            yield (
                f"registry= has {name} written out, which is a secret: put it into a variable, 'env:NAME', or into a "
                f"file, 'file:/path'"
            )
        elif not isinstance(value, str | int | float):
            yield f"registry= has a {name} that is neither text nor a number"
        elif name == "url" and not is_reference(str(value)) and (problem := url_problem(str(value))):
            yield f"registry= has a URL that is wrong: {problem}"
    if registry is not None and "url" not in dict(registry.settings):
        yield 'registry= names no URL: write registry="http://host:8081", or a dict with "url"'


def url_problem(urls: str) -> str | None:
    """The problem of one or more URLs, separated by commas, without the URLs, which may hold a password.

    >>> url_problem("http://a:8081,https://b/apis/ccompat/v7"), url_problem("a:8081")
    (None, 'it begins with neither http:// nor https://')
    """
    for url in map(str.strip, urls.split(",")):
        if not re.match("https?://", url):
            return "it begins with neither http:// nor https://"
        if "@" in url:
            return 'it has a login in it: give {"url": ..., "basic.auth.user.info": "env:NAME"} instead'
        if not _URL.fullmatch(url):
            return "it has a host or a port that is none"
    return None


def looked_up(registry: Registry) -> tuple[dict[str, Any], list[str]]:
    """The settings for a client, and the secrets among them. Raises `ConfigError`."""
    settings: dict[str, Any] = dict(_DEFAULTS)
    secrets = []
    for name, value in registry.settings:
        settings[name] = look_up(f"{name} of registry=", value) if isinstance(value, str) else value
        if settings[name] != value:
            secrets.append(settings[name])
    if problem := url_problem(settings["url"]):
        raise ConfigError(f"The url of registry= is wrong: {problem}.")
    return settings, secrets

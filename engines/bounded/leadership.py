"""Leadership: whether somebody leads a pipeline already, and how the driver of a long job shows that it goes on."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone

from exactlyonce.checkpoint.records.history import History
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.engines.bounded.submit import Submit
from exactlyonce.engines.performer import beside
from exactlyonce.engines.processes import is_known_dead
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import ConfigError, TopicError
from exactlyonce.pipeline.names import checkpoint_topic


def history_if_any(client: ClientConfig, pipeline: str) -> History | None:
    """What is decided in *pipeline* by now; None if it has never run."""
    topics = Topics(client)
    try:
        topics.describe([checkpoint_topic(pipeline)])
    except TopicError:
        return None
    finally:
        topics.close()
    return read_history(client.confluent(), pipeline)


def refuse_if_running(history: History | None) -> None:
    """Raise `ConfigError` while somebody runs the pipeline, as far as can be seen; `--take-over` leaves this out."""
    now_ms = SystemClock().now_ms()
    newest = history.living(now_ms) if history is not None else None
    if newest is None or history is None or is_known_dead(newest):
        return
    since_ms = now_ms - newest.heartbeat_ms
    last = datetime.fromtimestamp(newest.heartbeat_ms / 1000, timezone.utc).isoformat(timespec="seconds")
    raise ConfigError(
        f"Pipeline {history.pipeline!r} is running: process {newest.process} on {newest.host}, incarnation "
        f"{newest.incarnation}, last heartbeat at {last}, {since_ms / 1000:.0f} s ago. Stop it first, or take its "
        f"place with --take-over: it then ends without losing anything."
    )


def with_heartbeats(submit: Submit, beat: Callable[[], None]) -> Submit:
    """*submit*, beside which heartbeats go on: see `beside`."""
    return lambda stage, work: beside(beat, lambda _: submit(stage, work))

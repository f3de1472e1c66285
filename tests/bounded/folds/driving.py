"""A driver as a process of its own: `python driving.py SERVERS NAME STAGING PARALLELISM CHUNK`, units run within it."""

from __future__ import annotations

import sys
from pathlib import Path

from bounded import Silent, load_pipeline

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.bounded.catch_up import CatchingUp
from exactlyonce.engines.bounded.submit import in_process
from exactlyonce.engines.options import RunOptions

if __name__ == "__main__":
    servers, name, staging, parallelism, chunk = sys.argv[1:]
    loaded = load_pipeline("bounded_pipelines", "broad", name)
    options = RunOptions(ClientConfig({"bootstrap.servers": servers}), parallelism=int(parallelism))
    CatchingUp(loaded, options, in_process, Path(staging), Silent(), chunk_records=int(chunk)).run()

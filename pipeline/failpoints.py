"""Failpoints: named places in the protocol where a test can make the process die, stop or fail.

Armed by the environment only: `EXACTLYONCE_FAILPOINTS="name=action@nth,..."` with action `kill` (SIGKILL to itself),
`stop` (SIGSTOP) or `raise`; *nth* counts hits from 1. A file per failpoint in the folder `EXACTLYONCE_FAILPOINTS_FIRED`
records that it fired: it never fires again, also in later processes. Unarmed, a hit costs one look-up.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

NAMES = {
    "worker-barrier": "a source subtask has noted Sn and injected the barrier",
    "worker-aligned": "a subtask has all barriers; the synchronous part of its snapshot comes next",
    "unaligned-overtaken": "a barrier has overtaken; the synchronous part of the snapshot comes next",
    "unaligned-captured": "the in-flight records of a subtask are durable; the acknowledgement is not sent",
    "worker-frozen": "the synchronous part is done; no block is written yet",
    "worker-blocks": "the state's blocks are durable; the index is not",
    "worker-flushed": "a sink has flushed its transaction; the acknowledgement is not sent",
    "timed-firing": "an operator has given some results that are due, others are not out",
    "timed-fired": "all results that are due are out; the watermark is not passed on",
    "enrich-asking": "an operator is about to call a service for a batch",
    "enrich-answered": "a service has answered for a batch; nothing of it is passed on",
    "worker-acknowledged": "the acknowledgement is sent",
    "worker-finalized": "a worker knows that a checkpoint is finalized; deferred records are not written",
    "worker-restored": "a worker has restored its state and reads nothing yet",
    "coordinator-triggered": "the barrier is on its way to the workers",
    "coordinator-checked": "all have acknowledged, the broker has confirmed; the manifest is produced, not committed",
    "coordinator-decided": "the manifest is durable; nothing is committed yet",
    "coordinator-committed": "the transactions are committed; the finalized mark is not written",
    "store-committing": "staged rows are about to be committed to a store",
    "request-answered": "a service has answered the requests of a window; the ledger does not say so",
    "store-committed": "a store has the staged rows; the finalized mark is not written",
    "coordinator-finalized": "the finalized mark is durable; group offsets and clean-up come next",
    "coordinator-opened": "the decision log is open and older coordinators are fenced",
    "coordinator-swept": "older transactions are fenced; no worker is started yet",
    "savepoint-written": "the state of a savepoint is written again; the first manifest on it is not",
    "savepoint-removing": "an exported savepoint is no longer one; most of its files are still there",
    "erasing-blocks": "the blocks of an erased pipeline outside of the checkpoint topic are gone",
    "erasing-topic": "its checkpoint topic is gone, and not created again",
    "unit-computed": "a unit of bounded work has written its files and blocks; the driver has no receipt",
    "publication-flushed": "staged output is flushed in an open transaction; the driver has no receipt",
    "advance-computed": "all units of a checkpoint are done; nothing is published",
    "advance-published": "all output is flushed in open transactions; the decision comes next",
    "repair-copied": "a lost transaction is copied; the repair is not recorded",
    "repair-replayed": "a lost transaction is computed again; the repair is not recorded",
    "repair-recorded": "the repair is recorded; its transaction is not committed",
}


class FailpointRaised(Exception):
    """The exception of the action `raise`."""


def _parse(text: str) -> dict[str, tuple[str, int]]:
    armed = {}
    for part in filter(None, text.split(",")):
        name, _, rest = part.partition("=")
        action, _, nth = rest.partition("@")
        if name not in NAMES or action not in ("kill", "stop", "raise"):
            raise ValueError(f"EXACTLYONCE_FAILPOINTS: {part!r} is none of {', '.join(NAMES)} with kill, stop or raise")
        armed[name] = (action, int(nth or 1))
    return armed


_armed = _parse(os.environ.get("EXACTLYONCE_FAILPOINTS", ""))
_hits: dict[str, int] = {}


def hit(name: str) -> None:
    """Pass the failpoint *name*; does nothing unless the environment armed it."""
    if name not in _armed:
        return
    action, nth = _armed[name]
    _hits[name] = _hits.get(name, 0) + 1
    if _hits[name] != nth:
        return
    fired = Path(os.environ["EXACTLYONCE_FAILPOINTS_FIRED"]) / name
    try:
        fired.touch(exist_ok=False)
    except FileExistsError:
        return
    if action == "raise":
        raise FailpointRaised(name)
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # sent to the process, it might take effect later

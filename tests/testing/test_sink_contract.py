"""The contract of a sink: the store of the documentation keeps it; a test misses each rule that is left out."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from exactlyonce.sinks.write_ahead.sink import WriteAheadSink
from exactlyonce.testing.sink_contract import SinkContract, StoreContract

PAGE = Path(__file__).parents[2] / "docs" / "writing-a-sink.md"
STORE, _, CONTRACT = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
KEYED = {"(id INTEGER, ": "(id INTEGER PRIMARY KEY, ", "INSERT INTO orders": "REPLACE INTO orders"}
"""Makes a store of the page's in which a row replaces the one with its id."""


def replaced(code: str, replacements: dict[str, str]) -> str:
    """*code* with another text where each of *replacements* was, which is in one place."""
    for old, new in replacements.items():
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    return code


def contract_of(code: str) -> Any:
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code + CONTRACT, f"the code of {PAGE.name}", "exec", dont_inherit=True), names)
    return names["TestSqliteStore"]


class Hooks:
    """Those that the page leaves out."""

    path: Path
    secret = "hunter2"
    test_a_connection_that_is_cut_within_an_apply = None  # there is none
    test_a_look_beside_a_run = None  # the page's store has no look

    @contextmanager
    def unavailable(self) -> Iterator[None]:
        """A lock that is never let go: it need not be waited for."""
        connect = sqlite3.connect
        with closing(connect(self.path, isolation_level=None)) as db, pytest.MonkeyPatch.context() as patch:
            db.execute("BEGIN EXCLUSIVE")
            patch.setattr(sqlite3, "connect", lambda path, **options: connect(path, **{**options, "timeout": 0.01}))
            yield

    def backup(self) -> Callable[[], None]:
        content = self.path.read_bytes()

        def restore() -> None:
            self.path.write_bytes(content)

        return restore

    def clean_up(self) -> None:
        with closing(sqlite3.connect(self.path)) as db:
            db.execute("VACUUM")


class TestStoreOfThePage(Hooks, contract_of(STORE)):  # type: ignore[misc]  # the page's class has no type here
    ordered = True


class TestStoreWithKeys(Hooks, contract_of(replaced(STORE, KEYED))):  # type: ignore[misc]  # as above
    keyed = True


APPLIED = "ledger = self.ledger(db, entry.pipeline, entry.sink).applied(entry)\n"
BEGIN = 'db.execute("BEGIN IMMEDIATE")'
CONNECT = "with closing(sqlite3.connect(self.path, timeout=1)) as db, db:"
LOOK_FIRST = """ledger = self.ledger(db, entry.pipeline, entry.sink).applied(entry)
        chunks = list(chunks)
        with self.transaction() as db:
"""
ALL_HAVE_LOOKED = """list(chunks)
        (self.path.parent / f"looked-{__import__('os').getpid()}").touch()
        while len([*self.path.parent.glob("looked-*")]) < 4:
            __import__("time").sleep(0.01)"""
"""Four processes apply at once."""
INSERTED = "self.insert(db, chunks)\n            db"
EVERY_STATEMENT = {CONNECT: CONNECT.replace("timeout=1", "timeout=1, isolation_level=None"), BEGIN: "pass"}


class Mutant(NamedTuple):
    """A store that leaves out a rule: the texts that are replaced, the test that fails, and some of what it says."""

    replacements: dict[str, str]
    test: str
    says: str
    given: tuple[str, ...] = ()
    """The case of a test with several."""


MUTANTS = {
    "every statement is its own transaction":
        Mutant(EVERY_STATEMENT, "blocks_that_cannot_be_read", "together or not at all"),
    "a killed process leaves a part":
        Mutant(EVERY_STATEMENT, "a_process_that_dies_within_an_apply", "together or not at all"),
    "a reader sees a part": Mutant(EVERY_STATEMENT, "readers_never_see_a_part", "A reader saw"),
    "rows first, the ledger later": Mutant(
        {INSERTED: "self.insert(db, chunks); db.commit(); __import__('time').sleep(0.01)\n            db"},
        "processes_that_die_at_any_moment", "By the ledger"),
    "the ledger is not looked at": Mutant(
        {"                return False\n": "                ledger = self.ledger(db, entry.pipeline, entry.sink)\n"},
        "a_lost_answer", "What had been committed was committed again"),
    "only the same checkpoint counts as applied": Mutant(
        {APPLIED: "ledger = self.ledger(db, entry.pipeline, entry.sink)\n"
         "            same = ledger.checkpoints.get(entry.subtask) == entry.checkpoint\n"
         "            after = {**ledger.checkpoints, entry.subtask: entry.checkpoint}\n"
         "            ledger = None if same else msgspec.structs.replace(ledger, checkpoints=after)\n"},
        "a_request_that_lands_late", "What had been committed was committed again"),
    "the ledger is looked at before the transaction": Mutant(
        {APPLIED: LOOK_FIRST}, "a_fence_while_a_zombie_applies", "in the middle of an apply, which then went through"),
    "processes are not kept apart": Mutant(
        {APPLIED: LOOK_FIRST.replace("list(chunks)", ALL_HAVE_LOOKED)},
        "commits_at_once_in_processes", "Of two who commit the same at once"),
    "fence notes nothing": Mutant(
        {'db.execute("REPLACE INTO ledger VALUES (?, ?, ?)", (pipeline, sink, ledger.encode()))': "pass"},
        "a_zombie_of_an_older_incarnation", "committed after incarnation 2 had fenced"),
    "fence takes any incarnation": Mutant(
        {".fenced(": "; ledger = msgspec.structs.replace(ledger, incarnation=incarnation); ("},
        "a_zombie_that_fences", "took the ledger's incarnation back"),
    "fence takes any checkpoint topic": Mutant(
        {"incarnation, origin)\n            db":
         "incarnation, self.ledger(db, pipeline, sink).origin or origin)\n            db"},
        "another_checkpoint_topic", "A ledger of another checkpoint topic was taken"),
    "a commit begins the ledger": Mutant(
        {APPLIED: "ledger = self.ledger(db, entry.pipeline, entry.sink)\n"
         "            begun_for = ledger.origin or entry.origin\n"
         "            ledger = msgspec.structs.replace(ledger, origin=begun_for).applied(entry)\n"},
        "a_ledger_that_nobody_has_begun", "A commit began the ledger"),
    "fence begins a ledger of its own": Mutant(
        {"self.ledger(db, pipeline, sink).fenced": "SinkLedger().fenced"},
        "another_run_of_the_same_pipeline", "by pipeline and sink, never by anything of one run"),
    "the ledger is of the pipeline": Mutant(
        {"PRIMARY KEY (pipeline, sink)": "PRIMARY KEY (pipeline)", "AND sink = ?": "AND ? <> ''"},
        "neighbours_in_one_target", "share a row of the ledger", ("shop", "orders-2")),
    "the ledger is of any case": Mutant(
        {"(pipeline, sink, value": "(pipeline COLLATE NOCASE, sink COLLATE NOCASE, value"},
        "neighbours_in_one_target", "share a row of the ledger", ("Shop", "orders")),
    "subtasks share a marker": Mutant(
        {".applied(entry)": ".applied(msgspec.structs.replace(entry, subtask=0))"},
        "two_subtasks_of_one_checkpoint", "the first, says that it had been committed"),
    "the marker is text": Mutant(
        {APPLIED: "ledger = self.ledger(db, entry.pipeline, entry.sink)\n"
         "            is_old = str(entry.checkpoint) <= str(ledger.checkpoints.get(entry.subtask, ''))\n"
         "            ledger = None if is_old else ledger.applied(entry)\n"},
        "many_checkpoints_and_incarnations", "A commit of checkpoint 10, the first, says that it had been committed"),
    "what came before is not compared": Mutant(
        {".applied(entry)": ".applied(msgspec.structs.replace(entry, previous=0))"},
        "the_ledger_is_behind", "rows are missing, and nobody would know"),
    "nothing is no commit": Mutant(
        {INSERTED: f"if not (chunks := list(chunks)):\n                return True\n            {INSERTED}"},
        "nothing_is_a_commit_too", "LedgerBehind"),
    "check empties the ledger": Mutant(
        {'db.execute("CREATE TABLE IF NOT EXISTS ledger': 'db.execute("DROP TABLE IF EXISTS ledger"); '
         'db.execute("CREATE TABLE ledger'},
        "check_may_be_repeated_and_changes_no_rows", "check() emptied the ledger"),
    "check is for the first start": Mutant(
        {"CREATE TABLE IF NOT EXISTS orders": "CREATE TABLE orders"},
        "check_may_be_repeated_and_changes_no_rows", "Of several processes that check at once, some fail"),
    "a database that is away halts": Mutant(
        {"(StoreUnavailable if is_away else StoreError)": "StoreError"},
        "a_store_that_is_away", "only StoreUnavailable"),
    "all errors are the store's":
        Mutant({"except sqlite3.Error": "except Exception"}, "blocks_that_cannot_be_read", "is no fault of the store"),
    "the ledger is kept in memory": Mutant(
        {"found = db.execute": "known = self.__dict__.setdefault('known', {})\n"
         "        if name in known and known[name].origin:\n            return known[name]\n        found = db.execute",
         "return SinkLedger": "known[name] = SinkLedger", "found[0])": "found[0])\n        return known[name]",
         INSERTED: f"self.known[entry.pipeline, entry.sink] = ledger\n            {INSERTED}"},
        "a_store_that_was_restored", "The store lost checkpoint 2 to a restore"),
    "rows have no end": Mutant({' + b"\\n"': ""}, "rows_joined_in_any_way", "must show where it ends"),
    "rows end in what they may hold": Mutant(
        {'msgspec.json.encode((order.id, order.customer, order.total)) + b"\\n"':
         'f"{order.id},{order.customer},{order.total}\\n".encode()',
         "map(msgspec.json.decode, chunk.splitlines())": "(line.decode().split(',') for line in chunk.splitlines())"},
        "awkward_rows", "must show where it ends"),
    "rows in another order": Mutant(
        {"chunk.splitlines()": "chunk.splitlines()[::-1]"}, "the_last_of_a_key_counts", "an older state of a key"),
    "encoding writes": Mutant(
        {"        return [msgspec": "        with self.transaction() as db:\n"
         "            db.executemany('INSERT INTO orders VALUES (?, ?, ?)', map(msgspec.structs.astuple, records))\n"
         "        return [msgspec"},
        "encoding_is_pure", "Encoding wrote to the target"),
    "anything is encoded": Mutant(
        {"abs(order.id) >= 2**63 or abs(order.total) >= 2**63": "abs(order.id) >= 2**63"},
        "records_that_do_not_fit", "the store refuses it"),
    "close is the end": Mutant(
        {'"""Every transaction has a connection of its own."""': "self.path = None"}, "close_and_go_on", "NoneType"),
    "one thread has the connection": Mutant(
        {CONNECT: "self.db = self.__dict__.get('db') or sqlite3.connect(self.path)\n            with self.db as db:"},
        "another_thread", "made in one thread, and used in another"),
    "write moves the marker": Mutant(
        {"    def write(self, chunks):\n        with self.transaction() as db:\n":
         "    def write(self, chunks):\n        with self.transaction() as db:\n"
         "            db.execute(\"UPDATE ledger SET value = replace(value, '{}', '{\\\"0\\\":1}')\")\n"},
        "writing_without_the_ledger", "write moves no marker"),
    "a description of one process":
        Mutant({'"table": "orders"}': '"at": id(self)}'}, "the_description_is_data", "differs from one process"),
    "the password is in the error": Mutant(
        {'f"{self.path}: {error}."': 'f"sqlite://me:hunter2@{self.path}: {error}."'},
        "secrets_show_nowhere", "shows in"),
}  # fmt: skip


@pytest.mark.parametrize("rule", MUTANTS)
def test_a_rule_that_is_left_out_is_missed(rule: str, tmp_path: Path) -> None:
    mutant = MUTANTS[rule]
    contract = type("TestMutant", (Hooks, contract_of(replaced(STORE, mutant.replacements))), {"ordered": True})()
    contract.path, contract._to_close = tmp_path / "orders.db", []
    with pytest.raises(Exception, match=re.escape(mutant.says)):
        getattr(contract, f"test_{mutant.test}")(*mutant.given)


def test_all_that_a_sink_promises_is_asked_of_a_store() -> None:
    assert issubclass(StoreContract, SinkContract)
    assert issubclass(contract_of(STORE), StoreContract)
    assert not hasattr(SinkContract, "store")
    assert hasattr(WriteAheadSink, "store")

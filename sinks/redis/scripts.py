"""The Lua scripts: a part of a committable and its ledger entry, applied in one atomic step.

A script that writes a ledger compares and sets: it gets what its caller has judged by the rules of `sinks.ledger`, and
answers with what it found where that has changed. Invariant: a script that has written cannot fail, for Redis would
keep the writes before the failure. So ledger, types of keys and room in streams are checked first. A refusal for want
of memory, disk or rights comes at the first write, which is the ledger's, and changes nothing that counts. All keys are
declared, so that rights and slots are checked before.

A ledger is a hash: the sink's `origin` and `incarnation`, and by subtask, as of 3, `3:checkpoint`, the last one applied
whole, `3:incarnation`, its writer, and `3:part`, "checkpoint rows" of a partly applied one.
"""

from __future__ import annotations

from typing import NamedTuple

LEDGER_PREFIX = "exactlyonce_ledger:"


def ledger_prefix(hash_tag: str | None) -> str:
    """The prefix of the keys of ledgers with this hash tag."""
    return LEDGER_PREFIX + (f"{{{hash_tag}}}:" if hash_tag else "")


def ledger_key(pipeline: str, sink: str, hash_tag: str | None) -> str:
    """The key of a sink's ledger."""
    return f"{ledger_prefix(hash_tag)}{pipeline}:{sink}"


_UNCHANGED = """
local ledger, subtask = KEYS[1], ARGV[1]
local held = redis.call('HMGET', ledger, 'origin', 'incarnation', subtask .. ':checkpoint', subtask .. ':part')
held = {held[1] or '', held[2] or '0', held[3] or '0', held[4] or ''}
for i = 1, 4 do
  if held[i] ~= ARGV[1 + i] then return {'changed', held} end
end
"""

_FENCE = """
redis.call('HSET', ledger, 'incarnation', ARGV[6], 'origin', ARGV[7])
return {'done', redis.call('HGETALL', ledger)}
"""

_TOUCH = """
redis.call('HSET', ledger, subtask .. ':incarnation', ARGV[6])
"""

_RIGHTS = """
local missing = {}
if redis.acl_check_cmd then
  for i = 1, #ARGV do
    local words = {}
    for word in string.gmatch(ARGV[i], '%S+') do words[#words + 1] = word == 'KEY' and KEYS[1] or word end
    if not redis.acl_check_cmd(unpack(words)) then missing[#missing + 1] = ARGV[i] end
  end
end
return missing
"""

_ROWS_WITH_LEDGER = "local key, argument = 2, 9\n"
_ROWS_ALONE = "local key, argument = 1, 1\n"

_APPLIED = """
if ARGV[8] == '' then
  redis.call('HSET', ledger, subtask .. ':checkpoint', ARGV[7])
  redis.call('HDEL', ledger, subtask .. ':part')
else
  redis.call('HSET', ledger, subtask .. ':part', ARGV[8])
end
"""

_DONE = "return {'done'}"

_TYPES = """
for i = key, #KEYS do
  local found = redis.call('TYPE', KEYS[i]).ok
  if found ~= 'none' and found ~= '%s' then return {'type', KEYS[i], found} end
end
"""

_ROOM = """
for i = key, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 1 then
    local about = redis.call('XINFO', 'STREAM', KEYS[i])
    for j = 1, #about, 2 do
      if about[j] == 'last-generated-id' and about[j + 1] == '18446744073709551615-18446744073709551615' then
        return {'full', KEYS[i]}
      end
    end
  end
end
"""

_STRINGS = """
for i = argument, #ARGV do
  redis.call('SET', KEYS[key], ARGV[i])
  key = key + 1
end
for i = key, #KEYS do redis.call('DEL', KEYS[i]) end
"""

_HASHES = """
local function by_thousands(command, name, first, after)
  for i = first, after - 1, 2000 do redis.call(command, name, unpack(ARGV, i, math.min(i + 2000, after) - 1)) end
end
local count = #ARGV
while argument <= count do
  local name, set = KEYS[key + tonumber(ARGV[argument])], tonumber(ARGV[argument + 1])
  argument = argument + 2
  if set < 0 then
    redis.call('DEL', name)
  else
    by_thousands('HSET', name, argument, argument + set)
    argument = argument + set
    local deleted = tonumber(ARGV[argument])
    by_thousands('HDEL', name, argument + 1, argument + 1 + deleted)
    argument = argument + 1 + deleted
  end
end
"""

_ENTRIES = """
local count, maxlen = #ARGV, ARGV[argument]
argument = argument + 1
while argument <= count do
  local name, after = KEYS[key + tonumber(ARGV[argument])], argument + 2 + tonumber(ARGV[argument + 1])
  if maxlen == '' then
    redis.call('XADD', name, '*', unpack(ARGV, argument + 2, after - 1))
  else
    redis.call('XADD', name, 'MAXLEN', '~', maxlen, '*', unpack(ARGV, argument + 2, after - 1))
  end
  argument = after
end
"""


class Script(NamedTuple):
    """A script, and the commands that a user needs for it."""

    text: str
    commands: tuple[str, ...] = ()
    """As they are called, KEY in the place of a key."""


_LEDGER_COMMANDS = ("HMGET KEY a", "HGETALL KEY", "HSET KEY a b", "HDEL KEY a")
_ROWS = {
    "string": Script(_STRINGS, ("SET KEY a", "DEL KEY")),
    "hash": Script(_HASHES, ("TYPE KEY", "HSET KEY a b", "HDEL KEY a", "DEL KEY")),
    "stream": Script(_ENTRIES, ("TYPE KEY", "EXISTS KEY", "XINFO STREAM KEY", "XADD KEY * a b")),
}
_CHECKS = {"string": "", "hash": _TYPES % "hash", "stream": _TYPES % "stream" + _ROOM}

KINDS = tuple(_ROWS)
RIGHTS = Script(_RIGHTS)
FENCE = Script(_UNCHANGED + _FENCE)
"""KEYS[1] is the ledger; ARGV are an empty subtask, the sink's ledger as it was judged, and its new incarnation and
origin."""
TOUCH = Script(_UNCHANGED + _TOUCH + _DONE)
"""Writes nothing that counts, so that WAITAOF waits for all before it; ARGV[1] to [6] as of `APPLY`."""
APPLY = {
    kind: Script(
        _UNCHANGED + _ROWS_WITH_LEDGER + _CHECKS[kind] + _TOUCH + rows.text + _APPLIED + _DONE,
        (*_LEDGER_COMMANDS, *rows.commands),
    )
    for kind, rows in _ROWS.items()
}
"""By kind. KEYS are the ledger and the distinct keys of the part. ARGV are the subtask; origin, incarnation, checkpoint
and part as they were judged; the writer's incarnation, the checkpoint, and the new part, empty with the last rows; then
the rows (`rows.Part`)."""
WRITE = {kind: Script(_ROWS_ALONE + _CHECKS[kind] + rows.text + _DONE, rows.commands) for kind, rows in _ROWS.items()}
"""By kind: the same without a ledger."""

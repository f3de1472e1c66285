"""The Lua scripts: a part of a committable and its ledger entry, applied in one step that no other client sees into.

Invariant: a script that has written fails no more. Redis keeps what a failed script wrote before it failed, so whatever
could fail is looked at first: the ledger, the type of every key, the room that a stream has left. What the server
itself refuses, for want of memory, of disk, of a right, or because it is a replica, it refuses at the first write; that
is the ledger's, and changes nothing that counts. All keys are declared, so that rights and slots are checked before.

A ledger is a hash. `origin` and `incarnation` are those of who may write; by subtask, `3:checkpoint` is the last one
applied whole, by `3:incarnation`, and `3:part` is "checkpoint rows" of one applied so far.
"""

from __future__ import annotations

from typing import NamedTuple

LEDGER_PREFIX = "exactlyonce_ledger:"


def ledger_prefix(hash_tag: str | None) -> str:
    """What the keys of ledgers begin with that lie where the tag says."""
    return LEDGER_PREFIX + (f"{{{hash_tag}}}:" if hash_tag else "")


def ledger_key(pipeline: str, sink: str, hash_tag: str | None) -> str:
    """The key of a sink's ledger."""
    return f"{ledger_prefix(hash_tag)}{pipeline}:{sink}"


_FENCE = """
local origin = redis.call('HGET', KEYS[1], 'origin')
if origin and origin ~= ARGV[2] then return {'foreign', origin} end
local writer = redis.call('HGET', KEYS[1], 'incarnation')
if writer and tonumber(writer) > tonumber(ARGV[1]) then return {'fenced', writer} end
redis.call('HSET', KEYS[1], 'incarnation', ARGV[1], 'origin', ARGV[2])
return {'open', redis.call('HGETALL', KEYS[1])}
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

_LEDGER = """
local ledger, subtask = KEYS[1], ARGV[1]
local checkpoint, incarnation, previous = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local from, to, last = tonumber(ARGV[5]), ARGV[6], ARGV[7] == '1'
local held = redis.call('HMGET', ledger, 'incarnation', subtask .. ':checkpoint', subtask .. ':part', 'origin')
if held[4] ~= ARGV[8] then return {'foreign', held[4] or ''} end
if held[1] and tonumber(held[1]) > incarnation then return {'fenced', held[1]} end
local done, part, rows = tonumber(held[2] or 0), 0, 0
if held[3] then
  part, rows = string.match(held[3], '^(%d+) (%d+)$')
  part, rows = tonumber(part), tonumber(rows)
end
if done < checkpoint then
  if done < previous or (held[3] and part ~= checkpoint) then return {'behind', done} end
  if rows ~= from then return {'at', rows} end
end
local key, argument = 2, 9
"""

_TOUCH = """
redis.call('HSET', ledger, subtask .. ':incarnation', ARGV[3])
if done >= checkpoint then return {'already', done} end
"""

_DONE = """
if last then
  redis.call('HSET', ledger, subtask .. ':checkpoint', ARGV[2])
  if held[3] then redis.call('HDEL', ledger, subtask .. ':part') end
else
  redis.call('HSET', ledger, subtask .. ':part', ARGV[2] .. ' ' .. to)
end
return {'applied', to}
"""

_NO_LEDGER = "local key, argument = 1, 1\n"

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
    """A script, and what of it a user has to be allowed."""

    text: str
    commands: tuple[str, ...] = ()
    """As they are called, KEY in the place of a key."""


_OF_LEDGER = ("HMGET KEY a", "HGET KEY a", "HGETALL KEY", "HSET KEY a b", "HDEL KEY a")
_ROWS = {
    "string": Script(_STRINGS, ("SET KEY a", "DEL KEY")),
    "hash": Script(_HASHES, ("TYPE KEY", "HSET KEY a b", "HDEL KEY a", "DEL KEY")),
    "stream": Script(_ENTRIES, ("TYPE KEY", "EXISTS KEY", "XINFO STREAM KEY", "XADD KEY * a b")),
}
_LOOK = {"string": "", "hash": _TYPES % "hash", "stream": _TYPES % "stream" + _ROOM}

KINDS = tuple(_ROWS)
FENCE = Script(_FENCE)
RIGHTS = Script(_RIGHTS)
APPLY = {
    kind: Script(_LEDGER + _LOOK[kind] + _TOUCH + rows.text + _DONE, (*_OF_LEDGER, *rows.commands))
    for kind, rows in _ROWS.items()
}
"""By kind: KEYS are the ledger and the distinct keys of the part; ARGV are subtask, checkpoint, incarnation, previous,
rows before the part, rows with it, whether it is the last, origin; then, by kind, the rows (`rows.Part`)."""
WRITE = {kind: Script(_NO_LEDGER + _LOOK[kind] + rows.text + "return {'applied'}", rows.commands)
         for kind, rows in _ROWS.items()}  # fmt: skip
"""The same without a ledger."""

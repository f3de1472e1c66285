"""What a pipeline is like from outside, for commands, pages and programs. Nothing here changes anything.

Programs have `StateReader`; the modules are read models of commands, and `doctor/` finds faults around a pipeline. May
import `engines` and everything below it; `cli` imports it. Each name is imported on first use.
"""

from typing import TYPE_CHECKING

from exactlyonce.pipeline.first_use import on_first_use

if TYPE_CHECKING:
    from exactlyonce.engines.savepoints.shown_state import KeyView, TimedKeyView
    from exactlyonce.engines.savepoints.state_reader import Found, StateReader

__all__ = ["Found", "KeyView", "StateReader", "TimedKeyView"]

_MODULES = {
    "Found": "engines.savepoints.state_reader",
    "KeyView": "engines.savepoints.shown_state",
    "StateReader": "engines.savepoints.state_reader",
    "TimedKeyView": "engines.savepoints.shown_state",
}

if not TYPE_CHECKING:  # else mypy would accept any name
    __getattr__ = on_first_use(globals(), "exactlyonce", _MODULES)

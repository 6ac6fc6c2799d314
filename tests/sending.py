"""What public objects are once they were copied, pickled and sent: one law for every dist."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from kvcache_rag import KVCacheRagError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_CHILD = """
import pickle, sys
answers = {}
for name, (data, asked) in pickle.load(sys.stdin.buffer).items():
    answers[name] = eval(asked, {"value": pickle.loads(data), "pickle": pickle})
sys.stdout.buffer.write(b"\\n--answers--\\n" + pickle.dumps(answers))
"""


@dataclass(frozen=True)
class Row:
    """A public object, and what is equal afterwards."""

    made: Callable[[], Any]  # makes it, opened and used
    # An expression over `value` and `pickle` that has one value, whichever copy is asked.
    asked: str = "value"
    refused: str = ""  # what is said where it cannot be sent; "" where it can
    is_copied: bool = True  # by `copy` and `deepcopy`, although it cannot be sent

    def says(self, value: Any) -> Any:
        """What an object answers."""
        return eval(self.asked, {"value": value, "pickle": pickle})


COPIES: dict[str, Callable[[Any], Any]] = {"copy": copy.copy, "deepcopy": copy.deepcopy}


def check_here(row: Row) -> None:
    """Copies in this process equal the object, or are refused in one sentence."""
    value = row.made()
    expected = row.says(value)
    for copied in COPIES.values():
        if row.refused and not row.is_copied:
            with pytest.raises(KVCacheRagError, match=row.refused):
                copied(value)
        else:
            assert row.says(copied(value)) == expected
    if row.refused:
        with pytest.raises(KVCacheRagError, match=row.refused) as told:
            pickle.dumps(value)
        assert "\n" not in str(told.value)
    else:
        assert row.says(pickle.loads(pickle.dumps(value))) == expected


def check_elsewhere(rows: Mapping[str, Row]) -> None:
    """What can be sent is equal in a new process, which has imported nothing."""
    values = {name: row.made() for name, row in rows.items() if not row.refused}
    expected = {name: rows[name].says(one) for name, one in values.items()}
    sent = {name: (pickle.dumps(one), rows[name].asked) for name, one in values.items()}
    command = [sys.executable, "-c", _CHILD]
    done = subprocess.run(command, input=pickle.dumps(sent), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    found = pickle.loads(done.stdout.partition(b"\n--answers--\n")[2])
    assert found == expected

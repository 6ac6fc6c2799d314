"""The same laws as in `test_stores_machine.py`, over longer and more stories."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.machines import MACHINES, StoreMachine

EXAMPLES = {"MemoryMachine": 450, "DiskMachine": 240, "TieredMachine": 240}
OTHERS = 30  # each call to a remote goes through a thread


@pytest.mark.parametrize("machine", MACHINES)
def test_a_store_does_what_a_dictionary_does(machine: type[StoreMachine]) -> None:
    examples = EXAMPLES.get(machine.__name__, OTHERS)
    long = settings(max_examples=examples, stateful_step_count=60, deadline=None)
    run_state_machine_as_test(machine, settings=long)

"""Every store does what its dictionary does, whatever is done in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.machines import MACHINES, StoreMachine

EXAMPLES = {"MemoryMachine": 80, "DiskMachine": 40, "TieredMachine": 40}
OTHERS = 10


@pytest.mark.parametrize("machine", MACHINES)
def test_a_store_does_what_a_dictionary_does(machine: type[StoreMachine]) -> None:
    examples = EXAMPLES.get(machine.__name__, OTHERS)
    brief = settings(max_examples=examples, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(machine, settings=brief)

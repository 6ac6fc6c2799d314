"""Every store does what its dictionary does, whatever is done in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.machines import MACHINES, StoreMachine

EXAMPLES = {"MemoryMachine": 25, "DiskMachine": 12, "TieredMachine": 12}  # soak/ takes many
OTHERS = 5


@pytest.mark.parametrize("machine", MACHINES)
def test_a_store_does_what_a_dictionary_does(machine: type[StoreMachine]) -> None:
    examples = EXAMPLES.get(machine.__name__, OTHERS)
    brief = settings(
        max_examples=examples,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],  # on a machine that is busy
    )
    run_state_machine_as_test(machine, settings=brief)

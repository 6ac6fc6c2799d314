"""The same laws as in `test_stores_machine.py`, over longer and more stories."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.machines import MACHINES, StoreMachine
from tests.reliability import record

if TYPE_CHECKING:
    from tests.soak.conftest import Amount

pytestmark = pytest.mark.timeout(1200)
EXAMPLES = {"MemoryMachine": (100, 450), "DiskMachine": (60, 240), "TieredMachine": (60, 240)}
STEPS = 60  # of one story
OTHERS = 10, 30  # each call to a remote goes through a thread


@pytest.mark.parametrize("machine", MACHINES)
def test_a_store_does_what_a_dictionary_does(machine: type[StoreMachine], amount: Amount) -> None:
    examples = amount(*EXAMPLES.get(machine.__name__, OTHERS))
    long = settings(max_examples=examples, stateful_step_count=STEPS, deadline=None)
    run_state_machine_as_test(machine, settings=long)
    name = machine.__name__.removesuffix("Machine").lower()
    tried = f"stories of up to {STEPS} steps with the store `{name}`, beside a dictionary"
    record(f"models-{name}", "models", tried, examples, different_answers=0)

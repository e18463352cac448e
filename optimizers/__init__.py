"""Update rules, one per file, and the places where their state lives."""

from optimizers.on_cpu import OnCPU
from optimizers.on_device import OnDevice
from optimizers.on_disk import OnDisk
from optimizers.optimizer import Optimizer
from optimizers.rules import rule_of

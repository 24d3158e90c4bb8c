"""Configurations of other systems, read as a `Manual`: what people train with today, to be compared with the automatic plan.

Megatron-LM arguments, torchtitan TOML, DeepSpeed JSON, NeMo YAML and nanotron YAML. Nothing is ignored in silence: a setting is read,
or is known not to matter for a plan (each reader lists those), or is reported as left out or unknown. Degrees that a `Manual` cannot
hold are an error, since the row would be of another run.
"""

from autopar.importers.deepspeed import read_deepspeed
from autopar.importers.megatron import read_megatron
from autopar.importers.nanotron import read_nanotron
from autopar.importers.nemo import read_nemo
from autopar.importers.record import Imported
from autopar.importers.torchtitan import read_torchtitan

__all__ = ["Imported", "read_deepspeed", "read_megatron", "read_nanotron", "read_nemo", "read_torchtitan"]

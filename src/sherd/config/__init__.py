"""Frozen, validated options.

`options` (the base of every option class, and what checks options), `environment` (values of variables), `comm` and
`training` (what a user says about the communicator, about steps and about loaders).
"""

from sherd.config.comm import CHUNK_ALIGNMENT as CHUNK_ALIGNMENT
from sherd.config.comm import TRANSPORTS as TRANSPORTS
from sherd.config.comm import CommOptions as CommOptions
from sherd.config.environment import flag_from_env as flag_from_env
from sherd.config.options import Options as Options
from sherd.config.options import at_least as at_least
from sherd.config.options import multiple_of as multiple_of
from sherd.config.options import one_of as one_of
from sherd.config.options import positive as positive
from sherd.config.options import refuse as refuse
from sherd.config.training import HALF_PRECISIONS as HALF_PRECISIONS
from sherd.config.training import LoaderOptions as LoaderOptions
from sherd.config.training import LossScale as LossScale
from sherd.config.training import StepOptions as StepOptions
